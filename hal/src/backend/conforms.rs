//! Every backend against the one suite.

use std::os::fd::OwnedFd;

use millpond_core::batch::{Extent, MemoryKind, RegionToken, Rights};
use millpond_core::time::Instant;

use super::shm::{ShmDevice, ShmOptions};
use super::tcp::toy::Toy;
use super::tcp::{Checksum, TcpDevice, TcpOptions};
use crate::conformance::untouchable::Untouchable;
use crate::conformance::{Clock, PROGRESS_DEADLINE, Pair, Supply, run};
use crate::contract::{Connection, Device, End, Lane, LaneSide, Refusal};
use crate::fabric::{Batch, Fabric, FabricOptions, LinkOptions, PostOptions};
use crate::region::Mode;

/// Makes a connection of a socket.
type Connect = fn(OwnedFd, Lane) -> Connection;

fn plain(fd: OwnedFd, lane: Lane) -> Connection {
    Connection::Stream { fd, read_ahead: Vec::new(), lane }
}

fn secured(fd: OwnedFd, lane: Lane) -> Connection {
    Connection::Secured { fd, cipher: Box::<Toy>::default(), lane }
}

fn end(device: Box<dyn Device>, connection: Connection, side: LaneSide) -> (Fabric, crate::contract::LinkId) {
    let own = if side == LaneSide::Dialed { 1 } else { 2 };
    let mut fabric = Fabric::new(FabricOptions::new([own; 32])).unwrap();
    let device = fabric.add_device(device).unwrap();
    let options = LinkOptions::with_progress_deadline(PROGRESS_DEADLINE);
    let link = fabric.open(Instant::ZERO, device, connection, options).unwrap();
    (fabric, link)
}

fn joined(devices: (Box<dyn Device>, Box<dyn Device>), connect: Connect, (fd, fd_there): (OwnedFd, OwnedFd)) -> Pair {
    let cut = fd_there.try_clone().unwrap();
    let lane = |side, own, peer| Lane { side, generation: 3, incarnation: own, peer_incarnation: peer };
    let (here, link) = end(devices.0, connect(fd, lane(LaneSide::Dialed, 1, 2)), LaneSide::Dialed);
    let (there, link_there) = end(devices.1, connect(fd_there, lane(LaneSide::Accepted, 2, 1)), LaneSide::Accepted);
    let mut pair = Pair::new(here, link, there, link_there, Clock::Real(std::time::Instant::now()));
    // What a dying process does to its sockets.
    pair.sever = Some(Box::new(move || rustix::net::shutdown(&cut, rustix::net::Shutdown::Both).unwrap()));
    pair
}

fn tcp_sockets() -> (OwnedFd, OwnedFd) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let dialed = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let accepted = listener.accept().unwrap().0;
    for socket in [&dialed, &accepted] {
        socket.set_nonblocking(true).unwrap();
        socket.set_nodelay(true).unwrap();
    }
    (dialed.into(), accepted.into())
}

fn unix_sockets() -> (OwnedFd, OwnedFd) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)
        .unwrap()
}

fn shm_pair() -> Pair {
    let device = || Box::new(ShmDevice::new(ShmOptions { progress_deadline: PROGRESS_DEADLINE }).unwrap());
    joined((device(), device()), plain, unix_sockets())
}

fn tcp_pair(options: TcpOptions, connect: Connect) -> Pair {
    let device = || Box::new(TcpDevice::new(options).unwrap());
    joined((device(), device()), connect, tcp_sockets())
}

#[test]
fn the_tcp_backend_conforms() {
    run(&mut || tcp_pair(TcpOptions::default(), plain));
}

#[test]
fn the_tcp_backend_conforms_with_checksums() {
    run(&mut || tcp_pair(TcpOptions { checksum: Checksum::Crc32c, ..TcpOptions::default() }, plain));
}

#[test]
fn the_tcp_backend_conforms_under_a_cipher() {
    run(&mut || tcp_pair(TcpOptions::default(), secured));
}

#[test]
fn the_shm_backend_conforms() {
    run(&mut shm_pair);
}

/// The token's kind is what the peer goes by, and what a hostile one would change; the owner goes by its own table.
#[test]
fn a_peer_that_takes_device_memory_for_the_hosts_is_refused_and_touches_nothing() {
    for mut pair in [tcp_pair(TcpOptions::default(), plain), shm_pair()] {
        let there = pair.there.as_mut().unwrap();
        let device = Untouchable::new(MemoryKind::Cuda { device: 0 });
        let mode = Mode::Raw(Rights::REMOTE_READ | Rights::REMOTE_WRITE);
        let region_there = there.insert_region(device.mapping(8192), mode).unwrap();
        let RegionToken { region, memory, offset, len, rights, capability, incarnation, epoch_word, .. } =
            there.expose(&region_there).unwrap();
        let kind = MemoryKind::Host;
        let token = RegionToken::new(region, memory, offset, len, kind, rights, capability, incarnation, epoch_word);
        let named = pair.here.attach(token).unwrap();
        let local = pair.here.allocate(8192, Default::default()).unwrap();
        let mut batch = Batch::new();
        batch.write(local.carve(0, 100).unwrap().freeze(), Extent::new(named, 0, 100));
        batch.read(Extent::new(named, 200, 100), local.carve(200, 100).unwrap());
        let start = std::time::Instant::now();
        let now = || Instant::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap());
        let ticket = pair.here.post(now(), pair.link, batch, PostOptions::default()).unwrap();
        while !pair.here.is_finished(&ticket) {
            pair.here.poll(now());
            pair.there.as_mut().unwrap().poll(now());
        }
        let completion = pair.here.take(ticket).unwrap();
        for index in 0..2 {
            let outcome = completion.outcome(index);
            assert!(
                matches!(outcome.end, End::Refused(Refusal::NotShareable | Refusal::Stale)),
                "{index}: {outcome:?}"
            );
        }
    }
}
