//! The messages of a hello, in fixed layout, and what bytes that are no hello look like.
//!
//! Every message starts with the same 16 bytes (magic, length, kind, versions) so that versions yet to come can be told
//! apart and refused in words. This module only reads and writes; who says what when is in `session`. Invariants: all
//! numbers are little-endian; a message may be longer than this version knows (the rest is ignored, but authenticated).

use core::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::HELLO_LEN_MAX;

/// The first bytes of every message: not text, and damaged by anything that translates line ends.
pub const MAGIC: [u8; 8] = *b"\x8fMLPND\r\n";

/// Bytes that say how long a message is.
pub const PREFIX_LEN: usize = size_of::<Prefix>();

/// A message's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// The dialer's first words.
    Hello = 1,
    /// The acceptor's nonce and proof, if a key is used.
    Challenge = 2,
    /// The dialer's proof.
    Proof = 3,
    /// The acceptor's identity; the session begins.
    Welcome = 4,
    /// The end, with a reason.
    Refusal = 5,
}

impl Message {
    const ALL: [Self; 5] = [Self::Hello, Self::Challenge, Self::Proof, Self::Welcome, Self::Refusal];

    /// Shortest length: what this version writes.
    pub(super) const fn len(self) -> usize {
        PREFIX_LEN
            + match self {
                Self::Hello => size_of::<HelloBody>(),
                Self::Challenge => size_of::<ChallengeBody>(),
                Self::Proof => MAC_LEN,
                Self::Welcome => size_of::<WelcomeBody>(),
                Self::Refusal => size_of::<RefusalBody>(),
            }
    }
}

pub(super) const MAC_LEN: usize = 32;

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Prefix {
    magic: [u8; 8],
    len: U16,
    message: u8,
    reserved: u8,
    version_min: U16,
    version_max: U16,
}

impl Prefix {
    pub(super) fn new(message: Message, len: usize, versions: Versions) -> Self {
        Self {
            magic: MAGIC,
            len: u16::try_from(len).unwrap_or(u16::MAX).into(),
            message: message as u8,
            reserved: 0,
            version_min: versions.min.into(),
            version_max: versions.max.into(),
        }
    }

    /// Kind, whole length and versions; `None` if the message makes no sense.
    pub(super) fn read(bytes: &[u8; PREFIX_LEN]) -> Option<(Message, usize, Versions)> {
        let prefix: Self = zerocopy::transmute!(*bytes);
        let message = Message::ALL.into_iter().find(|message| *message as u8 == prefix.message)?;
        let (len, versions) =
            (usize::from(prefix.len.get()), Versions { min: prefix.version_min.get(), max: prefix.version_max.get() });
        let sound = prefix.magic == MAGIC && (message.len()..=HELLO_LEN_MAX).contains(&len);
        sound.then_some((message, len, versions))
    }
}

/// The versions of the protocol that a node speaks.
///
/// ```
/// use millpond_core::wire::hello::Versions;
/// assert_eq!(Versions { min: 1, max: 4 }.common(Versions { min: 3, max: 9 }), Some(4));
/// assert_eq!(Versions { min: 1, max: 2 }.common(Versions { min: 3, max: 9 }), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The oldest.
    pub min: u16,
    /// The newest.
    pub max: u16,
}

impl Versions {
    /// What this code speaks.
    pub const OURS: Self = Self { min: super::VERSION_MIN, max: super::VERSION };

    /// The newest that both speak.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u16> {
        let newest = self.max.min(other.max);
        (newest >= self.min.max(other.min)).then_some(newest)
    }
}

/// What a connection is for.
///
/// ```
/// use millpond_core::wire::hello::Purpose;
/// assert_ne!(Purpose::Control, Purpose::Lane { index: 0, generation: 1 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Messages.
    Control,
    /// Data frames.
    Lane {
        /// Which of the dialer's lanes to this node.
        index: u8,
        /// How often that lane was dialed, from 1; a larger one replaces the connections before it.
        generation: u64,
    },
    /// Nothing but the replacement: the acceptor drops what it has of that lane before it welcomes, so that nothing of older
    /// generations is applied any more; then the dialer closes. For a lane that was lost and cannot be dialed where it was.
    Fence {
        /// Which of the dialer's lanes to this node, over whatever transport.
        index: u8,
        /// A number from the same count as those of lanes.
        generation: u64,
    },
    /// What two ends say to each other to join a NIC of each (`wire::message::rail`); lasts as long as that link.
    Rail {
        /// Which of the dialer's lanes to this node.
        index: u8,
        /// As a lane's.
        generation: u64,
    },
}

impl Purpose {
    const fn code(self) -> (u8, u8, u64) {
        match self {
            Self::Control => (1, 0, 0),
            Self::Lane { index, generation } => (2, index, generation),
            Self::Fence { index, generation } => (3, index, generation),
            Self::Rail { index, generation } => (4, index, generation),
        }
    }

    const fn from_code(code: u8, index: u8, generation: u64) -> Option<Self> {
        match (code, index, generation) {
            (1, 0, 0) => Some(Self::Control),
            (2, index, generation) => Some(Self::Lane { index, generation }),
            (3, index, generation) => Some(Self::Fence { index, generation }),
            (4, index, generation) => Some(Self::Rail { index, generation }),
            _ => None,
        }
    }
}

/// Which host a process runs on, as far as sharing memory is concerned. Zeros mean unknown.
///
/// ```
/// use millpond_core::wire::hello::HostIdentity;
/// let here = HostIdentity { boot: [1; 16], namespaces: [2, 3, 4] };
/// assert!(here.is_same_host(&here));
/// assert!(!HostIdentity::UNKNOWN.is_same_host(&HostIdentity::UNKNOWN));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostIdentity {
    /// The kernel's boot id.
    pub boot: [u8; 16],
    /// Inode numbers of the network, process and mount namespaces.
    pub namespaces: [u64; 3],
}

impl HostIdentity {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self { boot: [0; 16], namespaces: [0; 3] };

    /// Whether both run under one kernel and in the same namespaces, so that shared memory can join them.
    #[must_use]
    pub fn is_same_host(&self, other: &Self) -> bool {
        self.boot != [0; 16] && self == other
    }
}

/// Who a node is.
///
/// ```
/// use millpond_core::wire::hello::{HostIdentity, Identity};
/// let me = Identity { node: [1; 16], incarnation: 7, host: HostIdentity::UNKNOWN };
/// assert_eq!(me.incarnation, 7);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Stable id.
    pub node: [u8; 16],
    /// New at each start, growing.
    pub incarnation: u64,
    /// Where it runs.
    pub host: HostIdentity,
}

impl Identity {
    /// The stable id of the node that is called `name`; names are unique in a cluster.
    ///
    /// ```
    /// use millpond_core::wire::hello::Identity;
    /// assert_ne!(Identity::id_of("store-0"), Identity::id_of("store-1"));
    /// ```
    #[must_use]
    pub fn id_of(name: &str) -> [u8; 16] {
        let digest = blake3::derive_key("millpond node id v1", name.as_bytes());
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, ..] = digest;
        [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
    }
}

/// The KV layout of a node that has one, as fields, so that a mismatch can be named.
///
/// ```
/// use millpond_core::wire::hello::{Field, KvLayout};
/// let ours = KvLayout { layers: 30, kv_heads: 3, head_dim: 64, page_tokens: 16, dtype: 1 };
/// let theirs = KvLayout { kv_heads: 4, ..ours };
/// assert_eq!(ours.first_difference(&theirs), Some((Field::KvHeads, 3, 4)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// Layers of the model.
    pub layers: u32,
    /// Key/value heads per layer on this node.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Tokens in one page.
    pub page_tokens: u32,
    /// Element type, by the model layer's numbering.
    pub dtype: u32,
}

impl KvLayout {
    /// The first field that differs, with both values.
    #[must_use]
    pub fn first_difference(&self, other: &Self) -> Option<(Field, u64, u64)> {
        let pairs = [
            (Field::Layers, self.layers, other.layers),
            (Field::KvHeads, self.kv_heads, other.kv_heads),
            (Field::HeadDim, self.head_dim, other.head_dim),
            (Field::PageTokens, self.page_tokens, other.page_tokens),
            (Field::Dtype, self.dtype, other.dtype),
        ];
        let (field, ours, theirs) = pairs.into_iter().find(|(_, ours, theirs)| ours != theirs)?;
        Some((field, ours.into(), theirs.into()))
    }
}

macro_rules! fields {
    ($($(#[$doc:meta])* $variant:ident = $value:literal => $text:literal,)*) => {
        /// What a hello was refused for.
        ///
        /// ```
        /// use millpond_core::wire::hello::Field;
        /// assert_eq!(Field::from_code(Field::Layers.code()), Some(Field::Layers));
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Field { $($(#[$doc])* $variant,)* }

        impl Field {
            /// Every field, in the order of its code.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The number on the wire.
            #[must_use]
            pub const fn code(self) -> u16 {
                match self { $(Self::$variant => $value,)* }
            }

            /// The field that `code` stands for, if there is one.
            #[must_use]
            pub const fn from_code(code: u16) -> Option<Self> {
                match code { $($value => Some(Self::$variant),)* _ => None }
            }

            const fn text(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

fields! {
    /// No version is spoken by both.
    Version = 1 => "protocol version: upgrade the older node",
    /// The connection's purpose is not served here.
    Purpose = 2 => "purpose: this port does not serve it",
    /// One side uses a key and the other does not.
    Auth = 3 => "authentication: configure the same shared key on both nodes, or on neither",
    /// The keys differ.
    Key = 4 => "shared key: the keys differ; configure the same one on both nodes",
    /// Another node than expected.
    Node = 5 => "node id: another node answers at this address; look the address up again",
    /// An incarnation older than one already seen.
    Incarnation = 6 => "incarnation: a newer start of this node is already known",
    /// A lane generation that is not newer than one already seen.
    Generation = 7 => "lane generation: a newer lane is already open",
    /// Number of layers.
    Layers = 8 => "KV layout, layers: both nodes must serve the same model",
    /// Number of key/value heads.
    KvHeads = 9 => "KV layout, kv_heads: both nodes must use the same model and tensor-parallel degree",
    /// Width of a head.
    HeadDim = 10 => "KV layout, head_dim: both nodes must serve the same model",
    /// Tokens per page.
    PageTokens = 11 => "KV layout, page_tokens: configure the same page size on both nodes",
    /// Element type.
    Dtype = 12 => "KV layout, dtype: configure the same element type on both nodes",
    /// Too many connections.
    Capacity = 13 => "capacity: the node has its maximum of connections; retry later",
    /// The node is going away.
    Draining = 14 => "draining: the node is going away; use another",
    /// The port takes TLS only.
    Tls = 15 => "TLS: this port takes nothing else; set [tls] on both nodes or on neither",
    /// The certificate is not of the node that it is shown for.
    Certificate = 16 => "certificate: it is not of this node; issue one with the node's name, as a DNS name or as the URI millpond:NAME",
}

/// Why one side refused the other: the field at fault, and its value on both sides where that is a number.
///
/// ```
/// use millpond_core::wire::hello::{Field, Refusal};
/// let refusal = Refusal { field: Field::PageTokens, refuser: 16, refused: 32 };
/// assert!(refusal.to_string().contains("page_tokens"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The field at fault.
    pub field: Field,
    /// Its value at the side that refused, 0 if that is no number.
    pub refuser: u64,
    /// Its value at the side that was refused, 0 if that is no number.
    pub refused: u64,
}

impl Refusal {
    /// A refusal for a field that has no numbers to show.
    #[must_use]
    pub const fn of(field: Field) -> Self {
        Self { field, refuser: 0, refused: 0 }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "refused for {}", self.field.text())?;
        if self.refuser != self.refused {
            write!(f, " (refuser has {}, refused has {})", self.refuser, self.refused)?;
        }
        Ok(())
    }
}

impl core::error::Error for Refusal {}

/// Somebody who does not speak this protocol at all.
///
/// ```
/// use millpond_core::wire::hello::{foreign, Foreign};
/// assert_eq!(foreign(b"GET / HTTP/1.1\r\n"), Some(Foreign::Http));
/// assert_eq!(foreign(&[0x16, 3, 1]), Some(Foreign::Tls));
/// assert_eq!(foreign(b"\x8fMLP"), None); // ours, so far
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Foreign {
    /// An HTTP request.
    Http,
    /// A TLS handshake.
    Tls,
    /// Nothing known.
    Unknown,
}

impl Foreign {
    /// What to send before closing, so that the other side's person understands. Empty where nothing helps.
    #[must_use]
    pub const fn answer(self) -> &'static [u8] {
        match self {
            Self::Http => {
                b"HTTP/1.1 426 Upgrade Required\r\nconnection: close\r\nupgrade: millpond\r\n\
                content-type: text/plain\r\ncontent-length: 100\r\n\r\n\
                This port speaks Millpond's node protocol, not HTTP. Ask the router's HTTP address (see `status`). \n"
            }
            // A fatal alert: unsupported protocol version.
            Self::Tls => &[0x15, 3, 1, 0, 2, 2, 70],
            Self::Unknown => b"",
        }
    }
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Http => "an HTTP request came to the node port; use the router's HTTP address",
            Self::Tls => "a TLS handshake came to a plain node port; configure TLS on both nodes or on neither",
            Self::Unknown => "bytes that are no hello came to the node port; is this the right address?",
        })
    }
}

impl core::error::Error for Foreign {}

/// Says whether the first bytes of a connection are not ours, and whose they look like. `None`: ours so far, or too few to
/// tell whose; ten bytes always suffice. Once it says something, more bytes do not change it.
#[must_use]
pub fn foreign(bytes: &[u8]) -> Option<Foreign> {
    const METHODS: [&[u8]; 9] =
        [b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT ", b"PRI * HTTP"];
    const TLS: &[u8] = &[0x16, 3];
    let begins = |known: &[u8]| known.starts_with(bytes);
    if bytes.starts_with(&MAGIC) || begins(&MAGIC) {
        None
    } else if bytes.starts_with(TLS) {
        Some(Foreign::Tls)
    } else if METHODS.into_iter().any(|method| bytes.starts_with(method)) {
        Some(Foreign::Http)
    } else if begins(TLS) || METHODS.into_iter().any(begins) {
        None
    } else {
        Some(Foreign::Unknown)
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct WireIdentity {
    node: [u8; 16],
    incarnation: U64,
    boot: [u8; 16],
    namespaces: [U64; 3],
    layers: U32,
    kv_heads: U32,
    head_dim: U32,
    page_tokens: U32,
    dtype: U32,
    layout_present: U32,
}

impl WireIdentity {
    fn new(identity: &Identity, layout: Option<KvLayout>) -> Self {
        let fields = layout.unwrap_or(KvLayout { layers: 0, kv_heads: 0, head_dim: 0, page_tokens: 0, dtype: 0 });
        Self {
            node: identity.node,
            incarnation: identity.incarnation.into(),
            boot: identity.host.boot,
            namespaces: identity.host.namespaces.map(Into::into),
            layers: fields.layers.into(),
            kv_heads: fields.kv_heads.into(),
            head_dim: fields.head_dim.into(),
            page_tokens: fields.page_tokens.into(),
            dtype: fields.dtype.into(),
            layout_present: u32::from(layout.is_some()).into(),
        }
    }

    fn read(&self) -> (Identity, Option<KvLayout>) {
        let host = HostIdentity { boot: self.boot, namespaces: self.namespaces.map(U64::get) };
        let identity = Identity { node: self.node, incarnation: self.incarnation.get(), host };
        let layout = KvLayout {
            layers: self.layers.get(),
            kv_heads: self.kv_heads.get(),
            head_dim: self.head_dim.get(),
            page_tokens: self.page_tokens.get(),
            dtype: self.dtype.get(),
        };
        (identity, (self.layout_present.get() != 0).then_some(layout))
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct HelloBody {
    purpose: u8,
    auth: u8,
    lane_index: u8,
    reserved: [u8; 5],
    generation: U64,
    identity: WireIdentity,
    pub(super) nonce: [u8; 32],
}

impl HelloBody {
    pub(super) fn new(hello: &Hello, auth: u8, nonce: [u8; 32]) -> Self {
        let (purpose, lane_index, generation) = hello.purpose.code();
        let identity = WireIdentity::new(&hello.identity, hello.layout);
        Self { purpose, auth, lane_index, reserved: [0; 5], generation: generation.into(), identity, nonce }
    }

    /// What it says, and its authentication code; `None` if the purpose is unknown.
    pub(super) fn read(&self) -> Option<(Hello, u8)> {
        let purpose = Purpose::from_code(self.purpose, self.lane_index, self.generation.get())?;
        let (identity, layout) = self.identity.read();
        Some((Hello { purpose, identity, layout }, self.auth))
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct ChallengeBody {
    pub(super) nonce: [u8; 32],
    pub(super) mac: [u8; MAC_LEN],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct WelcomeBody {
    version: U16,
    reserved: [u8; 6],
    identity: WireIdentity,
    pub(super) mac: [u8; MAC_LEN],
}

impl WelcomeBody {
    pub(super) fn new(version: u16, identity: &Identity, layout: Option<KvLayout>) -> Self {
        let identity = WireIdentity::new(identity, layout);
        Self { version: version.into(), reserved: [0; 6], identity, mac: [0; MAC_LEN] }
    }

    pub(super) fn read(&self) -> (u16, Identity, Option<KvLayout>) {
        let (identity, layout) = self.identity.read();
        (self.version.get(), identity, layout)
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RefusalBody {
    field: U16,
    reserved: [u8; 6],
    refuser: U64,
    refused: U64,
}

impl RefusalBody {
    pub(super) fn new(refusal: Refusal) -> Self {
        Self {
            field: refusal.field.code().into(),
            reserved: [0; 6],
            refuser: refusal.refuser.into(),
            refused: refusal.refused.into(),
        }
    }

    /// `Err` with the field's code if it is unknown.
    pub(super) fn read(&self) -> Result<Refusal, u16> {
        let field = Field::from_code(self.field.get()).ok_or(self.field.get())?;
        Ok(Refusal { field, refuser: self.refuser.get(), refused: self.refused.get() })
    }
}

/// What one end says of itself.
///
/// ```
/// use millpond_core::wire::hello::{Hello, HostIdentity, Identity, Purpose};
/// let identity = Identity { node: [1; 16], incarnation: 1, host: HostIdentity::UNKNOWN };
/// let hello = Hello { purpose: Purpose::Control, identity, layout: None };
/// assert_eq!(hello.layout, None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// What the connection is for.
    pub purpose: Purpose,
    /// Who speaks.
    pub identity: Identity,
    /// Its KV layout, if it has one and wants it checked.
    pub layout: Option<KvLayout>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_http_answer_says_its_length_truly() {
        let answer = core::str::from_utf8(Foreign::Http.answer()).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let len = head.split("content-length: ").nth(1).unwrap().parse::<usize>().unwrap();
        assert_eq!(len, body.len());
    }

    #[test]
    fn every_purpose_is_itself_again_and_a_later_ones_is_none() {
        let (index, generation) = (5, 9);
        let purposes = [
            Purpose::Control,
            Purpose::Lane { index, generation },
            Purpose::Fence { index, generation },
            Purpose::Rail { index, generation },
        ];
        for purpose in purposes {
            let (code, index, generation) = purpose.code();
            assert_eq!(Purpose::from_code(code, index, generation), Some(purpose));
        }
        assert_eq!(Purpose::from_code(5, 0, 0), None);
    }

    #[test]
    fn strangers_are_known_by_their_first_bytes_however_these_are_cut() {
        for cut in 0..=MAGIC.len() {
            assert_eq!(foreign(&MAGIC[..cut]), None);
        }
        assert_eq!(
            (foreign(b"G"), foreign(b"GET /"), foreign(b"GIT")),
            (None, Some(Foreign::Http), Some(Foreign::Unknown))
        );
        assert_eq!(
            (foreign(&[0x16]), foreign(&[0x16, 3, 1]), foreign(&[0x16, 4])),
            (None, Some(Foreign::Tls), Some(Foreign::Unknown))
        );
        assert_eq!((foreign(b"P"), foreign(b"P\x11M")), (None, Some(Foreign::Unknown)));
        assert_eq!(foreign(b"\0"), Some(Foreign::Unknown));
        assert_eq!(foreign(b"SSH-2.0"), Some(Foreign::Unknown));
    }
}
