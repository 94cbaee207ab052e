//! The hello of every connection as a machine without I/O, the same for both ends.
//!
//! Bytes from the peer go in, bytes for the peer come out, and in the end there is a [`Peer`] or a [`Failure`]. The machine
//! has no clock (whoever drives it bounds the whole hello by one deadline) and no randomness (nonces come in). It does not
//! encrypt: a shared key proves who is there, TLS below it hides what is said. Invariants: with a key configured no session
//! is established without both proofs; a machine that failed stays failed; nothing is read beyond the hello.

use core::fmt;

use zerocopy::{FromBytes, IntoBytes};

use super::HELLO_LEN_MAX;
use super::hello::{
    ChallengeBody, Field, Foreign, Hello, HelloBody, MAC_LEN, Message, PREFIX_LEN, Prefix, Purpose, Refusal,
    RefusalBody, Versions, WelcomeBody, foreign,
};

const AUTH_NONE: u8 = 0;
const AUTH_KEY: u8 = 1;

const KEY_CONTEXT: &str = "millpond session shared key v1";
const LABEL_ACCEPTOR: &[u8] = b"acceptor proof";
const LABEL_DIALER: &[u8] = b"dialer proof";
const LABEL_WELCOME: &[u8] = b"welcome";

/// A shared key, made from a passphrase or key file of any length.
///
/// ```
/// use millpond_core::wire::session::Key;
/// assert_eq!(format!("{:?}", Key::new(b"secret")), "Key(..)");
/// ```
#[derive(Clone, Copy)]
pub struct Key([u8; 32]);

impl Key {
    /// The key that `secret` stands for.
    #[must_use]
    pub fn new(secret: &[u8]) -> Self {
        Self(blake3::derive_key(KEY_CONTEXT, secret))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// What one end brings to the hello. An acceptor's purpose is ignored: the dialer says what a connection is for.
///
/// ```
/// use millpond_core::wire::hello::{Hello, HostIdentity, Identity, Purpose, Versions};
/// use millpond_core::wire::session::Config;
/// let identity = Identity { node: [1; 16], incarnation: 1, host: HostIdentity::UNKNOWN };
/// let config = Config::new(Hello { purpose: Purpose::Control, identity, layout: None });
/// assert_eq!(config.versions, Versions::OURS);
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Config {
    /// What it says of itself.
    pub hello: Hello,
    /// The versions it speaks.
    pub versions: Versions,
    /// The shared key; without one nobody is authenticated.
    pub key: Option<Key>,
    /// The node a dialer means to reach, if it knows.
    pub expected_node: Option<[u8; 16]>,
    /// What an acceptor refuses every hello for, unread.
    pub refusal: Option<Refusal>,
}

impl Config {
    /// No key, no expectation, this code's versions.
    #[must_use]
    pub fn new(hello: Hello) -> Self {
        Self { hello, versions: Versions::OURS, key: None, expected_node: None, refusal: None }
    }

    /// The same with a shared key.
    #[must_use]
    pub fn with_key(self, key: Key) -> Self {
        Self { key: Some(key), ..self }
    }

    /// The same, for a dialer that wants to reach one node and no other.
    #[must_use]
    pub fn expecting(self, node: [u8; 16]) -> Self {
        Self { expected_node: Some(node), ..self }
    }

    /// The same, for an acceptor that lets nobody in and says why: for connections that came the wrong way.
    #[must_use]
    pub fn refusing(self, refusal: Refusal) -> Self {
        Self { refusal: Some(refusal), ..self }
    }

    /// The same with other versions.
    #[must_use]
    pub fn with_versions(self, versions: Versions) -> Self {
        Self { versions, ..self }
    }
}

/// The other end of an established session.
///
/// Example: [`Session`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// What it said of itself; the purpose is the connection's.
    pub hello: Hello,
    /// The version that both will speak.
    pub version: u16,
    /// Whether it proved to hold the shared key.
    pub authenticated: bool,
}

/// Why there is no session.
///
/// ```
/// use millpond_core::wire::hello::{Field, Refusal};
/// use millpond_core::wire::session::Failure;
/// let failure = Failure::RefusedByPeer(Refusal::of(Field::Draining));
/// assert!(failure.to_string().contains("draining"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// The peer said no.
    RefusedByPeer(Refusal),
    /// The peer said no for a field that this version does not know.
    RefusedForUnknown(u16),
    /// This end said no; the peer is told by the bytes still to be sent.
    RefusedByUs(Refusal),
    /// The other end speaks something else; [`Foreign::answer`] is still to be sent.
    Foreign(Foreign),
    /// A message that makes no sense.
    Malformed,
    /// A message that has no place here.
    Unexpected,
    /// The connection ended first.
    Closed,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RefusedByPeer(refusal) => write!(f, "the peer {refusal}"),
            Self::RefusedForUnknown(code) => write!(f, "the peer refused for a reason (code {code}) unknown here"),
            Self::RefusedByUs(refusal) => write!(f, "the peer was {refusal}"),
            Self::Foreign(foreign) => foreign.fmt(f),
            Self::Malformed => f.write_str("the peer sent a hello that makes no sense; is it a Millpond node?"),
            Self::Unexpected => f.write_str("the peer sent a hello message out of turn; is it a Millpond node?"),
            Self::Closed => f.write_str("the peer closed the connection during the hello"),
        }
    }
}

impl core::error::Error for Failure {}

/// How far the hello is.
///
/// Example: [`Session`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Bytes are to be exchanged.
    Shaking,
    /// Acceptor only: the peer is genuine; say [`Session::admit`] or [`Session::refuse`].
    Deciding(Peer),
    /// The session stands once all output is sent; the next byte read belongs to it.
    Established(Peer),
    /// Over. Send what output there is, then close.
    Failed(Failure),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Await {
    Hello,
    Challenge,
    Proof,
    Welcome,
    Nothing,
}

/// One end of one hello. About 3 KiB, no heap.
///
/// ```
/// use millpond_core::wire::hello::{Hello, HostIdentity, Identity, Purpose};
/// use millpond_core::wire::session::{Config, Key, Session, State};
/// let me = |node| Identity { node: [node; 16], incarnation: 1, host: HostIdentity::UNKNOWN };
/// let config = |node| Config::new(Hello { purpose: Purpose::Control, identity: me(node), layout: None })
///     .with_key(Key::new(b"secret"));
/// let (mut dialer, mut acceptor) = (Session::dial(config(1), [11; 32]), Session::accept(config(2), [22; 32]));
/// loop {
///     let out = dialer.poll_output().to_vec();
///     acceptor.on_bytes(&out);
///     if let State::Deciding(_) = acceptor.state() {
///         acceptor.admit();
///     }
///     let back = acceptor.poll_output().to_vec();
///     dialer.on_bytes(&back);
///     if let State::Established(peer) = dialer.state() {
///         assert_eq!(peer.hello.identity.node, [2; 16]);
///         break;
///     }
/// }
/// ```
pub struct Session {
    config: Config,
    nonce: [u8; 32],
    transcript: blake3::Hasher,
    awaiting: Await,
    state: State,
    input: [u8; HELLO_LEN_MAX],
    input_len: usize,
    output: [u8; HELLO_LEN_MAX],
    output_len: usize,
    peer: Option<(Hello, u16)>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Session {
    /// The end that opened the connection. `nonce` must never be used twice.
    #[must_use]
    pub fn dial(config: Config, nonce: [u8; 32]) -> Self {
        let mut session = Self::new(config, nonce, Await::Hello);
        let auth = if session.config.key.is_some() { AUTH_KEY } else { AUTH_NONE };
        let body = HelloBody::new(&session.config.hello, auth, nonce);
        session.send(Message::Hello, body.as_bytes());
        session.awaiting = if session.config.key.is_some() { Await::Challenge } else { Await::Welcome };
        session
    }

    /// The end that accepted the connection. `nonce` must never be used twice.
    #[must_use]
    pub fn accept(config: Config, nonce: [u8; 32]) -> Self {
        Self::new(config, nonce, Await::Hello)
    }

    fn new(config: Config, nonce: [u8; 32], awaiting: Await) -> Self {
        let key = config.key.map_or([0; 32], |key| key.0);
        Self {
            config,
            nonce,
            transcript: blake3::Hasher::new_keyed(&key),
            awaiting,
            state: State::Shaking,
            input: [0; HELLO_LEN_MAX],
            input_len: 0,
            output: [0; HELLO_LEN_MAX],
            output_len: 0,
            peer: None,
        }
    }

    /// How far the hello is.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Bytes to send now; they count as sent. Look again after every call that changes the state.
    pub fn poll_output(&mut self) -> &[u8] {
        let len = core::mem::take(&mut self.output_len);
        &self.output[..len]
    }

    /// How many bytes to read next, at most; 0 when the hello is over or waits for a decision. Reading fewer is fine, and
    /// passing on what came at once recognises a stranger at the first byte.
    #[must_use]
    pub fn wants(&self) -> usize {
        if self.state != State::Shaking || self.awaiting == Await::Nothing {
            return 0;
        }
        self.message_len().unwrap_or(PREFIX_LEN).saturating_sub(self.input_len)
    }

    /// Takes bytes from the peer and says how many it used; it never uses more than the hello has.
    pub fn on_bytes(&mut self, bytes: &[u8]) -> usize {
        let mut used = 0;
        // Bounded: every round uses a byte or ends the loop.
        while self.wants() > 0 && used < bytes.len() {
            let len = self.wants().min(bytes.len() - used);
            self.input[self.input_len..self.input_len + len].copy_from_slice(&bytes[used..used + len]);
            self.input_len += len;
            used += len;
            self.on_input();
        }
        used
    }

    /// The connection ended.
    pub fn on_end(&mut self) {
        if matches!(self.state, State::Shaking | State::Deciding(_)) {
            self.state = State::Failed(Failure::Closed);
        }
    }

    /// Acceptor: let the peer in. No effect unless the state is [`State::Deciding`].
    pub fn admit(&mut self) {
        let State::Deciding(peer) = self.state else { return };
        let (hello, key) = (self.config.hello, self.config.key);
        let mut body = WelcomeBody::new(peer.version, &hello.identity, hello.layout);
        if key.is_some() {
            body.mac = self.mac(LABEL_WELCOME, welcome_text(&body));
        }
        self.send(Message::Welcome, body.as_bytes());
        self.state = State::Established(peer);
    }

    /// Acceptor: say no. No effect unless the state is [`State::Deciding`].
    pub fn refuse(&mut self, refusal: Refusal) {
        if matches!(self.state, State::Deciding(_)) {
            self.fail_with(refusal);
        }
    }

    fn message_len(&self) -> Option<usize> {
        let prefix = self.input[..self.input_len].first_chunk::<PREFIX_LEN>()?;
        Prefix::read(prefix).map(|(_, len, _)| len)
    }

    fn on_input(&mut self) {
        if let Some(foreign) = foreign(&self.input[..self.input_len.min(PREFIX_LEN)]) {
            let answer = foreign.answer();
            // An answer to a dialer's peer would reach nobody.
            if self.awaiting == Await::Hello {
                self.output[..answer.len()].copy_from_slice(answer);
                self.output_len = answer.len();
            }
            self.state = State::Failed(Failure::Foreign(foreign));
            return;
        }
        let Some(prefix) = self.input[..self.input_len].first_chunk::<PREFIX_LEN>() else { return };
        let Some((message, len, versions)) = Prefix::read(prefix) else {
            self.state = State::Failed(Failure::Malformed);
            return;
        };
        let is_first = message == Message::Hello && self.awaiting == Await::Hello;
        if let Some(refusal) = self.config.refusal.filter(|_| is_first) {
            return self.fail_with(refusal);
        }
        if is_first && self.config.versions.common(versions).is_none() {
            let (refuser, refused) = (self.config.versions.max.into(), versions.max.into());
            return self.fail_with(Refusal { field: Field::Version, refuser, refused });
        }
        if self.input_len == len {
            self.input_len = 0;
            let input = self.input;
            self.on_message(message, versions, &input[..len]);
        }
    }

    fn on_message(&mut self, message: Message, versions: Versions, bytes: &[u8]) {
        let body = &bytes[PREFIX_LEN..];
        let outcome = match (self.awaiting, message) {
            (Await::Challenge | Await::Welcome, Message::Refusal) => Err(on_refusal(body)),
            (Await::Hello, Message::Hello) => self.on_hello(versions, bytes),
            (Await::Challenge, Message::Challenge) => self.on_challenge(bytes),
            (Await::Proof, Message::Proof) => self.on_proof(body),
            (Await::Welcome, Message::Welcome) => self.on_welcome(body),
            _ => Err(Failure::Unexpected),
        };
        match outcome {
            Ok(()) => {}
            Err(Failure::RefusedByUs(refusal)) => self.fail_with(refusal),
            Err(failure) => self.state = State::Failed(failure),
        }
    }

    fn on_hello(&mut self, versions: Versions, bytes: &[u8]) -> Result<(), Failure> {
        let (body, _) = HelloBody::ref_from_prefix(&bytes[PREFIX_LEN..]).map_err(|_| Failure::Malformed)?;
        let (hello, auth) = body.read().ok_or(Failure::RefusedByUs(Refusal::of(Field::Purpose)))?;
        let version = self.config.versions.common(versions).ok_or(Failure::Malformed)?;
        let ours = if self.config.key.is_some() { AUTH_KEY } else { AUTH_NONE };
        if auth != ours {
            let refusal = Refusal { field: Field::Auth, refuser: ours.into(), refused: auth.into() };
            return Err(Failure::RefusedByUs(refusal));
        }
        self.transcript.update(bytes);
        self.peer = Some((hello, version));
        if self.config.key.is_none() {
            return self.decide();
        }
        let mut challenge = ChallengeBody { nonce: self.nonce, mac: [0; MAC_LEN] };
        self.transcript.update(&challenge.nonce);
        challenge.mac = self.mac(LABEL_ACCEPTOR, &[]);
        self.send(Message::Challenge, challenge.as_bytes());
        self.awaiting = Await::Proof;
        Ok(())
    }

    fn on_challenge(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let (body, _) = ChallengeBody::ref_from_prefix(&bytes[PREFIX_LEN..]).map_err(|_| Failure::Malformed)?;
        self.transcript.update(&body.nonce);
        if !is_equal(&self.mac(LABEL_ACCEPTOR, &[]), &body.mac) {
            return Err(Failure::RefusedByUs(Refusal::of(Field::Key)));
        }
        let mac = self.mac(LABEL_DIALER, &[]);
        self.send(Message::Proof, &mac);
        self.awaiting = Await::Welcome;
        Ok(())
    }

    fn on_proof(&mut self, body: &[u8]) -> Result<(), Failure> {
        let mac = body.first_chunk::<MAC_LEN>().ok_or(Failure::Malformed)?;
        if !is_equal(&self.mac(LABEL_DIALER, &[]), mac) {
            return Err(Failure::RefusedByUs(Refusal::of(Field::Key)));
        }
        self.decide()
    }

    /// The peer is genuine as far as asked; its layout is looked at only now, so that strangers learn nothing of ours.
    fn decide(&mut self) -> Result<(), Failure> {
        let (hello, version) = self.peer.ok_or(Failure::Unexpected)?;
        if let Some(refusal) = layouts_differ(&self.config.hello, &hello) {
            return Err(Failure::RefusedByUs(refusal));
        }
        self.awaiting = Await::Nothing;
        self.state = State::Deciding(Peer { hello, version, authenticated: self.config.key.is_some() });
        Ok(())
    }

    fn on_welcome(&mut self, body: &[u8]) -> Result<(), Failure> {
        let (body, _) = WelcomeBody::ref_from_prefix(body).map_err(|_| Failure::Malformed)?;
        if self.config.key.is_some() && !is_equal(&self.mac(LABEL_WELCOME, welcome_text(body)), &body.mac) {
            return Err(Failure::RefusedByUs(Refusal::of(Field::Key)));
        }
        let (version, identity, layout) = body.read();
        let Versions { min, max } = self.config.versions;
        if !(min..=max).contains(&version) {
            let (refuser, refused) = (max.into(), version.into());
            return Err(Failure::RefusedByUs(Refusal { field: Field::Version, refuser, refused }));
        }
        if self.config.expected_node.is_some_and(|node| node != identity.node) {
            return Err(Failure::RefusedByUs(Refusal::of(Field::Node)));
        }
        let purpose: Purpose = self.config.hello.purpose;
        let hello = Hello { purpose, identity, layout };
        if let Some(refusal) = layouts_differ(&self.config.hello, &hello) {
            return Err(Failure::RefusedByUs(refusal));
        }
        self.awaiting = Await::Nothing;
        self.state = State::Established(Peer { hello, version, authenticated: self.config.key.is_some() });
        Ok(())
    }

    /// A keyed hash of everything said so far, for one purpose.
    fn mac(&self, label: &[u8], text: &[u8]) -> [u8; MAC_LEN] {
        let mut hasher = self.transcript.clone();
        hasher.update(label);
        hasher.update(text);
        *hasher.finalize().as_bytes()
    }

    fn send(&mut self, message: Message, body: &[u8]) {
        let len = PREFIX_LEN + body.len();
        debug_assert_eq!(len, message.len());
        let prefix = Prefix::new(message, len, self.config.versions);
        self.output[..PREFIX_LEN].copy_from_slice(prefix.as_bytes());
        self.output[PREFIX_LEN..len].copy_from_slice(body);
        self.output_len = len;
        if message == Message::Hello {
            self.transcript.update(&self.output[..len]);
        }
    }

    fn fail_with(&mut self, refusal: Refusal) {
        self.send(Message::Refusal, RefusalBody::new(refusal).as_bytes());
        self.state = State::Failed(Failure::RefusedByUs(refusal));
    }
}

fn on_refusal(body: &[u8]) -> Failure {
    match RefusalBody::ref_from_prefix(body) {
        Ok((body, _)) => body.read().map_or_else(Failure::RefusedForUnknown, Failure::RefusedByPeer),
        Err(_) => Failure::Malformed,
    }
}

/// Everything in a welcome that its proof covers: all but the proof itself.
fn welcome_text(body: &WelcomeBody) -> &[u8] {
    let bytes = body.as_bytes();
    &bytes[..bytes.len() - MAC_LEN]
}

fn layouts_differ(ours: &Hello, theirs: &Hello) -> Option<Refusal> {
    let (field, refuser, refused) = ours.layout?.first_difference(&theirs.layout?)?;
    Some(Refusal { field, refuser, refused })
}

/// In constant time.
fn is_equal(a: &[u8; MAC_LEN], b: &[u8; MAC_LEN]) -> bool {
    blake3::Hash::from_bytes(*a) == blake3::Hash::from_bytes(*b)
}

#[cfg(test)]
mod tests {
    use super::super::hello::{HostIdentity, Identity, KvLayout};
    use super::*;
    extern crate std;
    use std::vec::Vec;

    fn config(node: u8) -> Config {
        let identity = Identity { node: [node; 16], incarnation: 1, host: HostIdentity::UNKNOWN };
        Config::new(Hello { purpose: Purpose::Lane { index: 1, generation: 3 }, identity, layout: None })
    }

    /// Runs both ends to the end; `damage` may change each message on its way (its number, its bytes).
    fn shake(dialer: Config, acceptor: Config, damage: impl Fn(usize, &mut Vec<u8>)) -> (State, State) {
        let mut ends = [Session::dial(dialer, [1; 32]), Session::accept(acceptor, [2; 32])];
        for number in 0..8 {
            let mut message = ends[number % 2].poll_output().to_vec();
            damage(number, &mut message);
            let other = &mut ends[(number + 1) % 2];
            // Byte by byte: cuts never matter.
            for byte in &message {
                other.on_bytes(&[*byte]);
            }
            other.admit();
        }
        (ends[0].state(), ends[1].state())
    }

    fn failure(state: State) -> Failure {
        match state {
            State::Failed(failure) => failure,
            other => panic!("expected a failure, got {other:?}"),
        }
    }

    #[test]
    fn both_ends_agree_with_and_without_a_key() {
        for key in [None, Some(Key::new(b"k"))] {
            let with_key = |config: Config| Config { key, ..config };
            let (dialer, acceptor) = shake(with_key(config(1)), with_key(config(2)), |_, _| {});
            let (State::Established(server), State::Established(client)) = (dialer, acceptor) else {
                panic!("{dialer:?} {acceptor:?}");
            };
            assert_eq!((server.hello.identity.node, client.hello.identity.node), ([2; 16], [1; 16]));
            assert_eq!(client.hello.purpose, Purpose::Lane { index: 1, generation: 3 });
            assert_eq!((server.authenticated, client.authenticated), (key.is_some(), key.is_some()));
        }
    }

    #[test]
    fn a_wrong_key_or_a_missing_one_is_refused_by_name() {
        let keyed = |config: Config, key: &[u8]| config.with_key(Key::new(key));
        let (dialer, acceptor) = shake(keyed(config(1), b"a"), keyed(config(2), b"b"), |_, _| {});
        assert_eq!(failure(dialer), Failure::RefusedByUs(Refusal::of(Field::Key)));
        // The acceptor hears the dialer's refusal where it waits for a proof: no session either way.
        assert_eq!(failure(acceptor), Failure::Unexpected);
        for (dialer, acceptor) in [(keyed(config(1), b"a"), config(2)), (config(1), keyed(config(2), b"a"))] {
            let (dialer, _) = shake(dialer, acceptor, |_, _| {});
            assert!(matches!(failure(dialer), Failure::RefusedByPeer(Refusal { field: Field::Auth, .. })));
        }
    }

    #[test]
    fn with_a_key_no_changed_bit_goes_unnoticed() {
        let keyed = |node| config(node).with_key(Key::new(b"k"));
        for number in 0..4 {
            let len = [152, 80, 48, 144][number];
            for bit in (0..len * 8).step_by(3) {
                let (dialer, acceptor) = shake(keyed(1), keyed(2), |at, message: &mut Vec<u8>| {
                    if at == number {
                        assert_eq!(message.len(), len);
                        message[bit / 8] ^= 1 << (bit % 8);
                    }
                });
                // The prefix after the hello carries no secret: magic, length and kind are checked by value.
                let harmless = number > 0 && (88..128).contains(&bit);
                let both = matches!((dialer, acceptor), (State::Established(_), State::Established(_)));
                assert!(!both || harmless, "message {number}, bit {bit}");
            }
        }
    }

    #[test]
    fn layouts_that_differ_are_refused_by_field_and_both_values() {
        let layout = KvLayout { layers: 30, kv_heads: 3, head_dim: 64, page_tokens: 16, dtype: 1 };
        let with = |node, layout| {
            let config = config(node);
            Config { hello: Hello { layout, ..config.hello }, ..config }
        };
        let other = KvLayout { page_tokens: 32, ..layout };
        let (dialer, _) = shake(with(1, Some(layout)), with(2, Some(other)), |_, _| {});
        let refusal = Refusal { field: Field::PageTokens, refuser: 32, refused: 16 };
        assert_eq!(failure(dialer), Failure::RefusedByPeer(refusal));
        let (dialer, _) = shake(with(1, Some(layout)), with(2, None), |_, _| {});
        assert!(matches!(dialer, State::Established(_)));
    }

    #[test]
    fn versions_meet_at_the_newest_common_one_or_are_refused() {
        let speaks = |node, min, max| config(node).with_versions(Versions { min, max });
        let (dialer, acceptor) = shake(speaks(1, 1, 3), speaks(2, 2, 9), |_, _| {});
        let (State::Established(a), State::Established(b)) = (dialer, acceptor) else { panic!() };
        assert_eq!((a.version, b.version), (3, 3));
        let (dialer, _) = shake(speaks(1, 1, 1), speaks(2, 2, 9), |_, _| {});
        assert_eq!(failure(dialer), Failure::RefusedByPeer(Refusal { field: Field::Version, refuser: 9, refused: 1 }));
    }

    #[test]
    fn another_node_than_expected_is_refused() {
        let (dialer, _) = shake(config(1).expecting([9; 16]), config(2), |_, _| {});
        assert_eq!(failure(dialer), Failure::RefusedByUs(Refusal::of(Field::Node)));
    }

    #[test]
    fn strangers_are_recognised_and_answered() {
        let mut acceptor = Session::accept(config(2), [2; 32]);
        acceptor.on_bytes(b"GET /metrics HTTP/1.1\r\n\r\n");
        assert_eq!(failure(acceptor.state()), Failure::Foreign(Foreign::Http));
        assert!(acceptor.poll_output().starts_with(b"HTTP/1.1 426"));
        assert_eq!((acceptor.wants(), acceptor.on_bytes(b"more")), (0, 0));
    }

    #[test]
    fn an_acceptor_that_lets_nobody_in_says_why_before_anything_is_proven() {
        let refusal = Refusal::of(Field::Tls);
        let keyed = config(1).with_key(Key::new(b"k"));
        let (dialer, acceptor) = shake(keyed, config(2).refusing(refusal), |_, _| {});
        assert_eq!(failure(dialer), Failure::RefusedByPeer(refusal));
        assert_eq!(failure(acceptor), Failure::RefusedByUs(refusal));
    }

    #[test]
    fn bytes_after_the_hello_are_left_alone() {
        let mut dialer = Session::dial(config(1), [1; 32]);
        let mut acceptor = Session::accept(config(2), [2; 32]);
        let mut bytes = dialer.poll_output().to_vec();
        let len = bytes.len();
        bytes.extend_from_slice(b"frames");
        assert_eq!(acceptor.on_bytes(&bytes), len);
    }
}
