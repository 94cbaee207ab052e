//! The model's contract: KV and logits of a token depend on the tokens before it alone, bit for bit.

use millpond_node::model::pages::HeapPages;
use millpond_node::model::toy::Toy;
use millpond_node::model::{Model, Piece};
use proptest::prelude::*;

/// A request that is fed to the model in pieces of the given lengths.
#[derive(Clone, Debug)]
struct Request {
    tokens: Vec<u32>,
    /// Lengths of pieces, repeated until the tokens are used up.
    cuts: Vec<usize>,
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let request = (prop::collection::vec(0u32..259, 1..70), prop::collection::vec(1usize..40, 1..6))
        .prop_map(|(tokens, cuts)| Request { tokens, cuts });
    prop::collection::vec(request, 1..6)
}

struct State {
    kv: HeapPages,
    logits: Vec<f32>,
    done: usize,
}

fn state(model: &Toy, tokens: usize) -> State {
    let layout = model.card().layout;
    let pages = u32::try_from(layout.pages_for(tokens as u64)).unwrap();
    let logits = vec![f32::NAN; model.card().limits.vocabulary as usize];
    State { kv: HeapPages::new(layout, pages), logits, done: 0 }
}

/// All tokens of one request in one piece, nobody beside it.
fn alone(model: &Toy, tokens: &[u32]) -> State {
    let mut state = state(model, tokens.len());
    let State { kv, logits, .. } = &mut state;
    model.forward(&mut [Piece { tokens, start: 0, kv, logits: Some(logits) }]).unwrap();
    state
}

/// All requests side by side: each call computes the next piece of every one that is not done.
fn together(model: &Toy, requests: &[Request]) -> Vec<State> {
    let mut states: Vec<State> = requests.iter().map(|request| state(model, request.tokens.len())).collect();
    for round in 0.. {
        let mut pieces = Vec::new();
        for (request, state) in requests.iter().zip(&mut states) {
            let rest = &request.tokens[state.done..];
            let tokens = &rest[..rest.len().min(request.cuts[round % request.cuts.len()])];
            if tokens.is_empty() {
                continue;
            }
            let start = u32::try_from(state.done).unwrap();
            state.done += tokens.len();
            pieces.push(Piece { tokens, start, kv: &mut state.kv, logits: Some(&mut state.logits) });
        }
        if pieces.is_empty() {
            break;
        }
        model.forward(&mut pieces).unwrap();
    }
    states
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn chunks_and_batches_do_not_change_a_bit(requests in requests()) {
        let model = Toy::new();
        let states = together(&model, &requests);
        for (request, state) in requests.iter().zip(states) {
            let expected = alone(&model, &request.tokens);
            prop_assert_eq!(&state.kv, &expected.kv);
            let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&state.logits), bits(&expected.logits));
        }
    }
}

#[test]
fn a_token_depends_on_the_tokens_before_it() {
    let model = Toy::new();
    let logits = |tokens: &[u32]| alone(&model, tokens).logits;
    assert_ne!(logits(&[1, 2, 3]), logits(&[2, 1, 3]), "order matters");
    assert_ne!(logits(&[1, 2, 3]), logits(&[9, 2, 3]), "the first token matters");
    let mut long: Vec<u32> = (0..100).map(|n| n % 250).collect();
    let before = logits(&long);
    long[0] = 255;
    assert_ne!(before, logits(&long), "a token six pages back matters");
}
