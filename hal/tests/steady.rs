//! In steady state nothing is allocated: neither by the fabric nor by the TCP backend, on either side, per batch or slice.
#![allow(missing_docs, clippy::cast_possible_truncation)]

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;

use millpond_core::batch::{Extent, Rights};
use millpond_core::time::Instant;
use millpond_hal::backend::tcp::{Checksum, TcpDevice, TcpOptions};
use millpond_hal::contract::{Connection, Lane, LaneSide, LinkId};
use millpond_hal::fabric::{AllocateOptions, Batch, Fabric, FabricOptions, LinkOptions, PostOptions};

#[path = "common/counting.rs"]
mod counting;

use counting::{ALLOCATIONS, Counting};

#[global_allocator]
static COUNTING: Counting = Counting;

fn side(stream: TcpStream, side: LaneSide, secret: u8, options: TcpOptions) -> (Fabric, LinkId) {
    let mut fabric = Fabric::new(FabricOptions::new([secret; 32])).unwrap();
    let device = fabric.add_device(Box::new(TcpDevice::new(options).unwrap())).unwrap();
    let lane = Lane { side, generation: 1, incarnation: 1, peer_incarnation: 1 };
    let connection = Connection::Stream { fd: stream.into(), read_ahead: Vec::new(), lane };
    let link = fabric.open(Instant::ZERO, device, connection, LinkOptions::default()).unwrap();
    (fabric, link)
}

#[test]
fn a_thousand_batches_allocate_nothing_once_warm() {
    const LEN: u64 = 16 << 20;
    for options in [TcpOptions::default(), TcpOptions { checksum: Checksum::Crc32c, ..TcpOptions::default() }] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut here, link) = side(dialed, LaneSide::Dialed, 1, options);
        let (mut there, _) = side(listener.accept().unwrap().0, LaneSide::Accepted, 2, options);
        let source = here.allocate(LEN, AllocateOptions::raw(Rights::LOCAL)).unwrap();
        let rights = Rights::LOCAL | Rights::REMOTE_READ | Rights::REMOTE_WRITE;
        let target = there.allocate(LEN, AllocateOptions::raw(rights)).unwrap();
        let remote = here.attach(there.expose(&target).unwrap()).unwrap();
        let mut spare = Batch::new();
        let mut round = |number: u64| {
            // One page, a scattered batch, one value of several frames; writes and reads.
            let (size, count) = [(4096, 1), (4096, 200), (6 << 20, 1)][number as usize % 3];
            let mut batch = core::mem::take(&mut spare);
            batch.clear();
            for index in 0..count {
                let at = index * size * 2 % LEN;
                let (ours, theirs) = (source.extent(at, size), Extent::new(remote, at, size));
                if number.is_multiple_of(2) {
                    batch.write_raw(ours, theirs)
                } else {
                    batch.read_raw(theirs, ours)
                };
            }
            let ticket = here.post(Instant::ZERO, link, batch, PostOptions::default()).unwrap();
            while !here.is_finished(&ticket) {
                here.poll(Instant::ZERO);
                there.poll(Instant::ZERO);
            }
            let completion = here.take(ticket).unwrap();
            assert!(completion.is_done());
            spare = completion.into_batch();
        };
        (0..200).for_each(&mut round);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        (200..1200).for_each(&mut round);
        let allocated = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert_eq!(allocated, 0, "{options:?}: {allocated} allocations in 1,000 batches");
    }
}
