//! The decode role behind the node port.

use futures::stream::StreamExt;
use millpond_core::wire::message::serve::{GenerateRequest, Load, LoadRequest, METHOD_GENERATE, METHOD_LOAD};

use super::Decode;
use crate::kv::Pool;
use crate::prefill::Prefill;
use crate::rpc::{Context, Items, Refusal, Router};
use crate::runtime::Runtime;

/// The method of the role.
pub fn methods<R: Runtime>(decode: &Decode<R>) -> Router {
    let decode = decode.clone();
    Router::new().stream(METHOD_GENERATE, move |context: Context, request: GenerateRequest, mut items: Items<_>| {
        let generation = decode.generate(request, context.deadline);
        async move {
            let mut generation = generation?;
            while let Some(step) = generation.next().await {
                items.send(&step?).await?;
            }
            Ok(())
        }
    })
}

/// Answers how busy the roles of this node are: the prefill role, the decode role or both. A decode role speaks for its node.
pub fn load_method<R: Runtime>(prefill: Option<&Prefill<R>>, decode: Option<&Decode<R>>) -> Router {
    let Some(own) = decode.map(Decode::prefill).or(prefill).cloned() else { return Router::new() };
    // A decode role computes prompts too, those that no prefill node could.
    let beside = prefill.filter(|_| decode.is_some()).cloned();
    let decode = decode.cloned();
    Router::new().call(METHOD_LOAD, move |_: Context, _: LoadRequest| {
        let load = load(&own, beside.as_ref(), decode.as_ref());
        async move { Ok::<Load, Refusal>(load) }
    })
}

fn load<R: Runtime>(own: &Prefill<R>, beside: Option<&Prefill<R>>, decode: Option<&Decode<R>>) -> Load {
    let pool: &Pool = own.pool();
    let (prompts, waiting_tokens) = own.load();
    let (running, waiting) = match decode {
        Some(decode) => decode.load(),
        None => (u64::from(prompts > 0), prompts.saturating_sub(1) as u64),
    };
    let counts = pool.counts();
    let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    Load {
        model: own.card().id.clone(),
        running: small(running),
        waiting: small(waiting),
        waiting_tokens: waiting_tokens + beside.map_or(0, |prefill| prefill.load().1),
        pages_free: counts.free,
        pages_total: counts.total(),
        layout: Some((*pool.layout()).into()),
    }
}
