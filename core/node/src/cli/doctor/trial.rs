//! The byte test of a transport between two engines of this process: both ways, with the margins looked at.

use std::net::SocketAddr;

use millpond_core::batch::MemoryKind;
use millpond_core::slab::{Handle, Slot};
use millpond_core::time::Duration;
use millpond_core::topology::{Direction, Ended, Path, TRIAL_LEN, TRIAL_MARGIN, Trial, Trials, Verdict};

use crate::engine::{Backing, Batch, Engine, Options, OwnNic, Peer, RegionBuf, Via};
use crate::node;
use crate::runtime::{Runtime, Stop};

/// Target and margins.
const SCRATCH_LEN: u64 = (TRIAL_LEN + 2 * TRIAL_MARGIN) as u64;

pub(super) fn said(error: impl ToString) -> String {
    error.to_string()
}

/// Whether random bytes go over `via` both ways unchanged, in words. `nics`: of either end, opened for it.
pub(super) async fn run<R: Runtime>(runtime: &R, via: Via, nics: [Vec<OwnNic>; 2]) -> Result<String, String> {
    let engine = |name: &str, nics| {
        let mut options = Options::new(node::identity(name, None).map_err(said)?);
        options.nics = nics;
        Engine::start(runtime.clone(), options).map_err(said)
    };
    let [near, far] = nics;
    let ends = Ends { near: engine("doctor: near", near)?, far: engine("doctor: far", far)?, via };
    let stop = Stop::new();
    let ending = ends.test(runtime, &stop).await;
    stop.stop();
    futures::join!(ends.near.shut_down(), ends.far.shut_down());
    ending
}

struct Ends<R> {
    near: Engine<R>,
    far: Engine<R>,
    via: Via,
}

/// A target with its margins, taken apart so that only the middle is lent to the transport.
struct Target {
    front: RegionBuf,
    back: RegionBuf,
}

impl Target {
    fn blank<R: Runtime>(engine: &Engine<R>, trial: &Trial) -> Result<(Self, RegionBuf), String> {
        let region = engine.allocate(SCRATCH_LEN, Backing::Memfd).map_err(said)?;
        let mut front = region.carve(0, SCRATCH_LEN).map_err(said)?;
        trial.blank(&mut front);
        let mut middle = front.split_off(TRIAL_MARGIN as u64).map_err(said)?;
        let back = middle.split_off(TRIAL_LEN as u64).map_err(said)?;
        Ok((Self { front, back }, middle))
    }

    /// What lies there now, read by this process, not over the transport.
    fn look(&self, middle: &[u8], trial: &Trial) -> Ended {
        Ended::Moved(trial.look(&[&self.front[..], middle, &self.back[..]].concat()))
    }
}

impl<R: Runtime> Ends<R> {
    async fn test(&self, runtime: &R, stop: &Stop) -> Result<String, String> {
        let address = self.far.listen(SocketAddr::from(([127, 0, 0, 1], 0)), stop).await.map_err(said)?;
        let peer = self.near.open(address).await.map_err(said)?;
        let path =
            Path { memory: MemoryKind::Host, nic: Path::NO_NIC, peer: Handle::default(), peer_nic: Path::NO_NIC };
        let mut seed = [0; 8];
        getrandom::fill(&mut seed).map_err(said)?;
        let mut trials = Trials::new([Slot::EMPTY; 1], u64::from_le_bytes(seed));
        trials.add(path).map_err(said)?;
        let mut elapsed = Duration::ZERO;
        // Bounded: two directions, and the first that fails ends it.
        while let Some(trial) = trials.poll(runtime.now()) {
            let (ended, took) = match trial.direction {
                Direction::Write => self.write(&peer, &trial).await?,
                Direction::Read => self.read(&peer, &trial).await?,
            };
            elapsed = elapsed + took;
            if let Some(Verdict::Refuted(fault)) = trials.on_end(runtime.now(), trial.id, ended) {
                return Err(fault.to_string());
            }
        }
        match trials.verdict(&path) {
            Verdict::Proven => {
                let micros = elapsed.as_micros();
                Ok(format!("usable: {TRIAL_LEN} random bytes went there and back unchanged in {micros} us"))
            }
            other => Err(other.to_string()),
        }
    }

    fn source(engine: &Engine<R>, trial: &Trial) -> Result<RegionBuf, String> {
        let region = engine.allocate(TRIAL_LEN as u64, Backing::Memfd).map_err(said)?;
        let mut bytes = region.carve(0, TRIAL_LEN as u64).map_err(said)?;
        trial.fill(&mut bytes);
        Ok(bytes)
    }

    async fn write(&self, peer: &Peer, trial: &Trial) -> Result<(Ended, Duration), String> {
        let (target, middle) = Target::blank(&self.far, trial)?;
        let grant = self.far.grant_write(vec![middle]).map_err(said)?;
        let remote = self.near.attach(peer, &grant.token()).map_err(said)?;
        let batch = Batch::new().write(Self::source(&self.near, trial)?.freeze(), remote.whole()).via(self.via);
        let report = self.near.submit(batch).map_err(said)?.await.into_done().map_err(said)?;
        let arrived = grant.close().await;
        let arrived = arrived.first().ok_or("the granted memory did not come back")?;
        Ok((target.look(arrived, trial), report.elapsed()))
    }

    async fn read(&self, peer: &Peer, trial: &Trial) -> Result<(Ended, Duration), String> {
        let grant = self.far.grant_read(vec![Self::source(&self.far, trial)?.freeze()]).map_err(said)?;
        let remote = self.near.attach(peer, &grant.token()).map_err(said)?;
        let (target, middle) = Target::blank(&self.near, trial)?;
        let batch = Batch::new().read(remote.whole(), middle).via(self.via);
        let report = self.near.submit(batch).map_err(said)?.await.into_done().map_err(said)?;
        let elapsed = report.elapsed();
        let arrived = report.into_buffers().map_err(said)?;
        let arrived = arrived.first().ok_or("the buffer did not come back")?;
        Ok((target.look(arrived, trial), elapsed))
    }
}
