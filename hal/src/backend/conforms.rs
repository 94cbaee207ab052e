//! Every backend against the one suite.

use std::os::fd::OwnedFd;

use millpond_core::time::Instant;

use super::shm::{ShmDevice, ShmOptions};
use super::tcp::{Checksum, TcpDevice, TcpOptions};
use crate::conformance::{Clock, PROGRESS_DEADLINE, Pair, run};
use crate::contract::{Connection, Device, Lane, LaneSide};
use crate::fabric::{Fabric, FabricOptions, LinkOptions};

fn end(device: Box<dyn Device>, fd: OwnedFd, side: LaneSide) -> (Fabric, crate::contract::LinkId) {
    let (own, peer) = if side == LaneSide::Dialed { (1, 2) } else { (2, 1) };
    let mut fabric = Fabric::new(FabricOptions::new([own; 32])).unwrap();
    let device = fabric.add_device(device).unwrap();
    let lane = Lane { side, generation: 3, incarnation: u64::from(own), peer_incarnation: peer };
    let connection = Connection::Stream { fd, read_ahead: Vec::new(), lane };
    let options = LinkOptions::with_progress_deadline(PROGRESS_DEADLINE);
    let link = fabric.open(Instant::ZERO, device, connection, options).unwrap();
    (fabric, link)
}

fn joined(one: Box<dyn Device>, two: Box<dyn Device>, (fd, fd_there): (OwnedFd, OwnedFd)) -> Pair {
    let cut = fd_there.try_clone().unwrap();
    let (here, link) = end(one, fd, LaneSide::Dialed);
    let (there, link_there) = end(two, fd_there, LaneSide::Accepted);
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

fn tcp_pair(options: TcpOptions) -> Pair {
    let device = || Box::new(TcpDevice::new(options).unwrap());
    joined(device(), device(), tcp_sockets())
}

#[test]
fn the_tcp_backend_conforms() {
    run(&mut || tcp_pair(TcpOptions::default()));
}

#[test]
fn the_tcp_backend_conforms_with_checksums() {
    run(&mut || tcp_pair(TcpOptions { checksum: Checksum::Crc32c, ..TcpOptions::default() }));
}

#[test]
fn the_shm_backend_conforms() {
    run(&mut || {
        let device = || Box::new(ShmDevice::new(ShmOptions { progress_deadline: PROGRESS_DEADLINE }).unwrap());
        joined(device(), device(), unix_sockets())
    });
}
