//! What encrypts a lane: the transport's view of a connection whose handshake is over.
//!
//! A transport moves bytes of records and knows nothing of certificates, keys or handshakes; whoever opened the connection
//! does, and hands its state over in [`Connection::Secured`](super::Connection). Invariant: what was sealed is sent in order
//! and once.

/// The records of the peer make no sense: somebody changed them, or the two ends went apart. The link ends.
///
/// Example: [`Cipher`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer's records cannot be opened: they were changed on the way, or belong to another connection")]
pub struct CipherError;

/// The two directions of an encrypted connection, without its socket.
///
/// ```
/// use millpond_hal::contract::{Cipher, CipherError};
/// #[derive(Debug, Default)]
/// struct Upside(Vec<u8>);
/// impl Cipher for Upside {
///     fn seal(&mut self, plain: &[u8], sealed: &mut Vec<u8>) {
///         sealed.extend(plain.iter().map(|byte| !byte));
///     }
///     fn accept(&mut self, sealed: &[u8]) -> Result<usize, CipherError> {
///         self.0.extend(sealed.iter().map(|byte| !byte));
///         Ok(sealed.len())
///     }
///     fn opened(&mut self) -> &[u8] {
///         &self.0
///     }
///     fn take(&mut self, len: usize) {
///         self.0.drain(..len);
///     }
/// }
/// let (mut near, mut far, mut records) = (Upside::default(), Upside::default(), Vec::new());
/// near.seal(b"a frame", &mut records);
/// assert_eq!(far.accept(&records), Ok(7));
/// assert_eq!(far.opened(), b"a frame");
/// ```
pub trait Cipher: core::fmt::Debug + Send {
    /// Encrypts all of `plain` and appends the records to `sealed`, together with what the connection itself has to say (a
    /// new key). `plain` may be empty.
    fn seal(&mut self, plain: &[u8], sealed: &mut Vec<u8>);

    /// Takes bytes of records and says how many, at least one unless there are none. Asked only while nothing is opened.
    ///
    /// # Errors
    /// They cannot be opened; the connection is good for nothing from then on.
    fn accept(&mut self, sealed: &[u8]) -> Result<usize, CipherError>;

    /// Plain bytes in one piece that wait to be taken; none: more records are needed.
    fn opened(&mut self) -> &[u8];

    /// The first `len` of [`Cipher::opened`] were used; no more than there are.
    fn take(&mut self, len: usize);
}
