//! Names of devices, and of places where memory lies, as the field writes them. Fixed size, no heap.

use core::fmt;
use core::str::FromStr;

use crate::batch::MemoryKind;

/// The longest name in bytes; the kernel's longest names of RDMA devices and of network interfaces fit.
pub const NAME_MAX: usize = 64;

/// A device's name: 1 to [`NAME_MAX`] visible ASCII characters.
///
/// ```
/// use millpond_core::topology::Name;
/// let name: Name = "mlx5_0".parse().unwrap();
/// assert_eq!(name.as_str(), "mlx5_0");
/// assert!("two words".parse::<Name>().is_err());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// Zero after `len`.
    bytes: [u8; NAME_MAX],
    len: u8,
}

/// A text that is no name of a device or place.
///
/// ```
/// use millpond_core::topology::{BadName, Name, Place};
/// assert_eq!("".parse::<Name>(), Err(BadName::Device));
/// assert_eq!("cpu".parse::<Place>(), Err(BadName::Place));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadName {
    /// Not 1 to [`NAME_MAX`] visible ASCII characters.
    Device,
    /// Neither `*` nor a word, a colon and a number.
    Place,
}

impl fmt::Display for BadName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => write!(f, "a device's name is 1 to {NAME_MAX} visible ASCII characters"),
            Self::Place => f.write_str("a place is `*`, or a word and a number such as cpu:0 or cuda:3"),
        }
    }
}

impl core::error::Error for BadName {}

impl Name {
    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        // Only visible ASCII gets in, so it is text.
        core::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

impl FromStr for Name {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let mut bytes = [0; NAME_MAX];
        let is_good = !text.is_empty() && text.len() <= NAME_MAX && text.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_good {
            return Err(BadName::Device);
        }
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Ok(Self { bytes, len: u8::try_from(text.len()).map_err(|_| BadName::Device)? })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// Where memory lies: `cpu:N` (host memory on NUMA node N), `cuda:N`, `hip:N` or another vendor's word with the index of a
/// device, or `*`, anywhere.
///
/// ```
/// use millpond_core::batch::MemoryKind;
/// use millpond_core::topology::Place;
/// let place: Place = "cuda:3".parse().unwrap();
/// assert_eq!((place.word(), place.index()), ("cuda", Some(3)));
/// assert_eq!(Place::of(MemoryKind::Cuda { device: 3 }, None), place);
/// assert_eq!(Place::of(MemoryKind::Host, None), Place::ANY);
/// assert!("cuda:03".parse::<Place>().is_err()); // one place, one name
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(Name);

/// Appends decimal digits to a name.
struct Writer(Name);

impl fmt::Write for Writer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let at = usize::from(self.0.len);
        let end = at + text.len();
        self.0.bytes.get_mut(at..end).ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.0.len = u8::try_from(end).map_err(|_| fmt::Error)?;
        Ok(())
    }
}

impl Place {
    /// Anywhere: what holds for places that have no line of their own.
    pub const ANY: Self = {
        let mut bytes = [0; NAME_MAX];
        bytes[0] = b'*';
        Self(Name { bytes, len: 1 })
    };

    /// Device or node `index` of the sort `word`: lower-case letters, digits and `_`, beginning with a letter.
    pub fn new(word: &str, index: u32) -> Result<Self, BadName> {
        let mut writer = Writer(Name { bytes: [0; NAME_MAX], len: 0 });
        fmt::write(&mut writer, format_args!("{word}:{index}")).map_err(|_| BadName::Place)?;
        writer.0.as_str().parse()
    }

    /// Host memory on NUMA node `node`.
    #[must_use]
    pub fn cpu(node: u32) -> Self {
        Self::new("cpu", node).unwrap_or(Self::ANY)
    }

    /// Where memory of this kind lies, in host memory's case on NUMA node `node` if that is known.
    #[must_use]
    pub fn of(memory: MemoryKind, node: Option<u32>) -> Self {
        match memory {
            MemoryKind::Cuda { device } => Self::new("cuda", device.into()).unwrap_or(Self::ANY),
            MemoryKind::Hip { device } => Self::new("hip", device.into()).unwrap_or(Self::ANY),
            _ => node.map_or(Self::ANY, Self::cpu),
        }
    }

    /// What stands before the colon; `*` for anywhere.
    #[must_use]
    pub fn word(&self) -> &str {
        self.as_str().split(':').next().unwrap_or_default()
    }

    /// The number after the colon; `None` for anywhere.
    #[must_use]
    pub fn index(&self) -> Option<u32> {
        self.as_str().split(':').nth(1)?.parse().ok()
    }

    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl FromStr for Place {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let name: Name = text.parse().map_err(|_| BadName::Place)?;
        if text == "*" {
            return Ok(Self(name));
        }
        let (word, index) = text.split_once(':').ok_or(BadName::Place)?;
        let is_word = word.starts_with(|first: char| first.is_ascii_lowercase())
            && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
        let is_number = index.bytes().all(|byte| byte.is_ascii_digit())
            && index.parse::<u32>().is_ok()
            && (index.len() == 1 || !index.starts_with('0'));
        if is_word && is_number { Ok(Self(name)) } else { Err(BadName::Place) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_has_one_spelling() {
        for good in ["*", "cpu:0", "cuda:15", "nvlink_intra:4294967295", "npu:10"] {
            assert_eq!(good.parse::<Place>().expect("a place").as_str(), good);
        }
        for bad in [
            "",
            "cpu",
            "cpu:",
            ":0",
            "cpu:-1",
            "cpu:+1",
            "cpu:01",
            "CPU:0",
            "cpu:0:0",
            "cpu:4294967296",
            "**",
            "c pu:0",
        ] {
            assert_eq!(bad.parse::<Place>(), Err(BadName::Place), "{bad:?}");
        }
    }

    #[test]
    fn a_name_at_its_longest_fits_and_one_more_does_not() {
        let text = [b'a'; NAME_MAX + 1];
        let text = core::str::from_utf8(&text).expect("ASCII");
        assert_eq!(text[..NAME_MAX].parse::<Name>().expect("it fits").as_str(), &text[..NAME_MAX]);
        assert_eq!(text.parse::<Name>(), Err(BadName::Device));
        assert_eq!(Place::new(&text[..NAME_MAX - 1], 0), Err(BadName::Place));
    }

    #[test]
    fn names_are_ordered_as_their_texts_are() {
        let name = |text: &str| text.parse::<Name>().expect("a name");
        assert!(name("eth10") < name("eth2") && name("eth") < name("eth0") && name("a") < name("b"));
    }
}
