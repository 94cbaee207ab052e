//! The hello under any bytes: it ends, it never lets a stranger in, and cuts in the stream never matter.

use millpond_core::wire::HELLO_LEN_MAX;
use millpond_core::wire::hello::{Hello, HostIdentity, Identity, KvLayout, Purpose};
use millpond_core::wire::session::{Config, Key, Session, State};

/// The first byte chooses: bit 0 dialer instead of acceptor, bit 1 without a key, bit 2 two honest ends between which the
/// rest of the input changes bytes (triples: message, place, mask).
///
/// # Panics
/// If a promise of `millpond_core::wire::session` does not hold.
///
/// ```
/// millpond_fuzz::session::run(b"\0GET / HTTP/1.1\r\n\r\n");
/// ```
pub fn run(data: &[u8]) {
    let Some((&mode, rest)) = data.split_first() else { return };
    let keyed = mode & 2 == 0;
    if mode & 4 != 0 { between(keyed, rest) } else { strange(mode & 1 != 0, keyed, rest) }
}

fn config(node: u8, keyed: bool) -> Config {
    let identity = Identity { node: [node; 16], incarnation: node.into(), host: HostIdentity::UNKNOWN };
    let layout = Some(KvLayout { layers: 2, kv_heads: 2, head_dim: 8, page_tokens: 16, dtype: 1 });
    let config = Config::new(Hello { purpose: Purpose::Lane { index: 1, generation: 1 }, identity, layout });
    if keyed { config.with_key(Key::new(b"a key that no input knows")) } else { config }
}

/// One end hears `data`, whole and byte by byte.
fn strange(dials: bool, keyed: bool, data: &[u8]) {
    let ended = [data.len().max(1), 1].map(|chunk_len| {
        let config = config(1, keyed);
        let mut session = if dials { Session::dial(config, [7; 32]) } else { Session::accept(config, [7; 32]) };
        let (mut sent, mut used) = (session.poll_output().to_vec(), 0);
        for chunk in data.chunks(chunk_len) {
            let wanted_any = session.wants() > 0;
            let took = session.on_bytes(chunk);
            assert!(took <= chunk.len() && (wanted_any || took == 0));
            used += took;
            session.admit();
            sent.extend_from_slice(session.poll_output());
        }
        // At most two messages are heard by either end.
        assert!(used <= 2 * HELLO_LEN_MAX);
        if let State::Established(peer) = session.state() {
            assert!(!keyed, "a stranger without the key was let in as {peer:?}");
        }
        (session.state(), sent)
    });
    assert_eq!(ended[0], ended[1], "where the stream was cut made a difference");
}

/// Two honest ends and somebody between them.
fn between(keyed: bool, edits: &[u8]) {
    let (ours, theirs) = (config(1, keyed), config(2, keyed));
    let mut ends = [Session::dial(ours, [1; 32]), Session::accept(theirs, [2; 32])];
    let mut changed = false;
    for number in 0..6u8 {
        let mut message = ends[usize::from(number % 2)].poll_output().to_vec();
        for edit in edits.chunks_exact(3).filter(|edit| edit[0] % 6 == number) {
            if let Some(byte) = message.get_mut(usize::from(edit[1])) {
                *byte ^= edit[2];
                changed |= edit[2] != 0;
            }
        }
        let other = &mut ends[usize::from((number + 1) % 2)];
        other.on_bytes(&message);
        other.admit();
    }
    match (ends[0].state(), ends[1].state()) {
        (State::Established(acceptor), State::Established(dialer)) if keyed => {
            assert_eq!((acceptor.hello, dialer.hello), (theirs.hello, ours.hello), "an identity was forged");
        }
        (State::Established(_), State::Established(_)) => {}
        (dialer, acceptor) => assert!(changed, "two honest ends failed: {dialer:?}, {acceptor:?}"),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn honest_ends_meet_and_meddling_is_noticed() {
        super::run(&[4]);
        super::run(&[6]);
        for message in 0..4 {
            for place in 0..152 {
                super::run(&[4, message, place, 0x10]);
            }
        }
    }

    #[test]
    fn a_recorded_hello_does_not_open_the_door_again() {
        super::run(&[0x8f, 0x4d]);
        super::run(b"\x00\x8fMLPND\r\n");
    }
}
