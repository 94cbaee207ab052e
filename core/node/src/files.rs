//! Files for peers: whoever has the token of a file of this node has the node move between it and memory of its own. The same
//! for memory of this node's devices, which no peer reaches either.
//!
//! The owner's process moves the bytes, through the buffers of a [`Stager`]. Rights, ranges and epoch are checked by the
//! fabric at each piece, the capability at each call. It opens nothing for anybody: files are granted by who opened them, or
//! by a [`Folder`] that the node's configuration publishes.

mod folder;

use std::sync::Arc;

use millpond_core::time::{Duration, Instant};
use millpond_core::wire::hello::Identity;
use millpond_core::wire::message::file::{
    CUT, DONE, FileMove, MEDIUM, MEMORY, METHOD_MOVE, METHOD_OPEN, MOVES_MAX, MoveOutcome, MoveReply, MoveRequest,
    NO_SPACE, OTHER, OpenReply, OpenRequest, REFUSED,
};
use parking_lot::Mutex;
use zerocopy::{FromBytes, IntoBytes};

pub use self::folder::{Folder, FolderOptions, FolderRights};
use crate::engine::{
    AllocateError, AttachError, Cause, Copy, Engine, Failure, Far, FileFault, FileGrant, GrantErrorKind, OutOfBounds,
    Region, RegionToken, RemoteExtent, RemoteRegion, STAGES, Stager, Status,
};
use crate::rpc::{Client, Context, Reason, Refusal, Router, RpcError};
use crate::runtime::{Runtime, blocking};

/// Calls that are served at a time, each with buffers of its own; more are told to come back.
const STAGERS: usize = 4;
/// How long the caller's first lane may take to come after its call.
const LANE_WITHIN: Duration = Duration::from_secs(1);
/// When somebody who was turned away may come back.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// Moves bytes between files of this node and memory of its callers. Clones are handles of the same one.
///
/// Example: `verify/tests/engine_file.rs` (`FileService`).
#[derive(Clone, Debug)]
pub struct FileService<R> {
    engine: Engine<R>,
    stagers: Arc<Mutex<Vec<Stager<R>>>>,
    /// Files that may be synced for callers: those that this service was told of.
    granted: Arc<Mutex<Granted>>,
}

/// The grants that are served, and the number of the call that used each last.
#[derive(Debug, Default)]
struct Granted {
    grants: Vec<(Arc<Published>, u64)>,
    calls: u64,
}

/// What callers have moved for them.
#[derive(Debug)]
enum Published {
    File(FileGrant),
    /// A raw region, by its token.
    Memory(RegionToken, #[allow(dead_code, reason = "keeps the region")] Region),
}

impl Published {
    fn token(&self) -> RegionToken {
        match self {
            Self::File(grant) => grant.token(),
            Self::Memory(token, _) => *token,
        }
    }
}

impl<R: Runtime> FileService<R> {
    /// A service of this engine's files, with its buffers.
    pub fn new(engine: &Engine<R>) -> Result<Self, AllocateError> {
        let stagers = (0..STAGERS).map(|_| Stager::new(engine, STAGES)).collect::<Result<Vec<_>, _>>()?;
        let (stagers, granted) = (Arc::new(Mutex::new(stagers)), Arc::default());
        Ok(Self { engine: engine.clone(), stagers, granted })
    }

    /// Serves a grant of a file, whose token its holders got by any message; until [`FileService::withdraw`].
    pub fn publish(&self, grant: FileGrant) -> RegionToken {
        self.serve_grant(Published::File(grant))
    }

    /// Serves a raw region, memory of a device for example, with its rights; until [`FileService::withdraw`].
    pub fn publish_region(&self, region: &Region) -> Result<RegionToken, GrantErrorKind> {
        let token = self.engine.expose(region)?;
        Ok(self.serve_grant(Published::Memory(token, region.clone())))
    }

    fn serve_grant(&self, published: Published) -> RegionToken {
        let token = published.token();
        let mut granted = self.granted.lock();
        let call = granted.next_call();
        granted.grants.push((Arc::new(published), call));
        token
    }

    /// Serves it no longer. Pieces that were not started are refused from then on.
    pub fn withdraw(&self, token: &RegionToken) {
        self.granted.lock().grants.retain(|(grant, _)| grant.token().region != token.region);
    }

    /// Of these, the one that was used before all others; `None`: there are none.
    fn least_used<'t>(&self, tokens: impl Iterator<Item = &'t RegionToken>) -> Option<RegionToken> {
        let granted = self.granted.lock();
        let used = |token: &&RegionToken| {
            granted.grants.iter().find(|(grant, _)| grant.token().region == token.region).map_or(0, |(_, call)| *call)
        };
        tokens.min_by_key(used).copied()
    }

    /// The method of the service, for the node port.
    #[must_use]
    pub fn router(&self) -> Router {
        let service = self.clone();
        Router::new().call(METHOD_MOVE, move |context: Context, request: MoveRequest| {
            let service = service.clone();
            async move { service.serve(context.peer.hello.identity, request).await }
        })
    }

    /// Serves one call of `from`.
    ///
    /// # Errors
    /// The call as a whole makes no sense, or there is no room; what single moves came to is in the reply.
    pub async fn serve(&self, from: Identity, request: MoveRequest) -> Result<MoveReply, Refusal> {
        if request.moves.len() > MOVES_MAX {
            let detail = format!("{} moves in one call, the limit is {MOVES_MAX}; send several", request.moves.len());
            return Err(Refusal::new(Reason::TooLarge, detail));
        }
        let (file, memory) = (token(&request.file, "file")?, token(&request.memory, "memory")?);
        let grant = self.grant(&file)?;
        let unavailable = |why: String| Refusal::new(Reason::Unavailable, why);
        let peer =
            self.engine.peer(&from, LANE_WITHIN).await.map_err(|error| unavailable(format!("no lane: {error}")))?;
        let attach = |error: AttachError| Refusal::new(Reason::Malformed, error.to_string());
        let memory = self.engine.attach(&peer, &memory).map_err(attach)?;
        let there = self.engine.attach(&self.engine.itself(), &file).map_err(attach)?;
        let copies: Vec<Result<Copy, OutOfBounds>> =
            request.moves.iter().map(|one| copy(&there, &memory, one, request.into_file)).collect();
        let wanted: Vec<Copy> = copies.iter().flatten().cloned().collect();
        let mut stager = Lent::take(&self.stagers)?;
        let mut statuses = stager.copy(&wanted).await.into_iter();
        drop(stager);
        if request.sync && request.into_file {
            let synced = blocking(self.engine.runtime(), move || match &*grant {
                Published::File(grant) => grant.region().file().sync(),
                Published::Memory(..) => Ok(()),
            });
            let synced = synced.await;
            synced.map_err(|error| Refusal::new(Reason::Failed, error.to_string()))?;
        }
        let outcomes = copies.into_iter().map(|one| match one {
            Err(error) => MoveOutcome { code: REFUSED, is_touched: false, detail: error.to_string() },
            Ok(_) => statuses.next().map_or_else(MoveOutcome::default, |status| outcome(&status)),
        });
        Ok(MoveReply { outcomes: outcomes.collect() })
    }

    /// The grant that the token is of. A token that only looks like it is told so: the lane to the file has proven the right
    /// one for somebody else perhaps.
    fn grant(&self, token: &RegionToken) -> Result<Arc<Published>, Refusal> {
        let mut granted = self.granted.lock();
        let call = granted.next_call();
        let found = granted.grants.iter_mut().find(|(grant, _)| grant.token().region == token.region);
        let is_right = |grant: &Published| grant.token().capability.matches(&token.capability);
        match found {
            Some((grant, used)) if is_right(grant) => {
                *used = call;
                Ok(Arc::clone(grant))
            }
            _ => Err(Refusal::new(Reason::Stale, "the token is of no file that is served here; ask for a new one")),
        }
    }
}

impl Granted {
    fn next_call(&mut self) -> u64 {
        self.calls += 1;
        self.calls
    }
}

fn outcome(status: &Status) -> MoveOutcome {
    let Status::Failed(Failure { cause, far }) = status else { return MoveOutcome::default() };
    let code = match cause {
        Cause::File { fault: FileFault::NoSpace } => NO_SPACE,
        Cause::File { fault: FileFault::Truncated } => CUT,
        Cause::File { .. } => MEDIUM,
        Cause::Refused { .. } => REFUSED,
        Cause::LinkLost | Cause::NoProgress | Cause::NoPath { .. } => MEMORY,
        _ => OTHER,
    };
    MoveOutcome { code, is_touched: *far != Far::Untouched, detail: cause.to_string() }
}

fn token(bytes: &[u8], what: &str) -> Result<RegionToken, Refusal> {
    let wrong = |_| Refusal::new(Reason::Malformed, format!("the token of the {what} is not 64 bytes long"));
    RegionToken::read_from_bytes(bytes).map_err(wrong)
}

fn copy(there: &RemoteRegion, memory: &RemoteRegion, one: &FileMove, into_file: bool) -> Result<Copy, OutOfBounds> {
    let file: RemoteExtent = there.extent(one.file_offset, one.len)?;
    let memory = memory.extent(one.memory_offset, one.len)?;
    Ok(if into_file { Copy { source: memory, target: file } } else { Copy { source: file, target: memory } })
}

/// A stager that goes back when the call ends, however.
struct Lent<'a, R> {
    stager: Option<Stager<R>>,
    home: &'a Mutex<Vec<Stager<R>>>,
}

impl<'a, R> Lent<'a, R> {
    fn take(home: &'a Mutex<Vec<Stager<R>>>) -> Result<Self, Refusal> {
        let stager = home.lock().pop();
        let busy = || Refusal::new(Reason::Busy, "all buffers for files are in use").retry_after(RETRY_AFTER);
        Ok(Self { stager: Some(stager.ok_or_else(busy)?), home })
    }
}

impl<R: Runtime> Lent<'_, R> {
    async fn copy(&mut self, copies: &[Copy]) -> Vec<Status> {
        match &mut self.stager {
            Some(stager) => stager.copy(copies).await,
            None => Vec::new(),
        }
    }
}

impl<R> Drop for Lent<'_, R> {
    fn drop(&mut self) {
        self.home.lock().extend(self.stager.take());
    }
}

/// A file of another node, or memory of its devices, by its token: what its owner does for us.
///
/// Example: `verify/tests/engine_file.rs` (`RemoteFile`).
#[derive(Clone, Debug)]
pub struct RemoteFile<R> {
    client: Client<R>,
    token: RegionToken,
}

impl<R: Runtime> RemoteFile<R> {
    /// The file that `token` names, moved by the node that `client` calls. A lane to that node must be open, or open here.
    #[must_use]
    pub fn new(client: Client<R>, token: RegionToken) -> Self {
        Self { client, token }
    }

    /// A file that the node publishes, by its name there. A token that was given up for another file's is refused as
    /// [`Reason::Stale`]: open it again.
    ///
    /// # Errors
    /// The node publishes no files, or none of that name, or not with these rights, or there is no room.
    pub async fn open(client: Client<R>, open: &OpenRequest, deadline: Instant) -> Result<Self, RpcError> {
        let reply: OpenReply = client.call(METHOD_OPEN, open, deadline).await?;
        let token = token(&reply.token, "file").map_err(RpcError::Refused)?;
        Ok(Self { client, token })
    }

    /// The token that it is named by, with the file's rights and length.
    #[must_use]
    pub fn token(&self) -> RegionToken {
        self.token
    }

    /// Moves ranges of our memory, granted to be read, into the file; on stable storage if `sync`. An outcome per move.
    pub async fn write(
        &self,
        memory: &RegionToken,
        moves: &[FileMove],
        sync: Sync,
        deadline: Instant,
    ) -> Result<Vec<MoveOutcome>, RpcError> {
        let request = MoveRequest { into_file: true, sync: sync == Sync::Yes, ..self.request(memory, moves) };
        let reply: MoveReply = self.client.call(METHOD_MOVE, &request, deadline).await?;
        Ok(reply.outcomes)
    }

    /// Moves ranges of the file into our memory, granted to be written. An outcome per move.
    pub async fn read(
        &self,
        memory: &RegionToken,
        moves: &[FileMove],
        deadline: Instant,
    ) -> Result<Vec<MoveOutcome>, RpcError> {
        let reply: MoveReply = self.client.call(METHOD_MOVE, &self.request(memory, moves), deadline).await?;
        Ok(reply.outcomes)
    }

    fn request(&self, memory: &RegionToken, moves: &[FileMove]) -> MoveRequest {
        let bytes = |token: &RegionToken| token.as_bytes().to_vec();
        let (file, memory) = (bytes(&self.token), bytes(memory));
        MoveRequest { file, memory, into_file: false, moves: moves.to_vec(), sync: false }
    }
}

/// Whether a write waits for stable storage.
///
/// ```
/// use millpond_node::files::Sync;
/// assert_ne!(Sync::Yes, Sync::No);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// Done means durable.
    Yes,
    /// Done means visible.
    No,
}

/// Whether a move that a peer made is done.
///
/// ```
/// use millpond_core::wire::message::file::MoveOutcome;
/// assert!(millpond_node::files::is_done(&MoveOutcome::default()));
/// ```
#[must_use]
pub fn is_done(outcome: &MoveOutcome) -> bool {
    outcome.code == DONE
}
