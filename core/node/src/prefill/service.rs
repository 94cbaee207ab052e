//! The prefill role behind the node port.

use std::convert::Infallible;

use futures::channel::oneshot;
use millpond_core::layout::Layout;
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::serve::{
    FirstToken, KvTarget, METHOD_PREFILL, PrefillDone, PrefillRequest, PrefillStep, PrefillTimes, REQUEST_ID_LEN_MAX,
};

use zerocopy::FromBytes;

use super::{Computed, Outlet, Prefill, Prompt, Sender, Stopped};
use crate::engine::{Engine, Peer, RegionToken, RemoteRegion, Via};
use crate::kv::Page;
use crate::model::sample;
use crate::rpc::{Context, Items, Reason, Refusal, Router};
use crate::runtime::{Runtime, by};
use crate::session::Target;

/// How long a busy engine is asked again, and how often.
const BUSY_MAX: Duration = Duration::from_secs(5);
const BUSY_PAUSE: Duration = Duration::from_millis(2);

/// The method of the role, whose KV leaves through `engine`.
pub fn methods<R: Runtime>(prefill: &Prefill<R>, engine: &Engine<R>) -> Router {
    let (prefill, engine) = (prefill.clone(), engine.clone());
    Router::new().stream(METHOD_PREFILL, move |context: Context, request: PrefillRequest, items| {
        serve(prefill.clone(), engine.clone(), context, request, items)
    })
}

async fn serve<R: Runtime>(
    prefill: Prefill<R>,
    engine: Engine<R>,
    context: Context,
    request: PrefillRequest,
    mut items: Items<PrefillStep>,
) -> Result<(), Refusal> {
    let sampling = request.sampling.unwrap_or_default();
    sample::check(&sampling).map_err(|error| malformed(error.to_string()))?;
    if request.request_id.len() > REQUEST_ID_LEN_MAX {
        return Err(malformed(format!("a request id has at most {REQUEST_ID_LEN_MAX} bytes")));
    }
    prefill.check(&request.tokens, 0)?;
    check_model(&prefill, &request.model)?;
    let target = request.target.as_ref().ok_or_else(|| malformed("a prefill needs a target for its KV"))?;
    check_target(&prefill, target, request.tokens.len())?;
    let via = match request.via.as_str() {
        "" => Via::Auto,
        name => name.parse().map_err(|error: crate::engine::UnknownTransport| malformed(error.to_string()))?,
    };
    let remote = attach(&engine, target, context.deadline).await?;
    let layers = prefill.card().layout.shape().layer_count;
    let outlet: Box<dyn Outlet> = Box::new(Sender::new(engine, remote, target, layers, via));
    let prompt = Prompt { tokens: request.tokens.into(), sampling, tenant: request.tenant };
    let begun = prefill.runtime().now();
    let pages = prefill.pages(prompt.tokens.len()).await;
    let waited = prefill.runtime().now().since(begun).as_nanos();
    let (computed, outlet) = prefill.run(&prompt, pages, Some(outlet)).await?;
    let mut times = computed.times;
    times.queue_ns += waited;
    let first = FirstToken { token: computed.next_token, cached_tokens: computed.cached_tokens, times: Some(times) };
    let sending = prefill.runtime().now();
    let (told, was_told) = oneshot::channel();
    let sent = send_and_keep(&prefill, prompt, computed, outlet, was_told);
    items.send(&PrefillStep { first: Some(first), done: None }).await?;
    drop(told);
    let ended = |_| Refusal::new(Reason::Draining, "the node is ending");
    let done = sent.await.map_err(ended)?.map_err(Stopped::refusal)?;
    times = PrefillTimes {
        send_ns: prefill.runtime().now().since(sending).as_nanos(),
        sent_bytes: done.times.map_or(0, |times| times.sent_bytes),
        ..times
    };
    items.send(&PrefillStep { first: None, done: Some(PrefillDone { times: Some(times), ..done }) }).await
}

/// Lets the rest of the KV leave once the first token `was_told`, or the other end of that is gone, waits until it has arrived
/// and tells the caller, then gives its blocks to the store: also if nobody waits any more, because one token was all that
/// was asked for or the decode node is gone.
fn send_and_keep<R: Runtime>(
    prefill: &Prefill<R>,
    prompt: Prompt,
    mut computed: Computed,
    outlet: Option<Box<dyn Outlet>>,
    was_told: oneshot::Receiver<Infallible>,
) -> oneshot::Receiver<Result<PrefillDone, Stopped>> {
    let (owner, (sender, receiver)) = (prefill.clone(), oneshot::channel());
    prefill.runtime().spawn(async move {
        let done = match outlet {
            Some(mut outlet) => {
                // It is never told but by being dropped.
                let _ = was_told.await;
                match send_loaded(owner.runtime(), &mut *outlet, &mut computed.pages[..computed.unsent_pages]).await {
                    Ok(()) => outlet.finish().await,
                    Err(stopped) => Err(stopped),
                }
            }
            None => Ok(PrefillDone::default()),
        };
        // Nobody may be there to hear it.
        let _ = sender.send(done);
        owner.keep(&prompt.tenant, &prompt.tokens, computed.kept_blocks, computed.pages);
    });
    receiver
}

/// Lets the pages that were loaded leave. The first token is told already, so nobody can begin anew elsewhere: an engine that is
/// busy is asked again for a while.
async fn send_loaded<R: Runtime>(runtime: &R, outlet: &mut dyn Outlet, pages: &mut [Page]) -> Result<(), Stopped> {
    let give_up_at = runtime.now() + BUSY_MAX;
    loop {
        match outlet.loaded(pages) {
            Err(Stopped(refusal)) if refusal.reason == Reason::Busy && runtime.now() < give_up_at => {
                runtime.sleep(BUSY_PAUSE).await;
            }
            sent => return sent,
        }
    }
}

fn malformed(detail: impl Into<std::borrow::Cow<'static, str>>) -> Refusal {
    Refusal::new(Reason::Malformed, detail)
}

/// Refuses another model than the one that is served; an empty name is any.
pub(crate) fn check_model<R: Runtime>(prefill: &Prefill<R>, model: &str) -> Result<(), Refusal> {
    let id = &prefill.card().id;
    if model.is_empty() || model == id {
        return Ok(());
    }
    Err(Refusal::new(Reason::NotFound, format!("this node serves the model {id}, not {model}; ask another node")))
}

fn check_target<R: Runtime>(prefill: &Prefill<R>, target: &KvTarget, tokens: usize) -> Result<(), Refusal> {
    let layout = target.layout.ok_or_else(|| malformed("a target says the layout of its pages"))?;
    let (theirs, ours) =
        (Layout::try_from(layout).map_err(|error| malformed(error.to_string()))?, prefill.card().layout);
    if let Some(field) = ours.difference(&theirs) {
        let detail =
            format!("the KV layouts differ in {field}: {ours:?} here, {theirs:?} at the decode node; serve one model");
        return Err(malformed(detail));
    }
    if (target.page_offsets.len() as u64) < ours.pages_for(tokens as u64) {
        return Err(malformed("the target has fewer pages than the prompt needs"));
    }
    Ok(())
}

async fn attach<R: Runtime>(engine: &Engine<R>, target: &KvTarget, deadline: Instant) -> Result<RemoteRegion, Refusal> {
    let token = RegionToken::read_from_bytes(&target.token)
        .map_err(|_| malformed("the target's token is not 64 bytes long"))?;
    let peer = peer_of(engine, &token, &target.address, deadline).await?;
    engine.attach(&peer, &token).map_err(|error| Refusal::new(Reason::Stale, error.to_string()))
}

async fn peer_of<R: Runtime>(
    engine: &Engine<R>,
    token: &RegionToken,
    address: &str,
    deadline: Instant,
) -> Result<Peer, Refusal> {
    let own = engine.itself();
    if own.identity().incarnation == token.incarnation {
        return Ok(own);
    }
    let unreachable = |detail: String| Refusal::new(Reason::Unavailable, detail);
    Target::parse(address).map_err(|error| malformed(error.to_string()))?;
    let opened = by(engine.runtime(), deadline, engine.open_named(address)).await;
    opened.map_err(|error| unreachable(error.to_string()))?.map_err(|error| unreachable(error.to_string()))
}
