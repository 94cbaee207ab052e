//! One small read of shared memory, made on the thread that asks for it.
//!
//! Where a peer's memory is mapped here and the grant is known, nothing is left for a scheduler to decide or for the peer to do,
//! and both cost more than the bytes: a blocking caller copies them under the progress lock. Whatever is not as simple as that
//! goes the way of all batches, a read included that did not come to right bytes. Invariant: what is reported done was checked
//! after the copy as the transport checks it.

use millpond_core::batch::Extent;
use millpond_core::time::Duration;
use millpond_core::transfer::PathId;
use millpond_hal::fabric;

use super::batch::{Batch, Request, Via};
use super::core::Core;
use super::remote::RemoteExtent;
use super::shard::Shard;
use super::statistics::{Considered, Explanation};
use super::transfer::{Outcome, Report, Status, TransferId};

/// The longest read made at once, in bytes: others wait for the lock meanwhile.
const LEN_MAX: u64 = 64 << 10;

/// Whether a batch is one small read that names nothing but what it reads.
fn is_simple(batch: &Batch) -> bool {
    let [request @ (Request::Read { source, .. } | Request::ReadRaw { source, .. })] = &batch.requests[..] else {
        return false;
    };
    let is_plain = matches!(batch.settings.via, Via::Auto | Via::Shm) && !request.is_staged();
    // An arrival is for the peer to count, and a fence for others to wait for.
    is_plain && batch.after.is_none() && batch.settings.arrival.is_none() && (1..=LEN_MAX).contains(&source.len())
}

fn extent(source: &RemoteExtent) -> Extent {
    Extent::new(source.region.inner.region, source.offset, source.len())
}

impl Core {
    /// Makes a batch that is one small read. It comes back if it has to be submitted.
    pub(super) fn run_at_once(&self, mut batch: Batch) -> Result<Report, Batch> {
        if !is_simple(&batch) || self.is_over() {
            return Err(batch);
        }
        let Some(request) = batch.requests.pop() else { return Err(batch) };
        let bytes = request.remote().len();
        let answer = match request {
            Request::Read { source, target } => {
                let asked = fabric::Request::Read { source: extent(&source), target };
                let made = self.read_at_once(&source, &asked, &batch);
                let fabric::Request::Read { target, .. } = asked else { unreachable!("made two lines above") };
                match made {
                    Some(made) => Ok((made, Some(target))),
                    None => Err(Request::Read { source, target }),
                }
            }
            Request::ReadRaw { source, target } => {
                let asked = fabric::Request::ReadRaw {
                    source: extent(&source),
                    target: target.region.extent(target.offset, source.len()),
                };
                let made = self.read_at_once(&source, &asked, &batch);
                made.map(|made| (made, None)).ok_or(Request::ReadRaw { source, target })
            }
            other => Err(other),
        };
        let (made, buffer) = match answer {
            Ok(made) => made,
            Err(request) => {
                batch.requests.push(request);
                return Err(batch);
            }
        };
        let mut outcome = Outcome { status: Status::Done, buffer, ..Outcome::pending(bytes) };
        outcome.tally.cut(bytes);
        outcome.tally.on_done(bytes);
        let mut outcomes = std::mem::take(&mut batch.outcomes);
        outcomes.clear();
        outcomes.push(outcome);
        let Made { id, elapsed } = made;
        Ok(Report { outcomes, batch, id, elapsed, via: Some(Via::Shm), retries: 0 })
    }
}

/// What became of it.
struct Made {
    id: TransferId,
    elapsed: Duration,
}

impl Core {
    fn read_at_once(&self, source: &RemoteExtent, asked: &fabric::Request, batch: &Batch) -> Option<Made> {
        let start = self.now();
        self.try_locked(|shard| {
            if !shard.read_at_once(source, asked) {
                return None;
            }
            let made = Made { id: self.next_id(), elapsed: self.now().since(start) };
            shard.note_at_once(source, &made, batch);
            Some(made)
        })?
    }
}

impl Shard {
    /// Over whichever lane of shared memory knows what it is to read.
    fn read_at_once(&mut self, source: &RemoteExtent, asked: &fabric::Request) -> bool {
        let key = source.region.peer().inner.key;
        let Self { peers, fabric, .. } = self;
        let Some(peer) = peers.get(key).filter(|peer| !peer.is_gone) else { return false };
        let mut lanes = (0..).zip(&peer.lanes).filter_map(|(path, lane)| Some((path, lane.as_ref()?)));
        let read = lanes.find(|(_, lane)| lane.via == Via::Shm && fabric.read_at_once(lane.link, asked));
        let Some((path, _)) = read else { return false };
        if let Some(path) = PathId::new(path) {
            self.count_moved(key, path, source.len());
        }
        true
    }

    /// It is counted and explained like any other.
    fn note_at_once(&mut self, source: &RemoteExtent, made: &Made, batch: &Batch) {
        let statistics = &mut self.statistics;
        statistics.transfers_started += 1;
        statistics.transfers_done += 1;
        statistics.requests += 1;
        statistics.bytes_read += source.len();
        self.keep_explanation(Explanation {
            id: made.id,
            requests: 1,
            bytes: source.len(),
            class: batch.settings.class,
            asked: batch.settings.via,
            used: Some(Via::Shm),
            why: "the peer's memory is mapped here, and its caller read it without asking",
            retries: 0,
            paths: Considered::default(),
            ends: Vec::new(),
            legs: Vec::new(),
            peer: source.region.peer().inner.key,
            elapsed: Some(made.elapsed),
            status: Status::Done,
        });
    }
}
