//! Whom a session is dialled to: one node, at one or several addresses.
//!
//! Text in, text out, and the resolver's answers. It connects nowhere. Invariant: a target has at most [`PLACES_MAX`]
//! places.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use super::SessionError;
use crate::runtime::Runtime;

/// Whom to reach: addresses as people write them, and the node that is meant if that is known.
///
/// ```
/// use millpond_node::session::Target;
/// assert_eq!(Target::parse("[fe80::1%eth0]:7000").unwrap().to_string(), "[fe80::1%eth0]:7000");
/// assert_eq!(Target::parse("10.0.0.1:7000, fast.lan:7000").unwrap().to_string(), "10.0.0.1:7000,fast.lan:7000");
/// assert!(Target::parse("localhost").is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    places: Vec<Place>,
    pub(super) node: Option<[u8; 16]>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Place {
    host: String,
    port: u16,
}

/// Addresses of one node, at most.
const PLACES_MAX: usize = 16;

impl Target {
    /// The target that `address` (`host:port`, `[ipv6]:port`, `[ipv6%scope]:port`) names; several of them, divided by
    /// commas, are one node in several networks, the best address first.
    ///
    /// # Errors
    /// [`SessionError::Address`] if it names none.
    pub fn parse(address: &str) -> Result<Self, SessionError> {
        let wrong = || SessionError::Address { address: address.to_owned() };
        let places: Option<Vec<Place>> = address.split(',').map(|place| Place::parse(place.trim())).collect();
        let places = places.filter(|places| places.len() <= PLACES_MAX).ok_or_else(wrong)?;
        Ok(Self { places, node: None })
    }

    /// Its addresses: those of each place in the system's order. A name without an address is passed over as long as
    /// another one has some.
    ///
    /// # Errors
    /// The resolver's answer.
    pub async fn resolve<R: Runtime>(&self, runtime: &R) -> io::Result<Vec<SocketAddr>> {
        let (mut found, mut failed) = (Vec::new(), None);
        for Place { host, port } in &self.places {
            match runtime.resolve(host, *port).await {
                Ok(addresses) => found.extend(addresses),
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            Some(error) if found.is_empty() => Err(error),
            _ => Ok(found),
        }
    }

    /// The same, if it is this node and no other.
    #[must_use]
    pub fn expecting(self, node: [u8; 16]) -> Self {
        Self { node: Some(node), ..self }
    }
}

impl Place {
    fn parse(address: &str) -> Option<Self> {
        let (host, port) = address.rsplit_once(':')?;
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = inner.unwrap_or(host);
        // A colon in a host without brackets would leave open where the port begins.
        let is_sound = !host.is_empty() && (inner.is_some() || !host.contains(':'));
        Some(Self { host: host.to_owned(), port: port.parse().ok()? }).filter(|_| is_sound)
    }
}

impl From<SocketAddr> for Place {
    fn from(address: SocketAddr) -> Self {
        let host = match address {
            SocketAddr::V6(v6) if v6.scope_id() != 0 => format!("{}%{}", v6.ip(), v6.scope_id()),
            _ => address.ip().to_string(),
        };
        Self { host, port: address.port() }
    }
}

impl From<SocketAddr> for Target {
    fn from(address: SocketAddr) -> Self {
        Self::from(&[address][..])
    }
}

impl From<&[SocketAddr]> for Target {
    /// One node at several addresses, the best first.
    fn from(addresses: &[SocketAddr]) -> Self {
        Self { places: addresses.iter().take(PLACES_MAX).map(|address| Place::from(*address)).collect(), node: None }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Place { host, port }) in self.places.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            if host.contains(':') { write!(f, "{comma}[{host}]:{port}")? } else { write!(f, "{comma}{host}:{port}")? }
        }
        Ok(())
    }
}
