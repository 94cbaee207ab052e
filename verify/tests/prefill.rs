//! The prefill role by itself: what it keeps and when, and what a failed load costs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::{BoxFuture, FutureExt};
use millpond_core::hash::BlockName;
use millpond_core::time::Duration;
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_core::wire::message::serve::PrefillDone;
use millpond_node::engine::{Engine, Options, RegionBuf, RegionBytes};
use millpond_node::kv::{Blocks, LocalBlocks, Missing, Page, Pool, Tenants};
use millpond_node::metrics::Registry;
use millpond_node::model::{Card, Model, ModelError, Piece, toy::Toy};
use millpond_node::prefill::{self, Computed, Outlet, Prefill, Prompt, Stopped};
use millpond_node::runtime::{Runtime, within};
use millpond_tokio::Tokio;

const CHUNK: usize = 64;
const BLOCK: usize = 16;

/// The toy, which waits before the third chunk of a prompt until it is let on.
struct Halting {
    toy: Toy,
    go_on: AtomicBool,
}

impl Model for Halting {
    fn card(&self) -> &Card {
        self.toy.card()
    }

    fn forward(&self, pieces: &mut [Piece<'_>]) -> Result<(), ModelError> {
        while pieces[0].start as usize >= 2 * CHUNK && !self.go_on.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        self.toy.forward(pieces)
    }
}

/// An outlet to nowhere that holds the layers of one chunk until the next one begins.
#[derive(Default)]
struct Holding {
    held: Vec<RegionBytes>,
}

impl Outlet for Holding {
    fn loaded(&mut self, pages: &mut [Page]) -> Result<(), Stopped> {
        assert!(pages.is_empty(), "nothing is stored yet");
        Ok(())
    }

    fn layer(&mut self, layer: u32, _: usize, pages: &mut [Page]) -> Result<(), Stopped> {
        if layer == 0 {
            self.held.clear();
        }
        self.held.extend(pages.iter_mut().map(|page| page.share_layer(layer).expect("the pages are split")));
        Ok(())
    }

    fn finish(self: Box<Self>) -> BoxFuture<'static, Result<PrefillDone, Stopped>> {
        futures::future::ready(Ok(PrefillDone::default())).boxed()
    }
}

/// Loads all but one block; with the page of that block, or without.
struct Failing {
    blocks: LocalBlocks,
    is_page_lost: bool,
}

impl Blocks for Failing {
    fn load(&self, wanted: Vec<(BlockName, RegionBuf)>) -> BoxFuture<'static, Vec<Result<RegionBuf, Missing>>> {
        let (loaded, is_page_lost) = (self.blocks.load(wanted), self.is_page_lost);
        async move {
            let mut loaded = loaded.await;
            if loaded.iter().all(Result::is_ok) {
                let mut page = loaded[2].take_page();
                page.fill(0xff);
                loaded[2] = Err(Missing { page: (!is_page_lost).then_some(page) });
            }
            loaded
        }
        .boxed()
    }

    fn keep(&self, name: BlockName, parent: Option<BlockName>, page: RegionBytes) -> BoxFuture<'static, bool> {
        self.blocks.keep(name, parent, page)
    }
}

trait TakePage {
    fn take_page(&mut self) -> RegionBuf;
}

impl TakePage for Result<RegionBuf, Missing> {
    fn take_page(&mut self) -> RegionBuf {
        std::mem::replace(self, Err(Missing { page: None })).expect("the block is there")
    }
}

fn role(runtime: &Tokio, model: Arc<dyn Model>, blocks: Arc<dyn Blocks>) -> Prefill<Tokio> {
    let identity = Identity { node: [1; 16], incarnation: 1, host: HostIdentity::UNKNOWN };
    let engine = Engine::start(runtime.clone(), Options::new(identity)).unwrap();
    let layout = model.card().layout;
    let pool = Pool::new(&engine, layout, 64 * layout.page_len().next_multiple_of(4096)).unwrap();
    let (tenants, options) = (Tenants::new([3; 32]), prefill::Options::default());
    Prefill::new(runtime.clone(), model, pool, Some(blocks), tenants, options, &Registry::new())
}

fn prompt(len: usize) -> Prompt {
    let tokens = (0..len).map(|n| u32::try_from((n * 31 + n * n) % 256).unwrap()).collect();
    Prompt { tokens, ..Prompt::default() }
}

async fn run(role: &Prefill<Tokio>, prompt: &Prompt, outlet: Option<Box<dyn Outlet>>) -> Computed {
    let pages = role.pool().taken(u32::try_from(prompt.tokens.len().div_ceil(BLOCK)).unwrap()).await;
    role.run(prompt, pages, outlet).await.unwrap().0
}

/// A prompt of three chunks is given up in its third: what is in the store then, and what the next run finds.
fn given_up(outlet: Option<Box<dyn Outlet>>, kept: usize) {
    millpond_tokio::run(|runtime| async move {
        let blocks = Arc::new(LocalBlocks::new(64));
        let model = Arc::new(Halting { toy: Toy::new(), go_on: AtomicBool::new(false) });
        let role = role(&runtime, model.clone(), blocks.clone());
        let prompt = prompt(3 * CHUNK + 5);
        let running = run(&role, &prompt, outlet).boxed();
        let stored = async {
            while blocks.len() < kept {
                runtime.sleep(Duration::from_millis(1)).await;
            }
        };
        let seen = futures::future::select(running, stored.boxed());
        let seen = within(&runtime, Duration::from_secs(20), seen).await.expect("complete blocks were not stored");
        assert!(matches!(seen, futures::future::Either::Right(_)), "it ended although it was halted");
        model.go_on.store(true, Ordering::Release);
        drop(seen);
        assert_eq!(blocks.len(), kept);
        let computed = run(&role, &prompt, None).await;
        assert_eq!(computed.cached_tokens as usize, kept * BLOCK);
        assert_eq!(computed.kept_blocks, prompt.tokens.len() / BLOCK);
    })
    .unwrap();
}

#[test]
fn complete_blocks_are_stored_before_the_prompt_is_done() {
    given_up(None, 2 * CHUNK / BLOCK);
}

#[test]
fn blocks_that_are_still_being_sent_are_stored_a_chunk_later() {
    given_up(Some(Box::new(Holding::default())), CHUNK / BLOCK);
}

#[test]
fn a_block_that_cannot_be_loaded_is_computed() {
    millpond_tokio::run(|runtime| async move {
        for is_page_lost in [false, true] {
            let blocks = Arc::new(Failing { blocks: LocalBlocks::new(64), is_page_lost });
            let role = role(&runtime, Arc::new(Toy::new()), blocks.clone());
            let prompt = prompt(100);
            let first = run(&role, &prompt, None).await;
            while blocks.blocks.len() < first.kept_blocks {
                runtime.sleep(Duration::from_millis(1)).await;
            }
            let second = run(&role, &prompt, None).await;
            assert_eq!(second.cached_tokens as usize, 2 * BLOCK);
            assert_eq!(second.next_token, first.next_token);
            let bytes = |mut computed: Computed| {
                computed.pages.iter_mut().flat_map(|page| page.share().to_vec()).collect::<Vec<u8>>()
            };
            let used = 6 * usize::try_from(role.card().layout.page_len()).unwrap();
            assert!(bytes(first)[..used] == bytes(second)[..used], "the KV of full blocks differs");
        }
    })
    .unwrap();
}
