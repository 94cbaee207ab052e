//! Gets: pin, move, answer. Whatever a location names that is not current is stale, never guessed.

use std::sync::Arc;

use millpond_core::directory::{Location, Stamp};
use millpond_core::time::Duration;
use millpond_core::wire::hello::Identity;
use millpond_core::wire::message::store::{
    GetItem, GetOutcome, GetReply, GetRequest, HIT, INLINE_BATCH_LEN_MAX, INLINE_LEN_MAX, ITEMS_MAX, RANGES_MAX,
    REFUSED, STALE,
};
use prost::bytes::Bytes;

use super::checksum::CHUNK_LEN;
use super::node::Inner;
use super::pull::{MoveError, Outgoing, Way, push};
use super::segment::Pinned;
use crate::rpc::{Reason, Refusal};
use crate::runtime::{Runtime, boot_time};

/// A value that is pinned while it is served.
struct Served {
    at: usize,
    pinned: Pinned,
    start: usize,
    end: usize,
}

impl<R: Runtime> Inner<R> {
    /// Serves one call. The pins go with the future.
    pub(super) async fn get(self: &Arc<Self>, from: Identity, request: GetRequest) -> Result<GetReply, Refusal> {
        if request.items.len() > ITEMS_MAX {
            let detail = format!("{} items in one call, the limit is {ITEMS_MAX}; send several", request.items.len());
            return Err(Refusal::new(Reason::TooLarge, detail));
        }
        let mut outcomes = Vec::with_capacity(request.items.len());
        let (mut remote, mut inline_len) = (Vec::new(), 0);
        for (at, item) in request.items.iter().enumerate() {
            match self.open(at, item) {
                Ok(served) if item.target.is_empty() => {
                    inline_len += served.end - served.start;
                    outcomes.push(inline(&served, inline_len));
                }
                Ok(served) => {
                    outcomes.push(hit(&served));
                    remote.push(served);
                }
                Err(outcome) => outcomes.push(outcome),
            }
        }
        if !remote.is_empty() {
            self.send(from, &request, &remote, &mut outcomes).await;
        }
        Ok(GetReply { outcomes })
    }

    fn open(&self, at: usize, item: &GetItem) -> Result<Served, GetOutcome> {
        let stale = || GetOutcome { kind: STALE, ..GetOutcome::default() };
        let malformed = |detail: String| refused(Reason::Malformed, detail, None);
        let location = item.location.as_ref().ok_or_else(|| malformed("the location is missing".to_owned()))?;
        let location = Location::try_from(location).map_err(|error| malformed(error.to_string()))?;
        let pinned = self.segment.lock().pin(boot_time(), &item.key, &location).ok_or_else(stale)?;
        let len = pinned.bytes.len() as u64;
        let end = item.offset.checked_add(item.len).filter(|end| *end <= len && item.len > 0);
        let Some(end) = end else {
            return Err(malformed(format!("{} bytes at {} do not lie in a value of {len}", item.len, item.offset)));
        };
        let named = item.target.iter().try_fold(0u64, |sum, range| sum.checked_add(range.len));
        if !item.target.is_empty() && (named != Some(item.len) || item.target.len() > RANGES_MAX) {
            let detail =
                format!("{} bytes are asked for, {named:?} have a place; at most {RANGES_MAX} ranges", item.len);
            return Err(malformed(detail));
        }
        let index = |at: u64| usize::try_from(at).map_err(|_| malformed("the range is too long".to_owned()));
        Ok(Served { at, pinned, start: index(item.offset)?, end: index(end)? })
    }

    async fn send(&self, from: Identity, request: &GetRequest, served: &[Served], outcomes: &mut [GetOutcome]) {
        let (remote, via) = match self.attach(from, &request.token, &request.via).await {
            Ok(found) => found,
            Err(refusal) => {
                for served in served {
                    outcomes[served.at] = refused(refusal.reason, refusal.detail.to_string(), refusal.retry_after);
                }
                return;
            }
        };
        let way = Way { remote: &remote, via, progress_deadline: self.config.progress_deadline };
        let values = served.iter().map(|served| Outgoing {
            bytes: served.pinned.bytes.slice(served.start..served.end),
            target: &request.items[served.at].target,
        });
        let results = push(&self.engine, way, values.collect()).await;
        for (served, result) in served.iter().zip(results) {
            if let Err(error) = result {
                let (reason, hint) = match error {
                    MoveError::Ranges(_) => (Reason::Malformed, None),
                    _ => (Reason::Unavailable, Some(Duration::from_millis(50))),
                };
                outcomes[served.at] = refused(reason, error.to_string(), hint);
            }
        }
    }
}

/// The checksums of the chunks that the range covers as a whole.
fn covered(served: &Served) -> Vec<u32> {
    let len = served.pinned.bytes.len();
    let first = served.start.div_ceil(CHUNK_LEN);
    let end = if served.end == len { len.div_ceil(CHUNK_LEN) } else { served.end / CHUNK_LEN };
    served.pinned.checksums.get(first..end.max(first)).unwrap_or_default().to_vec()
}

fn hit(served: &Served) -> GetOutcome {
    let version = served.pinned.version;
    GetOutcome {
        kind: HIT,
        version: (version != Stamp::ZERO).then(|| version.into()),
        checksums: covered(served),
        ..GetOutcome::default()
    }
}

fn inline(served: &Served, inline_len: usize) -> GetOutcome {
    if served.end - served.start > INLINE_LEN_MAX || inline_len > INLINE_BATCH_LEN_MAX {
        let detail = format!(
            "at most {INLINE_LEN_MAX} bytes of a value and {INLINE_BATCH_LEN_MAX} of a call travel inside; name memory"
        );
        return refused(Reason::TooLarge, detail, None);
    }
    let bytes = &served.pinned.bytes[served.start..served.end];
    GetOutcome { inline: Bytes::copy_from_slice(bytes), ..hit(served) }
}

fn refused(reason: Reason, detail: String, retry_after: Option<Duration>) -> GetOutcome {
    GetOutcome {
        kind: REFUSED,
        reason: reason.code(),
        detail,
        retry_after_ns: retry_after.map_or(0, Duration::as_nanos),
        ..GetOutcome::default()
    }
}
