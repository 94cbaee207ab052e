//! How a follower reaches the directory.

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, BoxStream, StreamExt};
use millpond_core::directory::{EventPage, Holdings, NodeId, OwnerView, Place, Stamp};
use millpond_core::time::Duration;
use millpond_core::wire::message::directory as wire;

use crate::directory::{Link, LinkError};
use crate::runtime::Runtime;

/// How long one answer may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long one stream of changes lasts; then another goes on.
const STREAM: Duration = Duration::from_secs(1_800);
/// Objects looked at for one page of holdings; the directory may take fewer.
const PAGE: u32 = 4_096;

/// The directory, as far as a router asks it anything. Errors are for people: whatever they are, it is asked anew.
pub(in crate::router) trait Source: Send + Sync {
    /// Pages of events behind `after`, in order; an empty one is a sign of life.
    fn changes(&self, after: Stamp) -> BoxStream<'static, Result<EventPage, String>>;

    /// The nodes that hold anything.
    fn nodes(&self) -> BoxFuture<'static, Result<Vec<NodeId>, String>>;

    /// A page of the blocks that one of them holds, behind `after`.
    fn holdings(&self, node: NodeId, after: Option<Place>) -> BoxFuture<'static, Result<Holdings, String>>;
}

/// A link to the directory and the clock for its deadlines.
pub(in crate::router) struct Linked<R> {
    pub(in crate::router) link: Link<R>,
    pub(in crate::router) runtime: R,
}

impl<R: Runtime> Source for Linked<R> {
    fn changes(&self, after: Stamp) -> BoxStream<'static, Result<EventPage, String>> {
        let (link, deadline) = (self.link.clone(), self.runtime.now() + STREAM);
        let watch = async move { link.watch(wire::WatchRequest { after: Some(after.into()) }, deadline).await };
        let pages = watch.map(|begun| match begun {
            Ok(watch) => {
                stream::unfold(watch, |mut watch| async move { Some((watch.next().await?, watch)) }).left_stream()
            }
            Err(error) => stream::iter([Err(error)]).right_stream(),
        });
        pages.flatten_stream().map(|batch| batch.and_then(|batch| page(&batch)).map_err(said)).boxed()
    }

    fn nodes(&self) -> BoxFuture<'static, Result<Vec<NodeId>, String>> {
        let (link, deadline) = (self.link.clone(), self.runtime.now() + PATIENCE);
        async move {
            let view = link.view(&wire::ViewRequest::default(), deadline).await.map_err(said)?;
            let node = |owner| OwnerView::try_from(owner).map(|view| view.owner.node);
            view.owners.iter().map(node).collect::<Result<_, _>>().map_err(|error| said(LinkError::Unreadable(error)))
        }
        .boxed()
    }

    fn holdings(&self, node: NodeId, after: Option<Place>) -> BoxFuture<'static, Result<Holdings, String>> {
        let (link, deadline) = (self.link.clone(), self.runtime.now() + PATIENCE);
        async move {
            let request = wire::HoldingsRequest {
                node: node.0.to_vec(),
                prefix: b"kv/".to_vec(),
                after: after.map(Into::into),
                max: PAGE,
            };
            let reply = link.holdings(&request, deadline).await.map_err(said)?;
            Holdings::try_from(&reply).map_err(|error| said(LinkError::Unreadable(error)))
        }
        .boxed()
    }
}

fn said(error: LinkError) -> String {
    error.to_string()
}

/// Events of kinds that a later version has are left out: the hole in the numbers is a gap, and a snapshot knows them all.
fn page(batch: &wire::EventBatch) -> Result<EventPage, LinkError> {
    let events: Result<Vec<_>, _> = batch.events.iter().map(wire::Event::read).collect();
    let events = events.map_err(LinkError::Unreadable)?.into_iter().flatten().collect();
    let next = batch.next.ok_or(LinkError::Unreadable(wire::Unreadable("next")))?.into();
    Ok(EventPage { events, next, gap: batch.gap })
}
