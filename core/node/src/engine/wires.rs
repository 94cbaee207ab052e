//! A network that the engine is given, in place of TCP: how lanes of it are connected, and how they come in.
//!
//! With it an engine opens no socket at all: lanes are links of a device that the network brings along, everything above
//! them (peers, generations, scheduling, grants) is as always, and they are called `tcp`. Together with a runtime whose
//! [`now`](crate::runtime::Runtime::now) and timers are its own, a whole cluster of engines runs on one thread, under
//! virtual time, over `hal::sim`; `verify/sim` does. There is no hello on such a network: it answers for whom it
//! connects. Invariant, as for sockets: what a lane replaces over there is closed before the lane is there.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use futures::future::BoxFuture;
use millpond_core::time::Instant;
use millpond_core::wire::hello::Identity;
use millpond_hal::contract::{Connection, Device, LaneSide};

use super::batch::Via;
use super::shard::{End, NewLane};
use super::{AdoptError, Engine, lanes};
use crate::runtime::{Runtime, by};
use crate::session::{Permit, SessionError};

/// Somebody wants a lane.
///
/// Example: `verify/sim/src/world.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The node that is called.
    pub to: SocketAddr,
    /// Who calls.
    pub from: Identity,
    /// Index of the lane among those of its two nodes.
    pub index: u8,
    /// Larger than that of all the caller's earlier calls.
    pub generation: u64,
}

/// A call that was answered: both ends are there.
///
/// Example: `verify/sim/src/world.rs`.
#[derive(Debug)]
pub struct Answered {
    /// Who answered.
    pub identity: Identity,
    /// The caller's end, of the sort that the network's device takes.
    pub connection: Connection,
}

/// A network that connects engines in a way of its own.
///
/// Example: `verify/sim/src/world.rs`.
pub trait Wires: Send + Sync + 'static {
    /// Its device for one engine.
    fn device(&self) -> Box<dyn Device>;

    /// Connects a lane: has the engine that is called [welcome](Engine::welcome) its end first. Dropped when the caller
    /// waited long enough.
    fn dial(&self, call: Call) -> BoxFuture<'static, io::Result<Answered>>;
}

impl<R: Runtime> Engine<R> {
    /// Takes the called end of a lane over [`Wires`]. Refused: it is older than one that is there, or there is no room.
    pub fn welcome(&self, call: &Call, connection: Connection) -> Result<(), AdoptError> {
        let Call { index, generation, .. } = *call;
        lanes::admit_lane(&self.core, &call.from, (index, generation))
            .map_err(|refusal| AdoptError { why: refusal.to_string() })?;
        let end = End::Own(connection);
        let (side, permit) = (LaneSide::Accepted, Permit::default());
        let lane = NewLane { end, via: Via::Tcp, side, index, generation, permit, at: None };
        lanes::adopt_accepted(&self.core, &call.from, lane).map_err(|why| AdoptError { why })?;
        Ok(())
    }
}

/// Connects a lane over `wires` by `deadline`; `expected` is to answer, if that is known.
pub(super) async fn dial<R: Runtime>(
    runtime: &R,
    wires: &Arc<dyn Wires>,
    call: Call,
    expected: Option<[u8; 16]>,
    deadline: Instant,
) -> Result<(Identity, NewLane), SessionError> {
    let (peer, waited) = (call.to.to_string(), deadline.since(runtime.now()));
    let answered = match by(runtime, deadline, wires.dial(call)).await {
        Err(_) => return Err(SessionError::Deadline { peer, waited }),
        Ok(answered) => answered,
    };
    let another = || io::Error::other("another node answered");
    let answered = answered.and_then(|answered| {
        if expected.is_some_and(|node| node != answered.identity.node) { Err(another()) } else { Ok(answered) }
    });
    let Answered { identity, connection } = answered.map_err(|source| SessionError::Connect { peer, source })?;
    let Call { to, index, generation, .. } = call;
    let (end, side, permit, at) = (End::Own(connection), LaneSide::Dialed, Permit::default(), Some(to));
    Ok((identity, NewLane { end, via: Via::Tcp, side, index, generation, permit, at }))
}
