//! SmolLM2, the real thing: over nodes it says what one process says, logit for logit, and what candle says, nearly.
//!
//! Needs the weights (`core/node/scripts/fetch-smollm2.sh`); without them nothing is tested here, and it says so.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use millpond_core::wire::message::serve::Sampling;
use millpond_node::model::pages::HeapPages;
use millpond_node::model::sample::sample;
use millpond_node::model::{Card, Model, ModelError, Piece, Source, llama, next_chunk, toy::Toy};
use millpond_verify::reference::{Reference, Weights};
use millpond_verify::trio::Trio;
use parking_lot::Mutex;

const ANSWER: u32 = 64;
const TEXT: &str = "A mill pond is a body of water that is used as a reservoir for a mill. It is often made by a dam \
    across a stream, and the water leaves it through a race, which leads it to the wheel. When the mill stands still, \
    the pond fills again. Many such ponds are older than the towns around them; some are kept for their fish, and some \
    because nobody remembers how to drain them. The miller watches the level all year: in a dry summer he grinds by \
    night, and in a wet spring he opens the sluice before the dam is in danger. A careful miller writes down each \
    evening how high the water stood, and from such notes one can still read how the weather was two hundred years \
    ago. The wheel itself is the smaller part of the work. What costs a mill its days is silt: the stream brings it, the \
    still water lets it fall, and every few years the pond has to be emptied and dug out by hand before the frost. In \
    short, a mill pond is";

/// Past the capture of test output: whoever runs the tests sees it.
fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The weights' file; says loudly if it is not there.
fn weights() -> Option<PathBuf> {
    let path = llama::default_path();
    if path.is_file() {
        return Some(path);
    }
    say(format_args!("SKIPPED: no SmolLM2 in {}; fetch it with {}", path.display(), llama::FETCH_SCRIPT));
    None
}

fn load(path: PathBuf) -> Arc<dyn Model> {
    Source::File(path).load(std::thread::available_parallelism().map_or(1, usize::from)).unwrap()
}

/// Keeps the logits that a model gave out.
struct Recorder {
    model: Arc<dyn Model>,
    rows: Mutex<Vec<Vec<f32>>>,
}

impl Recorder {
    fn new(model: &Arc<dyn Model>) -> Arc<Self> {
        Arc::new(Self { model: Arc::clone(model), rows: Mutex::default() })
    }
}

impl Model for Recorder {
    fn card(&self) -> &Card {
        self.model.card()
    }

    fn forward(&self, pieces: &mut [Piece<'_>]) -> Result<(), ModelError> {
        self.model.forward(pieces)?;
        self.rows.lock().extend(pieces.iter().filter_map(|piece| piece.logits.as_deref().map(<[f32]>::to_vec)));
        Ok(())
    }
}

fn small(value: usize) -> u32 {
    u32::try_from(value).unwrap()
}

fn text(model: &dyn Model, tokens: &[u32]) -> String {
    let bytes = tokens.iter().flat_map(|token| model.card().tokenizer.bytes_of(*token));
    String::from_utf8_lossy(&bytes.copied().collect::<Vec<u8>>()).into_owned()
}

/// One process, the prompt in one piece: what it says and its logits.
fn alone(model: &dyn Model, prompt: &[u32]) -> (Vec<u32>, Vec<Vec<f32>>) {
    let layout = model.card().layout;
    let pages = layout.pages_for(prompt.len() as u64 + u64::from(ANSWER));
    let mut kv = HeapPages::new(layout, u32::try_from(pages).unwrap());
    let (mut said, mut rows, mut start) = (prompt.to_vec(), Vec::new(), 0);
    while rows.len() < ANSWER as usize {
        let mut logits = vec![0.0; model.card().limits.vocabulary as usize];
        let piece = Piece { tokens: &said[start..], start: small(start), kv: &mut kv, logits: Some(&mut logits) };
        model.forward(&mut [piece]).unwrap();
        start = said.len();
        said.push(sample(&logits, &Sampling::default(), small(start)));
        rows.push(logits);
    }
    (said.split_off(prompt.len()), rows)
}

/// The largest difference between logits at the same place.
fn difference(ours: &[Vec<f32>], theirs: &[Vec<f32>]) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    let pairs = ours.iter().flatten().zip(theirs.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Prefill, transfer, store and decode beside one process, over each transport, before and after a restart of the prefill node.
fn over_nodes(model: Arc<dyn Model>, prompt: Vec<u32>) {
    let block = model.card().layout.shape().block_tokens as usize;
    let chunk = model.card().limits.chunk_tokens as usize;
    assert!(next_chunk(prompt.len(), chunk) + 2 * block < prompt.len(), "several chunks, several blocks");
    let (expected, expected_rows) = alone(&*model, &prompt);
    say(format_args!("{} says: {}", model.card().id, text(&*model, &expected)));
    millpond_tokio::run(|runtime| async move {
        for via in ["tcp", "shm"] {
            let (prefill, decode) = (Recorder::new(&model), Recorder::new(&model));
            let mut trio = Trio::start(runtime.clone(), prefill.clone(), decode.clone(), via).await;
            let mut stored = 0;
            for is_restarted in [false, true] {
                let said = trio.say(&prompt, ANSWER).await;
                assert_eq!(said.tokens, expected, "{via}, prefill restarted: {is_restarted}");
                let cached = said.started.cached_tokens as usize;
                if stored == prompt.len() / block {
                    assert_eq!(cached, (prompt.len() - 1) / block * block, "{via}");
                } else {
                    assert!(cached <= stored * block, "{via}");
                }
                let mut rows = std::mem::take(&mut *prefill.rows.lock());
                rows.append(&mut decode.rows.lock());
                let largest = difference(&rows, &expected_rows);
                say(format_args!("{via}, {cached} tokens cached: largest logit difference to one process {largest}"));
                assert!(rows == expected_rows, "{via}: the logits differ by {largest}");
                if !is_restarted {
                    stored = trio.stored(prompt.len() / block).await;
                    assert!(stored > 0, "{via}: nothing was stored");
                    trio.restart_prefill(prefill.clone()).await;
                }
            }
            trio.end().await;
        }
    })
    .unwrap();
}

#[test]
fn over_nodes_the_toy_says_what_one_process_says() {
    let model: Arc<dyn Model> = Arc::new(Toy::new());
    let prompt = model.card().tokenizer.encode(&TEXT[..300]).unwrap();
    over_nodes(model, prompt);
}

#[test]
fn over_nodes_smollm2_says_what_one_process_says() {
    let Some(path) = weights() else { return };
    let model = load(path);
    let prompt = model.card().tokenizer.encode(TEXT).unwrap();
    over_nodes(model, prompt);
}

#[test]
fn candle_computes_nearly_the_same_logits() {
    let Some(path) = weights() else { return };
    let model = load(path.clone());
    let prompt = model.card().tokenizer.encode(TEXT).unwrap();
    let (said, rows) = alone(&*model, &prompt);
    let mut reference = Reference::load(&path, Weights::Widened).unwrap();
    let mut theirs = vec![reference.forward(&prompt).unwrap()];
    for token in &said[..15] {
        theirs.push(reference.forward(&[*token]).unwrap());
    }
    let largest = difference(&rows[..16], &theirs);
    let spread = theirs.iter().flatten().fold(0.0, |most: f32, logit| most.max(logit.abs()));
    say(format_args!("largest logit difference to candle {largest}, of logits up to {spread}"));
    let chosen = theirs.iter().map(|row| sample(row, &Sampling::default(), 0));
    assert_eq!(chosen.collect::<Vec<_>>(), said[..16], "candle chooses other tokens");
    assert!(largest < BOUND, "{largest}");
}

/// KV is rounded to 16 bits here and not there, of logits up to 27; 0.007 was seen.
const BOUND: f32 = 0.05;
