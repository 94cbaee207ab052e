//! How a rail comes to be: two ends tell each other their NICs and endpoints over a session, move test bytes, and agree.
//!
//! What is said is in `core::wire::message::rail`. The dialer chooses the pair; both ends run the byte tests that are due at
//! theirs, one after the other, and look at what arrived with the CPU of its owner, told over the session: the driver is not
//! asked. The session lasts as long as the rail, so that the death of a process is known at once at the other end. Nothing a
//! peer says is trusted: what makes no sense ends this rail.

use std::sync::Arc;

use futures::channel::oneshot;
use futures::future::{Either, select};
use futures::io::{AsyncReadExt, AsyncWriteExt};
use millpond_core::batch::{RegionToken, Rights};
use millpond_core::time::Instant;
use millpond_core::topology::{Direction, Ended, Found, Pair, TRIAL_LEN, TRIAL_MARGIN, Trial, Verdict};
use millpond_core::wire::hello::Purpose;
use millpond_core::wire::message::rail::{RAIL_LEN_MAX, RailAsk, RailMessage, RailNic, RailNics, RailWord};
use millpond_hal::contract::{End, Lane as WireLane, LaneSide, LinkDownReason};
use millpond_hal::mapping::Backing;
use prost::Message;
use zerocopy::{FromBytes, IntoBytes};

use super::Region;
use super::core::Core;
use super::lanes::{self, NotDialled};
use super::nics::told;
use super::peers::{RAIL_LANES, WantedLane};
use super::rails::Rail;
use super::shard::Shard;
use crate::runtime::{Runtime, blocking, by};
use crate::session::{Permit, Session};
use crate::tls::Channel;

/// A target with its margins.
const SCRATCH_LEN: usize = TRIAL_LEN + 2 * TRIAL_MARGIN;
/// What a driver is said to have reported that reported nothing in time: ETIMEDOUT.
const NOT_IN_TIME: i32 = 110;
/// What a driver is said to have reported that did not do it, and gave no number: EIO.
const NOT_DONE: i32 = 5;

fn said(error: impl ToString) -> String {
    error.to_string()
}

fn unexpected() -> String {
    "the peer said something else than was its turn".to_owned()
}

/// The session of a rail while it is being opened.
struct Talk<'a, R: Runtime> {
    runtime: &'a R,
    core: &'a Arc<Core>,
    stream: Channel<R::Stream>,
    permit: Permit,
    deadline: Instant,
}

impl<'a, R: Runtime> Talk<'a, R> {
    fn new(runtime: &'a R, core: &'a Arc<Core>, session: Session<R::Stream>, deadline: Instant) -> Self {
        let Session { stream, permit, .. } = session;
        Self { runtime, core, stream, permit, deadline }
    }

    async fn say(&mut self, word: RailWord) -> Result<(), String> {
        let message = RailMessage { word: Some(word) };
        let mut bytes = u32::try_from(message.encoded_len()).map_err(said)?.to_le_bytes().to_vec();
        message.encode(&mut bytes).map_err(said)?;
        by(self.runtime, self.deadline, self.stream.write_all(&bytes)).await.map_err(said)?.map_err(said)?;
        by(self.runtime, self.deadline, self.stream.flush()).await.map_err(said)?.map_err(said)
    }

    async fn hear(&mut self) -> Result<RailWord, String> {
        let mut len = [0; 4];
        by(self.runtime, self.deadline, self.stream.read_exact(&mut len)).await.map_err(said)?.map_err(said)?;
        let len = u32::from_le_bytes(len);
        if len > RAIL_LEN_MAX {
            return Err(unexpected());
        }
        let mut bytes = vec![0; len as usize];
        by(self.runtime, self.deadline, self.stream.read_exact(&mut bytes)).await.map_err(said)?.map_err(said)?;
        match RailMessage::decode(&*bytes).map_err(said)?.word {
            Some(RailWord::Refuse(why)) => Err(why),
            Some(word) => Ok(word),
            None => Err(unexpected()),
        }
    }

    /// Says why there is no rail, as far as anybody listens.
    async fn refuse<T>(mut self, why: String) -> Result<T, String> {
        let _ = self.say(RailWord::Refuse(why.clone())).await;
        Err(why)
    }

    fn scratch(&self) -> Result<Region, String> {
        let both = Rights::REMOTE_READ | Rights::REMOTE_WRITE;
        let options = millpond_hal::fabric::AllocateOptions::raw(both).with_backing(Backing::Heap);
        self.core.locked(|shard| shard.fabric.allocate(SCRATCH_LEN as u64, options)).map_err(said)
    }

    /// Runs the byte tests that are due at this end.
    async fn test(&mut self, rail: &Rail, scratch: &Region) -> Result<(), String> {
        // Bounded: two directions, and the first that fails ends it.
        while let Some(trial) = self.core.locked(|shard| shard.next_trial(rail, self.core.now()))? {
            let ended = self.attempt(rail, scratch, &trial).await?;
            let core = self.core;
            core.locked(|shard| shard.on_trial_end(rail, &trial, ended, &core.options, core.now()));
        }
        match self.core.locked(|shard| shard.rail_verdict(rail)) {
            Verdict::Proven => Ok(()),
            other => Err(other.to_string()),
        }
    }

    /// One of them. `Err`: the session failed, which says nothing of the driver.
    async fn attempt(&mut self, rail: &Rail, scratch: &Region, trial: &Trial) -> Result<Ended, String> {
        let (mut filled, mut blank) = (vec![0; SCRATCH_LEN], vec![0; SCRATCH_LEN]);
        trial.fill(&mut filled[TRIAL_MARGIN..][..TRIAL_LEN]);
        trial.blank(&mut blank);
        let (here, there) = if trial.direction == Direction::Write { (filled, blank) } else { (blank, filled) };
        scratch.write_at(0, &here).map_err(said)?;
        self.say(RailWord::Put(there)).await?;
        let RailWord::Kept(token) = self.hear().await? else { return Err(unexpected()) };
        let token = RegionToken::read_from_bytes(&token).map_err(|_| unexpected())?;
        let posted =
            self.core.locked(|shard| shard.post_trial(rail.link, trial.direction, scratch, token, self.core.now()));
        let Ok(outcome) = posted else { return Ok(Ended::Failed(NOT_DONE)) };
        self.core.kick();
        match by(self.runtime, trial.deadline.min(self.deadline), outcome).await {
            Ok(Ok(outcome)) if outcome.is_done() => {}
            Ok(Ok(outcome)) => {
                let code = match outcome.end {
                    End::LinkDown(LinkDownReason::System(code)) => code.get(),
                    _ => NOT_DONE,
                };
                return Ok(Ended::Failed(code));
            }
            Ok(Err(oneshot::Canceled)) => return Ok(Ended::Failed(NOT_DONE)),
            Err(_) => return Ok(Ended::Failed(NOT_IN_TIME)),
        }
        Ok(Ended::Moved(self.look(scratch, trial).await?))
    }

    /// What lies in the target, as its owner's CPU sees it.
    async fn look(&mut self, scratch: &Region, trial: &Trial) -> Result<Found, String> {
        if trial.direction == Direction::Read {
            let mut bytes = vec![0; SCRATCH_LEN];
            scratch.read_at(0, &mut bytes).map_err(said)?;
            return Ok(trial.look(&bytes));
        }
        self.say(RailWord::Take(true)).await?;
        match self.hear().await? {
            RailWord::Found(bytes) => Ok(trial.look(&bytes)),
            _ => Err(unexpected()),
        }
    }

    /// Lets the peer run its tests.
    async fn serve(&mut self, scratch: &Region) -> Result<(), String> {
        // Bounded by the deadline of each word.
        loop {
            match self.hear().await? {
                RailWord::Put(bytes) if bytes.len() == SCRATCH_LEN => {
                    scratch.write_at(0, &bytes).map_err(said)?;
                    let token = self.core.locked(|shard| shard.fabric.expose(scratch)).map_err(said)?;
                    self.say(RailWord::Kept(token.as_bytes().to_vec())).await?;
                }
                RailWord::Take(_) => {
                    let mut bytes = vec![0; SCRATCH_LEN];
                    scratch.read_at(0, &mut bytes).map_err(said)?;
                    self.say(RailWord::Found(bytes)).await?;
                }
                RailWord::Turn(_) => return Ok(()),
                _ => return Err(unexpected()),
            }
        }
    }

    /// Tests on both sides, and the path if all of them passed. Returns once the rail is over, unless it never was.
    async fn prove(mut self, rail: Rail) -> Result<(), String> {
        let proven = async {
            let scratch = self.scratch()?;
            match rail.side {
                LaneSide::Dialed => {
                    self.test(&rail, &scratch).await?;
                    self.say(RailWord::Turn(true)).await?;
                    self.serve(&scratch).await
                }
                LaneSide::Accepted => {
                    self.serve(&scratch).await?;
                    self.test(&rail, &scratch).await?;
                    self.say(RailWord::Turn(true)).await
                }
            }
        };
        let proven: Result<(), String> = proven.await;
        let (session, ended) = oneshot::channel();
        let permit = std::mem::take(&mut self.permit);
        let core = self.core;
        let entered = proven
            .and_then(|()| core.locked(|shard| shard.enter_rail(&rail, session, permit, &core.options, core.now())));
        core.kick();
        if let Err(why) = entered {
            core.locked(|shard| shard.end_link(rail.link, LinkDownReason::Closed, &core.options, core.now()));
            return self.refuse(why).await;
        }
        let mut byte = [0];
        // Nothing is said any more: whatever comes is the end.
        match select(self.stream.read(&mut byte), ended).await {
            Either::Left(_) => {
                core.locked(|shard| shard.end_link(rail.link, LinkDownReason::PeerGone, &core.options, core.now()));
                core.kick();
            }
            Either::Right(_) => {}
        }
        Ok(())
    }
}

/// Dials a rail that the shard wants, and stays with it. `Err`: it never was a path.
pub(super) async fn dial<R: Runtime>(runtime: &R, core: &Arc<Core>, wanted: &WantedLane) -> Result<(), NotDialled> {
    // If no pair is left there is no need to ask.
    take(core, wanted, None)?;
    let deadline = runtime.now() + core.options.connect_deadline;
    let lane_generation = core.locked(Shard::next_generation);
    let purpose = Purpose::Rail { index: wanted.index, generation: lane_generation };
    let session = lanes::reach(runtime, core, wanted, purpose, deadline).await?;
    let talk = Talk::new(runtime, core, session, deadline);
    Ok(ask(talk, wanted, lane_generation).await?)
}

/// The pair for a wanted rail, see [`Shard::take_rail`].
fn take(core: &Core, wanted: &WantedLane, theirs: Option<Vec<RailNic>>) -> Result<Option<Pair>, String> {
    core.locked(|shard| shard.take_rail(wanted.peer, wanted.index, theirs, &core.options, core.now()))
}

/// The dialler's end of a session for a rail, until that is over.
async fn ask<R: Runtime>(mut talk: Talk<'_, R>, wanted: &WantedLane, lane_generation: u64) -> Result<(), String> {
    let (runtime, core, deadline) = (talk.runtime, talk.core, talk.deadline);
    let RailWord::Nics(theirs) = talk.hear().await? else { return Err(unexpected()) };
    let pair = match take(core, wanted, Some(theirs.nics)) {
        Ok(pair) => pair.ok_or_else(unexpected)?,
        Err(why) => return talk.refuse(why).await,
    };
    let nic = core.options.nics.get(usize::from(pair.nic)).ok_or_else(unexpected)?.nic.clone();
    let endpoint = match by(runtime, deadline, blocking(runtime, move || nic.endpoint())).await.map_err(said)? {
        Ok(endpoint) => endpoint,
        Err(why) => return talk.refuse(why.to_string()).await,
    };
    let nics = Some(RailNics { nics: told(&core.options.nics) });
    let record = endpoint.record();
    talk.say(RailWord::Ask(RailAsk { nics, nic: pair.nic.into(), peer_nic: pair.peer_nic.into(), record })).await?;
    let RailWord::Answer(record) = talk.hear().await? else { return Err(unexpected()) };
    let lane = WireLane {
        side: LaneSide::Dialed,
        generation: lane_generation,
        incarnation: core.options.identity.incarnation,
        peer_incarnation: wanted.inner.identity.incarnation,
    };
    let connecting = blocking(runtime, move || endpoint.connect(&record, lane));
    let connection = by(runtime, deadline, connecting).await.map_err(said)?.map_err(said)?;
    let link = core.locked(|shard| shard.open_rail_link(pair.nic, connection, &core.options, core.now()))?;
    core.kick();
    let (peer, index) = (wanted.peer, wanted.index);
    talk.prove(Rail { peer, side: LaneSide::Dialed, index, lane_generation, pair, link }).await
}

/// The accepting end of a rail's session that was admitted; stays with it.
pub(super) async fn accept<R: Runtime>(runtime: R, core: Arc<Core>, session: Session<R::Stream>) {
    let at = session.address;
    if let Err(why) = answer(&runtime, &core, session).await {
        tracing::debug!(%at, %why, "a rail was not opened");
    }
}

async fn answer<R: Runtime>(runtime: &R, core: &Arc<Core>, session: Session<R::Stream>) -> Result<(), String> {
    let (purpose, identity) = (session.peer.hello.purpose, session.peer.hello.identity);
    let Purpose::Rail { index, generation: lane_generation } = purpose else { return Err(unexpected()) };
    let deadline = runtime.now() + core.options.connect_deadline;
    let mut talk = Talk::new(runtime, core, session, deadline);
    if index < RAIL_LANES || core.options.nics.is_empty() {
        return talk.refuse("there is no NIC for a rail here".to_owned()).await;
    }
    let peer = core.locked(|shard| shard.peer(identity, None, &core.options, core.now()));
    let Some(peer) = peer else { return talk.refuse("there is no room for another peer".to_owned()).await };
    talk.say(RailWord::Nics(RailNics { nics: told(&core.options.nics) })).await?;
    let RailWord::Ask(ask) = talk.hear().await? else { return Err(unexpected()) };
    let pair = (u8::try_from(ask.peer_nic), u8::try_from(ask.nic));
    let (Ok(nic), Ok(peer_nic)) = pair else { return Err(unexpected()) };
    let pair = Pair { nic, peer_nic };
    let theirs = ask.nics.unwrap_or_default().nics;
    let met = core.locked(|shard| shard.meet_rail(peer, theirs, pair, &core.options, core.now()));
    if let Err(why) = met {
        return talk.refuse(why).await;
    }
    let lane = WireLane {
        side: LaneSide::Accepted,
        generation: lane_generation,
        incarnation: core.options.identity.incarnation,
        peer_incarnation: identity.incarnation,
    };
    let own = core.options.nics.get(usize::from(nic)).ok_or_else(unexpected)?.nic.clone();
    let connecting = blocking(runtime, move || {
        let endpoint = own.endpoint()?;
        let record = endpoint.record();
        endpoint.connect(&ask.record, lane).map(|connection| (connection, record))
    });
    let (connection, record) = match by(runtime, deadline, connecting).await.map_err(said)? {
        Ok(connected) => connected,
        Err(why) => return talk.refuse(why.to_string()).await,
    };
    let link = core.locked(|shard| shard.open_rail_link(nic, connection, &core.options, core.now()))?;
    core.kick();
    let rail = Rail { peer, side: LaneSide::Accepted, index, lane_generation, pair, link };
    if let Err(why) = talk.say(RailWord::Answer(record)).await {
        core.locked(|shard| shard.end_link(link, LinkDownReason::Closed, &core.options, core.now()));
        return Err(why);
    }
    talk.prove(rail).await
}
