//! A driver whose GPUDirect reports success and moves nothing, on one NIC; and the real transports, which do not lie.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use millpond_core::batch::{Extent, MemoryKind, RegionId, Rights};
use millpond_core::slab::{Handle, Slot};
use millpond_core::time::{Duration, Instant};
use millpond_core::topology::{
    Direction, End, Entry, Matrix, Pair, Path, Place, Row, Scope, TRIAL_LEN, TRIAL_MARGIN, Trial, Trials, Verdict,
    choose,
};

use super::tree::{NVIDIA, Tree};
use crate::backend::tcp::{TcpDevice, TcpOptions};
use crate::contract::{Connection, Lane, LaneSide, LinkId};
use crate::fabric::{AllocateOptions, Batch, Fabric, FabricOptions, LinkOptions, PostOptions};
use crate::probe::Machine;
use crate::probe::bytes::{Driver, SCRATCH_LEN, Side, run_due};
use crate::region::Region;

const GPU: MemoryKind = MemoryKind::Cuda { device: 0 };
const PEER: Handle = Handle { slot: 0, epoch: 1 };

/// Moves bytes between vectors; over `liar`, with device memory at an end, it only says so.
struct Fake {
    liar: u8,
    scratch: HashMap<(Path, bool), Vec<u8>>,
    transfers: Vec<Path>,
}

impl Driver for Fake {
    fn put(&mut self, path: &Path, side: Side, bytes: &[u8]) -> Result<(), i32> {
        self.scratch.insert((*path, side == Side::There), bytes.to_vec());
        Ok(())
    }

    fn transfer(&mut self, trial: &Trial) -> Result<(), i32> {
        self.transfers.push(trial.path);
        if trial.path.nic == self.liar && trial.path.memory == GPU {
            return Ok(());
        }
        let from = trial.direction == Direction::Read;
        let bytes = self.scratch[&(trial.path, from)][TRIAL_MARGIN..][..TRIAL_LEN].to_vec();
        let target = self.scratch.get_mut(&(trial.path, !from)).unwrap();
        target[TRIAL_MARGIN..][..TRIAL_LEN].copy_from_slice(&bytes);
        Ok(())
    }

    fn take(&mut self, path: &Path, side: Side, into: &mut [u8]) -> Result<(), i32> {
        into.copy_from_slice(&self.scratch[&(*path, side == Side::There)]);
        Ok(())
    }
}

/// A GPU and a NIC behind one switch (a PIX pair), and a second NIC at the other socket.
fn pix_pair() -> Tree {
    let tree = Tree::new(2);
    let switch = "pci0000:10/0000:10:01.0/0000:11:00.0";
    tree.gpu(&format!("{switch}/0000:12:00.0/0000:13:00.0"), NVIDIA, Some("nvidia"), 0);
    tree.rdma(&format!("{switch}/0000:12:01.0/0000:14:00.0"), "mlx5_0", 0);
    tree.rdma("pci0000:80/0000:80:01.0/0000:81:00.0", "mlx5_1", 1);
    tree
}

type Table = Trials<Box<[Slot<Entry>]>>;

fn all_paths(machine: &Machine) -> Table {
    let mut trials = Trials::new(vec![Slot::EMPTY; 64].into_boxed_slice(), 11);
    let nics = u8::try_from(machine.nics.len()).unwrap();
    for memory in [MemoryKind::Host, GPU] {
        for (nic, peer_nic) in (0..nics).flat_map(|nic| (0..nics).map(move |peer_nic| (nic, peer_nic))) {
            trials.add(Path { memory, nic, peer: PEER, peer_nic }).unwrap();
        }
    }
    trials
}

/// The pair for memory of that kind, both machines alike, and the explanation.
fn chosen(machine: &Machine, trials: &Table, memory: MemoryKind) -> (Option<Pair>, Vec<String>) {
    let inventory = machine.inventory();
    let matrix = Matrix::discover(&inventory, Scope::Rdma, vec![Row::EMPTY; machine.rows()]).unwrap();
    let here = End { nics: inventory.nics, row: matrix.row(&Place::of(memory, Some(0))).unwrap() };
    let there = End { nics: inventory.nics, row: matrix.row(&Place::cpu(0)).unwrap() };
    let verdict = |pair: Pair| trials.verdict(&Path { memory, nic: pair.nic, peer: PEER, peer_nic: pair.peer_nic });
    let mut lines = Vec::new();
    let pair = choose(here, there, verdict, |looked_at| lines.push(looked_at.to_string()));
    (pair, lines)
}

#[test]
fn a_pair_whose_gpudirect_moves_nothing_is_never_used_and_the_reason_is_printed() {
    let tree = pix_pair();
    let machine = tree.read();
    let liar = machine.inventory().nic("mlx5_0").unwrap();
    let (mut driver, mut trials) = (Fake { liar, scratch: HashMap::new(), transfers: Vec::new() }, all_paths(&machine));
    let (untested, lines) = chosen(&machine, &trials, GPU);
    assert_eq!(untested, None, "nothing is used before it was tested");
    assert!(lines.iter().all(|line| line.contains("its byte test has not passed yet")), "{lines:?}");

    let mut now = Instant::ZERO;
    let mut refuted = 0;
    run_due(
        &mut driver,
        &mut trials,
        || now,
        |_, verdict| refuted += u32::from(matches!(verdict, Verdict::Refuted(_))),
    );
    assert_eq!(refuted, 2, "device memory over the NIC that lies, to either NIC of the peer");
    let expect = |trials: &Table| {
        let (pair, lines) = chosen(&machine, trials, GPU);
        // The NIC at the other socket, though the one that lies sits behind the GPU's own switch.
        assert_eq!(pair.map(|pair| pair.nic), Some(1));
        assert_eq!(
            lines[0],
            "mlx5_0 -> mlx5_0: not used: its driver reported success and moved nothing (write); preferred on both sides"
        );
        let host = chosen(&machine, trials, MemoryKind::Host).0;
        assert_eq!(host.map(|pair| pair.nic), Some(liar), "with host memory it works, and is used");
    };
    expect(&trials);

    // However long it is asked, it is not tried again by itself; after a link event it is, and found lying again.
    driver.transfers.clear();
    for _ in 0..100 {
        now = now + Duration::from_secs(60);
        run_due(&mut driver, &mut trials, || now, |_, _| {});
    }
    assert_eq!(driver.transfers, []);
    trials.on_link_event(now, liar);
    assert!(chosen(&machine, &trials, GPU).1[0].contains("has not passed yet"));
    run_due(&mut driver, &mut trials, || now, |_, _| {});
    assert!(!driver.transfers.is_empty());
    expect(&trials);
}

/// The `tcp` backend between two fabrics, as a driver.
struct Tcp {
    fabrics: [Fabric; 2],
    link: LinkId,
    regions: [Region; 2],
    remote: RegionId,
    clock: std::time::Instant,
}

impl Tcp {
    fn new() -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let dialed = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = listener.accept().unwrap().0;
        let end = |socket: std::net::TcpStream, side: LaneSide| {
            socket.set_nonblocking(true).unwrap();
            let own = if side == LaneSide::Dialed { 1_u8 } else { 2 };
            let mut fabric = Fabric::new(FabricOptions::new([own; 32])).unwrap();
            let device = fabric.add_device(Box::new(TcpDevice::new(TcpOptions::default()).unwrap())).unwrap();
            let lane = Lane { side, generation: 1, incarnation: own.into(), peer_incarnation: (3 - own).into() };
            let connection = Connection::Stream { fd: OwnedFd::from(socket), read_ahead: Vec::new(), lane };
            let link = fabric.open(Instant::ZERO, device, connection, LinkOptions::default()).unwrap();
            let raw = AllocateOptions::raw(Rights::REMOTE_READ | Rights::REMOTE_WRITE);
            let region = fabric.allocate(SCRATCH_LEN as u64, raw).unwrap();
            (fabric, link, region)
        };
        let (mut here, link, own) = end(dialed, LaneSide::Dialed);
        let (mut there, _, other) = end(accepted, LaneSide::Accepted);
        let remote = here.attach(there.expose(&other).unwrap()).unwrap();
        Self { fabrics: [here, there], link, regions: [own, other], remote, clock: std::time::Instant::now() }
    }

    fn now(&self) -> Instant {
        Instant::from_nanos(u64::try_from(self.clock.elapsed().as_nanos()).unwrap())
    }
}

impl Driver for Tcp {
    fn put(&mut self, _: &Path, side: Side, bytes: &[u8]) -> Result<(), i32> {
        self.regions[usize::from(side == Side::There)].write_at(0, bytes).map_err(|_| -1)
    }

    fn transfer(&mut self, trial: &Trial) -> Result<(), i32> {
        let (at, len) = (TRIAL_MARGIN as u64, TRIAL_LEN as u64);
        let (own, other) = (self.regions[0].extent(at, len), Extent::new(self.remote, at, len));
        let mut batch = Batch::new();
        match trial.direction {
            Direction::Write => batch.write_raw(own, other),
            Direction::Read => batch.read_raw(other, own),
        };
        let now = self.now();
        let ticket = self.fabrics[0].post(now, self.link, batch, PostOptions::default()).map_err(|_| -2)?;
        while !self.fabrics[0].is_finished(&ticket) {
            let now = self.now();
            self.fabrics.iter_mut().for_each(|fabric| {
                fabric.poll(now);
            });
        }
        if self.fabrics[0].take(ticket).is_ok_and(|completion| completion.is_done()) { Ok(()) } else { Err(-3) }
    }

    fn take(&mut self, _: &Path, side: Side, into: &mut [u8]) -> Result<(), i32> {
        self.regions[usize::from(side == Side::There)].read_at(0, into).map_err(|_| -4)
    }
}

#[test]
fn the_tcp_backend_passes_its_byte_test_both_ways() {
    let (mut driver, mut trials) = (Tcp::new(), Trials::new([Slot::EMPTY; 1], 5));
    let path = Path { memory: MemoryKind::Host, nic: Path::NO_NIC, peer: PEER, peer_nic: Path::NO_NIC };
    trials.add(path).unwrap();
    let mut directions = Vec::new();
    run_due(&mut driver, &mut trials, || Instant::ZERO, |trial, _| directions.push(trial.direction));
    assert_eq!(directions, [Direction::Write, Direction::Read]);
    assert_eq!(trials.verdict(&path), Verdict::Proven);
}
