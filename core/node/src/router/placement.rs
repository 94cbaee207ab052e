//! Which prefill and which decode node serve a request: the longest known prefix weighed against the work already queued.
//!
//! The cost of a prefill node is counted in tokens it has to compute before the request's first one is there: what it owes
//! others, plus the part of the prompt it is not known to have. That is one currency for both wishes, so no threshold is
//! needed. The cheapest decode node is the one with the fewest requests. Among equals the choice goes round.

use serde_json::{Value, json};

/// What is known of a prefill node.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefillView {
    /// Prompt tokens it owes to requests already placed there.
    pub(super) owed_tokens: u64,
    /// Tokens of this prompt's prefix that it is thought to have.
    pub(super) matched_tokens: u64,
    pub(super) available: Available,
}

/// What is known of a decode node.
#[derive(Clone, Copy, Debug)]
pub(super) struct DecodeView {
    /// Requests placed there that have not ended.
    pub(super) requests: u64,
    pub(super) available: Available,
}

/// Whether a node may be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Available {
    /// It answers.
    Yes,
    /// It did not answer lately, or failed this request before: only if nobody better is there.
    AtWorst,
}

/// The index of the node to compute a prompt of `prompt_tokens`; `None` if there is none at all.
pub(super) fn prefill(nodes: &[PrefillView], prompt_tokens: u64, turn: usize) -> Option<usize> {
    cheapest(nodes.len(), turn, |index| (nodes[index].available, prefill_cost(&nodes[index], prompt_tokens)))
}

/// The index of the node to decode on.
pub(super) fn decode(nodes: &[DecodeView], turn: usize) -> Option<usize> {
    cheapest(nodes.len(), turn, |index| (nodes[index].available, nodes[index].requests))
}

fn prefill_cost(node: &PrefillView, prompt_tokens: u64) -> u64 {
    // The last token is computed in any case: its logits are the answer's start.
    node.owed_tokens + prompt_tokens - node.matched_tokens.min(prompt_tokens.saturating_sub(1))
}

/// The index of least cost, the first from `turn` on among equals.
fn cheapest<C: Ord>(count: usize, turn: usize, cost: impl Fn(usize) -> C) -> Option<usize> {
    (0..count).map(|step| (turn % count + step) % count).min_by_key(|index| cost(*index))
}

/// The candidates and their costs, for the record.
pub(super) fn explained(prefills: &[PrefillView], decodes: &[DecodeView], prompt_tokens: u64) -> Value {
    json!({
        "prefill": prefills.iter().map(|node| json!({
            "owed_tokens": node.owed_tokens, "matched_tokens": node.matched_tokens,
            "cost_tokens": prefill_cost(node, prompt_tokens), "available": node.available == Available::Yes,
        })).collect::<Vec<_>>(),
        "decode": decodes.iter().map(|node| json!({
            "requests": node.requests, "available": node.available == Available::Yes,
        })).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(owed_tokens: u64, matched_tokens: u64) -> PrefillView {
        PrefillView { owed_tokens, matched_tokens, available: Available::Yes }
    }

    #[test]
    fn a_known_prefix_wins_until_its_node_owes_more_than_it_saves() {
        assert_eq!(prefill(&[node(0, 0), node(0, 900)], 1_000, 0), Some(1));
        assert_eq!(prefill(&[node(0, 0), node(800, 900)], 1_000, 0), Some(1));
        assert_eq!(prefill(&[node(0, 0), node(901, 900)], 1_000, 0), Some(0));
    }

    #[test]
    fn equals_take_turns() {
        let nodes = [node(0, 0), node(0, 0), node(0, 0)];
        let chosen: Vec<_> = (0..4).map(|turn| prefill(&nodes, 10, turn).unwrap()).collect();
        assert_eq!(chosen, [0, 1, 2, 0]);
    }

    #[test]
    fn a_node_that_does_not_answer_is_taken_only_if_no_other_is_there() {
        let mut nodes = [node(0, 900), node(5_000, 0)];
        nodes[0].available = Available::AtWorst;
        assert_eq!(prefill(&nodes, 1_000, 0), Some(1));
        nodes[1].available = Available::AtWorst;
        assert_eq!(prefill(&nodes, 1_000, 0), Some(0));
        assert_eq!(prefill(&[], 1_000, 0), None);
    }

    #[test]
    fn decode_goes_where_the_fewest_are() {
        let node = |requests| DecodeView { requests, available: Available::Yes };
        assert_eq!(decode(&[node(3), node(1), node(2)], 0), Some(1));
    }
}
