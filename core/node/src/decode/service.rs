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

/// Answers how busy the roles of this node are; a decode role speaks for its node.
pub fn load_method<R: Runtime>(prefill: &Prefill<R>, decode: Option<&Decode<R>>) -> Router {
    let (prefill, decode) = (prefill.clone(), decode.cloned());
    Router::new().call(METHOD_LOAD, move |_: Context, _: LoadRequest| {
        let load = load(&prefill, decode.as_ref());
        async move { Ok::<Load, Refusal>(load) }
    })
}

fn load<R: Runtime>(prefill: &Prefill<R>, decode: Option<&Decode<R>>) -> Load {
    let pool: &Pool = decode.map_or(prefill.pool(), Decode::pool);
    let (prompts, waiting_tokens) = decode.map_or(prefill, Decode::prefill).load();
    let (running, waiting) = match decode {
        Some(decode) => decode.load(),
        None => (u64::from(prompts > 0), prompts.saturating_sub(1) as u64),
    };
    let counts = pool.counts();
    let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    Load {
        model: prefill.card().id.clone(),
        running: small(running),
        waiting: small(waiting),
        waiting_tokens,
        pages_free: counts.free,
        pages_total: counts.total(),
        layout: Some((*pool.layout()).into()),
    }
}
