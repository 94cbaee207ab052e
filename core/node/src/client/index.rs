//! What a client asks the directory: exists, stat, list, remove, explain, watch.

use millpond_core::directory::{
    Event, Explanation, KeyError, Listed, Location, OwnerView, Pin, Removed, Stamp, Stat, Tier,
};
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::directory as wire;

use super::types::{ClientError, MissReason, RemoveOptions};
use super::{Inner, StoreClient};
use crate::directory::{LinkError, Watch};
use crate::rpc::{Reason, Refusal};
use crate::runtime::{Runtime, sleep_until};

/// A page of a listing.
///
/// Example: `verify/tests/store.rs` (`list`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// In byte order of the keys.
    pub rows: Vec<Listed>,
    /// The last event before the page was read: where a watch that follows the listing starts.
    pub position: Stamp,
}

/// A listing, page by page. See [`StoreClient::list`].
///
/// Example: `verify/tests/store.rs` (`list`).
#[derive(Debug)]
pub struct Listing<R> {
    client: StoreClient<R>,
    prefix: Vec<u8>,
    after: Option<Vec<u8>>,
}

/// A stream of changes. See [`StoreClient::watch`].
///
/// Example: `verify/tests/store.rs` (`watch`).
#[derive(Debug)]
pub struct Changes<R> {
    watch: Watch<R>,
}

fn unreadable(field: &'static str) -> ClientError {
    ClientError::Directory(LinkError::Unreadable(wire::Unreadable(field)))
}

fn check_key(key: &[u8]) -> Result<(), ClientError> {
    let checked = millpond_core::directory::Key::new(key).map(|_| ());
    checked.map_err(|error: KeyError| {
        ClientError::Directory(LinkError::Refused(Refusal::new(Reason::Malformed, error.to_string())))
    })
}

impl<R: Runtime> StoreClient<R> {
    /// Whether keys are there; an answer per key. No lease is taken: it may be gone a moment later.
    pub async fn exists(&self, keys: &[Vec<u8>]) -> Result<Vec<bool>, ClientError> {
        keys.iter().try_for_each(|key| check_key(key))?;
        let give_up_at = self.inner.now() + self.inner.options.patience;
        let mut present = Vec::with_capacity(keys.len());
        for part in keys.chunks(wire::ITEMS_MAX) {
            let request = wire::ExistsRequest { keys: part.to_vec() };
            let reply = loop {
                let reply = self.inner.link.exists(&request, self.inner.short_deadline()).await?;
                let again = self.inner.now() + Duration::from_nanos(reply.rebuilding_ns);
                if !reply.present.contains(&2) || again >= give_up_at {
                    break reply;
                }
                sleep_until(self.inner.engine.runtime(), again).await;
            };
            if reply.present.len() != part.len() {
                return Err(unreadable("present"));
            }
            present.extend(reply.present.iter().map(|byte| *byte == 1));
        }
        Ok(present)
    }

    /// What is known of `key`, or why nothing is.
    pub async fn stat(&self, key: &[u8]) -> Result<Result<Stat, MissReason>, ClientError> {
        check_key(key)?;
        let request = wire::StatRequest { key: key.to_vec() };
        let reply = self.inner.link.stat(&request, self.inner.short_deadline()).await?;
        let located = reply.located.as_ref().ok_or_else(|| unreadable("located"))?;
        if !located.hit {
            return Ok(Err(match located.rebuilding_ns {
                0 => MissReason::Absent,
                nanos => MissReason::Rebuilding { retry_after: Duration::from_nanos(nanos) },
            }));
        }
        let place = |(location, tier): (&wire::Location, &u32)| -> Result<(Location, Tier), wire::Unreadable> {
            Ok((location.try_into()?, Tier::from_code(*tier)?))
        };
        let replicas: Result<Vec<_>, _> = located.replicas.iter().zip(&reply.tiers).map(place).collect();
        Ok(Ok(Stat {
            version: located.version.ok_or_else(|| unreadable("version"))?.into(),
            len: located.len,
            replicas: replicas.map_err(LinkError::Unreadable)?,
            age: Duration::from_nanos(reply.age_ns),
            lease_left: Duration::from_nanos(reply.lease_left_ns),
            pin: Pin::try_from(reply.pin).map_err(LinkError::Unreadable)?,
            mutable: reply.mutable,
        }))
    }

    /// Keys that begin with `prefix`, in byte order, page by page.
    #[must_use]
    pub fn list(&self, prefix: &[u8]) -> Listing<R> {
        Listing { client: self.clone(), prefix: prefix.to_vec(), after: Some(Vec::new()) }
    }

    /// Removes keys. What is not there counts as removed, and as no object.
    pub async fn remove(&self, keys: &[Vec<u8>], options: RemoveOptions) -> Result<Removed, ClientError> {
        keys.iter().try_for_each(|key| check_key(key))?;
        let mut sum = Removed::default();
        for part in keys.chunks(wire::ITEMS_MAX) {
            let request =
                wire::RemoveRequest { keys: part.to_vec(), force: options.force, ..wire::RemoveRequest::default() };
            add(&mut sum, self.inner.link.remove(&request, self.inner.short_deadline()).await?);
        }
        keys.iter().for_each(|key| self.inner.forget(key, None));
        Ok(sum)
    }

    /// Removes everything that begins with `prefix`; with an empty one, everything that is there now.
    pub async fn remove_prefix(&self, prefix: &[u8], options: RemoveOptions) -> Result<Removed, ClientError> {
        let (mut sum, mut after) = (Removed::default(), Vec::new());
        // Ends with the keys: each page begins after the last key of the one before.
        loop {
            let request = wire::RemoveRequest {
                keys: Vec::new(),
                prefix: prefix.to_vec(),
                after: std::mem::take(&mut after),
                force: options.force,
            };
            let reply = self.inner.link.remove(&request, self.inner.short_deadline()).await?;
            after = reply.next.clone();
            add(&mut sum, reply);
            if after.is_empty() {
                break;
            }
        }
        self.inner.locations.lock().retain(|key, _| !key.starts_with(prefix));
        Ok(sum)
    }

    /// Clears the store: everything stored so far is gone and never returns, whoever holds it. Returns how many objects.
    pub async fn clear(&self) -> Result<u64, ClientError> {
        let reply = self.inner.link.clear(&wire::ClearRequest {}, self.inner.short_deadline()).await?;
        self.inner.locations.lock().clear();
        Ok(reply.objects)
    }

    /// Why a get of `key` finds nothing, as far as the directory remembers.
    pub async fn explain_miss(&self, key: &[u8]) -> Result<Explanation, ClientError> {
        check_key(key)?;
        let request = wire::ExplainRequest { key: key.to_vec() };
        let reply = self.inner.link.explain_miss(&request, self.inner.short_deadline()).await?;
        Ok(Explanation::try_from(&reply).map_err(LinkError::Unreadable)?)
    }

    /// The store's nodes and segments, as the directory sees them now.
    pub async fn view(&self) -> Result<Vec<OwnerView>, ClientError> {
        let view = self.inner.owners.refresh(&self.inner.link, self.inner.short_deadline()).await?;
        Ok(view.to_vec())
    }

    /// Changes after `after`, or from now on, until `deadline`.
    pub async fn watch(&self, after: Option<Stamp>, deadline: Instant) -> Result<Changes<R>, ClientError> {
        let request = wire::WatchRequest { after: after.map(Into::into) };
        Ok(Changes { watch: self.inner.link.watch(request, deadline).await? })
    }
}

fn add(sum: &mut Removed, reply: wire::RemoveReply) {
    sum.objects += reply.objects;
    sum.leased += reply.leased;
    sum.owners_unreachable = sum.owners_unreachable.max(reply.owners_unreachable);
}

impl<R: Runtime> Listing<R> {
    /// The next page; `None` after the last one.
    pub async fn next(&mut self) -> Result<Option<Rows>, ClientError> {
        let Some(after) = self.after.take() else { return Ok(None) };
        let inner: &Inner<R> = &self.client.inner;
        let request = wire::ListRequest { prefix: self.prefix.clone(), after, max: u32::MAX };
        let reply = inner.link.list(&request, inner.short_deadline()).await?;
        self.after = (!reply.next.is_empty()).then_some(reply.next);
        let row = |row: wire::Listed| {
            let version = row.version.ok_or_else(|| unreadable("version"))?.into();
            Ok(Listed { key: row.key.into(), version, len: row.len, replicas: row.replicas })
        };
        let rows: Result<Vec<Listed>, ClientError> = reply.rows.into_iter().map(row).collect();
        Ok(Some(Rows { rows: rows?, position: reply.position.ok_or_else(|| unreadable("position"))?.into() }))
    }
}

/// Some changes, in order.
///
/// Example: `verify/tests/store.rs` (`watch`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The changes; empty as a sign of life.
    pub events: Vec<Event>,
    /// Where to go on after a break.
    pub next: Stamp,
    /// Changes were lost before `next`: list everything, then watch on from there.
    pub gap: bool,
}

impl<R: Runtime> Changes<R> {
    /// The next changes; `None` at the deadline.
    pub async fn next(&mut self) -> Option<Result<Batch, ClientError>> {
        let batch = match self.watch.next().await? {
            Ok(batch) => batch,
            Err(error) => return Some(Err(error.into())),
        };
        let events: Result<Vec<Option<Event>>, _> = batch.events.iter().map(wire::Event::read).collect();
        Some(match (events, batch.next) {
            (Ok(events), Some(next)) => {
                Ok(Batch { events: events.into_iter().flatten().collect(), next: next.into(), gap: batch.gap })
            }
            (Err(error), _) => Err(LinkError::Unreadable(error).into()),
            (_, None) => Err(unreadable("next")),
        })
    }
}
