//! Lanes whose bytes are changed on the way, lanes under a cipher, and lanes that nobody uses.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use millpond_core::time::Duration;

use super::TcpOptions;
use super::tests::{LINK, Node, checksummed, every_size_arrives_both_ways, fill, finish, tcp_pair, unix_pair};
use super::toy::Toy;
use crate::contract::{Access, Connection, Device, End, LaneSide, LinkDownReason, Outcome, Refusal, Transport};

const LEN: usize = 1 << 20;

fn secure(node: &mut Node, fd: OwnedFd, side: LaneSide) {
    let connection = Connection::Secured { fd, cipher: Box::<Toy>::default(), lane: Node::lane(side) };
    node.device.open(node.now, LINK, connection).unwrap();
}

fn plain(node: &mut Node, fd: OwnedFd, side: LaneSide) {
    let connection = Connection::Stream { fd, read_ahead: Vec::new(), lane: Node::lane(side) };
    node.device.open(node.now, LINK, connection).unwrap();
}

/// One direction of a connection; it turns the bits of one byte around.
struct Wind {
    from: UnixStream,
    to: UnixStream,
    held: Vec<u8>,
    passed: u64,
    flip: Option<u64>,
}

impl Wind {
    fn blow(&mut self) {
        let mut bytes = [0; 8 << 10];
        while self.held.len() < 64 << 10
            && let Ok(len @ 1..) = self.from.read(&mut bytes)
        {
            if let Some(at) = self.flip.and_then(|flip| flip.checked_sub(self.passed)).filter(|at| *at < len as u64) {
                bytes[usize::try_from(at).unwrap()] ^= 0xff;
            }
            self.passed += len as u64;
            self.held.extend(&bytes[..len]);
        }
        match self.to.write(&self.held) {
            Ok(len) => drop(self.held.drain(..len)),
            Err(error) => assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::BrokenPipe), "{error}"),
        }
    }
}

/// Two nodes, and the winds between them: byte `flip` of what the left one sends, or of what it gets, is changed.
fn apart(options: TcpOptions, open: fn(&mut Node, OwnedFd, LaneSide), flip: (Access, u64)) -> (Node, Node, [Wind; 2]) {
    let (mut left, mut right) = (Node::new(LEN, options), Node::new(LEN, options));
    let ((near, near_wind), (far, far_wind)) = (unix_pair(), unix_pair());
    open(&mut left, near, LaneSide::Dialed);
    open(&mut right, far, LaneSide::Accepted);
    let (near_wind, far_wind) = (UnixStream::from(near_wind), UnixStream::from(far_wind));
    for end in [&near_wind, &far_wind] {
        end.set_nonblocking(true).unwrap();
    }
    let wind = |from: &UnixStream, to: &UnixStream, flip| Wind {
        from: from.try_clone().unwrap(),
        to: to.try_clone().unwrap(),
        held: Vec::new(),
        passed: 0,
        flip,
    };
    let at = |access| (flip.0 == access).then_some(flip.1);
    let winds = [wind(&near_wind, &far_wind, at(Access::Write)), wind(&far_wind, &near_wind, at(Access::Read))];
    (left, right, winds)
}

/// Moves `len` bytes with one byte of the stream changed: what was said of it, and whether the bytes are right.
fn move_through(
    open: fn(&mut Node, OwnedFd, LaneSide),
    options: TcpOptions,
    access: Access,
    flip: u64,
) -> (bool, bool, Vec<End>) {
    let len = 30_000;
    let (mut left, mut right, mut winds) = apart(options, open, (access, flip));
    fill(left.bytes(0, len), flip);
    fill(right.bytes(500_000, len), flip + 1);
    let (local, remote) = if access == Access::Write { (0, 100_000) } else { (600_000, 500_000) };
    let moves = vec![left.posted(local, remote, len as u64, access)];
    let ticket = left.post(moves, None);
    for round in 1..100_000 {
        left.poll();
        right.poll();
        winds.iter_mut().for_each(Wind::blow);
        if left.outcome(ticket).is_some() {
            break;
        }
        if round % 1000 == 0 {
            // Nothing moves: a length was changed, and the end waits for bytes that never come.
            left.now = left.now + Duration::from_secs(6);
        }
    }
    let outcome = left.outcome(ticket).expect("every batch ends");
    let mut ends: Vec<End> = left.owner.ended.get(&ticket).into_iter().flatten().map(|(_, _, end)| end.end).collect();
    ends.push(outcome.end);
    let is_done = ends.iter().all(|end| *end == End::Done);
    let ours = left.bytes(local, len).to_vec();
    let is_right = right.bytes(usize::try_from(remote).unwrap(), len) == ours;
    (is_done, is_right, ends)
}

#[test]
fn a_payload_that_was_changed_on_the_way_is_an_error_with_checksums() {
    for access in [Access::Write, Access::Read] {
        let (mut damaged, mut ended, mut harmless) = (0, 0, 0);
        for flip in (0..30_100).step_by(211) {
            let (is_done, is_right, ends) = move_through(plain, checksummed(), access, flip);
            assert!(is_right || !is_done, "{access:?}: byte {flip} was changed, and the bytes passed for right");
            if ends.contains(&End::Refused(Refusal::Damaged)) {
                damaged += 1;
            } else if is_done {
                harmless += 1;
            } else {
                assert!(matches!(ends.last(), Some(End::LinkDown(_))), "{ends:?}");
                ended += 1;
            }
        }
        // Most bytes are payload; a head has its own checksum, and what comes after the answer changes nothing.
        assert!(damaged > 120 && ended + harmless < 20, "{access:?}: {damaged} damaged, {ended} ended, {harmless}");
    }
    let (is_done, is_right, _) = move_through(plain, TcpOptions::default(), Access::Write, 20_000);
    assert!(is_done && !is_right, "the wind changes nothing, and the test proves nothing");
}

#[test]
fn records_that_were_changed_end_the_lane() {
    for access in [Access::Write, Access::Read] {
        let mut violations = 0;
        for flip in (0..30_100).step_by(499) {
            let (is_done, is_right, ends) = move_through(secure, TcpOptions::default(), access, flip);
            assert!(is_right || !is_done, "{access:?}: byte {flip} was changed, and the bytes passed for right");
            // The end that opens the record says why; the other sees the connection close.
            violations += usize::from(!is_done && matches!(ends.last(), Some(End::LinkDown(_))));
        }
        assert!(violations > 55, "{access:?}: {violations}");
    }
}

#[test]
fn bytes_of_every_size_arrive_both_ways_under_a_cipher() {
    for pair in [tcp_pair, unix_pair] {
        let (mut left, mut right) =
            (Node::new(24 << 20, TcpOptions::default()), Node::new(24 << 20, TcpOptions::default()));
        let (a, b) = pair();
        secure(&mut left, a, LaneSide::Dialed);
        secure(&mut right, b, LaneSide::Accepted);
        every_size_arrives_both_ways(&mut left, &mut right);
        assert_eq!(left.device.name(), "tcp");
    }
}

#[test]
fn a_lane_that_nobody_uses_is_closed_by_who_dialled_it_and_by_nobody_else() {
    let span = Duration::from_secs(60);
    let options = TcpOptions { idle_span_max: span, ..TcpOptions::default() };
    let (mut left, mut right) = (Node::new(LEN, options), Node::new(LEN, options));
    let (a, b) = tcp_pair();
    plain(&mut left, a, LaneSide::Dialed);
    plain(&mut right, b, LaneSide::Accepted);
    let later = |left: &mut Node, right: &mut Node, secs| {
        left.now = left.now + Duration::from_secs(secs);
        right.now = left.now;
        for _ in 0..100 {
            left.poll();
            right.poll();
        }
    };
    for round in 0..4 {
        later(&mut left, &mut right, 50);
        // Whoever of the two uses it keeps it.
        let (user, other) = if round % 2 == 0 { (&mut left, &mut right) } else { (&mut right, &mut left) };
        let moves = vec![user.posted(0, 64, 100, Access::Write)];
        let ticket = user.post(moves, None);
        assert_eq!(finish(user, other, ticket), Outcome::DONE);
    }
    later(&mut left, &mut right, 59);
    assert!(left.owner.down.is_empty() && right.owner.down.is_empty(), "pings are no use, but this is too early");
    right.now = right.now + Duration::from_secs(600);
    for _ in 0..100 {
        right.poll();
        left.poll();
    }
    assert!(right.owner.down.is_empty(), "the side that cannot dial gave it up: {:?}", right.owner.down);
    right.now = left.now;
    later(&mut left, &mut right, 1);
    assert_eq!(left.owner.down, [(LINK, LinkDownReason::Idle)]);
    assert_eq!(right.owner.down, [(LINK, LinkDownReason::PeerClosed)], "it was told");
}
