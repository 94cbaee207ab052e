//! One request in the decode role: its tokens, its pages, and who listens.

use futures::channel::mpsc;
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::serve::{FinishReason, Finished, GenerateRequest, Generated, PrefillDone, Sampling};

use super::door::Place;
use crate::kv::Page;
use crate::model::sample::sample;
use crate::rpc::Refusal;

/// What the listener of a request gets.
pub(super) type Event = Result<Generated, Refusal>;

/// A request whose prompt was computed. Its pages hold the KV of all tokens but the last.
pub(super) struct Sequence {
    pub(super) tokens: Vec<u32>,
    pub(super) pages: Vec<Page>,
    pub(super) tenant: String,
    pub(super) sampling: Sampling,
    pub(super) priority: u32,
    /// When it joined, counted up: the later one is paused first.
    pub(super) order: u64,
    pub(super) last_token_at: Instant,
    pub(super) arrive_ns: u64,
    /// How its KV came.
    pub(super) sent: Option<PrefillDone>,
    pub(super) pauses: u32,
    pub(super) batch_max: u32,
    /// When the request came.
    pub(super) arrived: Instant,
    /// Its place in the batch, once it has one.
    pub(super) place: Option<Place>,
    /// How long its first token may take from then on.
    pub(super) ttft_slo: Duration,
    pub(super) tbt_slo: Option<Duration>,
    prompt_len: usize,
    max_tokens: usize,
    stop_tokens: Vec<u32>,
    listener: mpsc::UnboundedSender<Event>,
}

impl Sequence {
    /// A sequence of the prompt's tokens, before its first token.
    pub(super) fn new(request: GenerateRequest, listener: mpsc::UnboundedSender<Event>, now: Instant) -> Self {
        let prompt_len = request.tokens.len();
        Self {
            tokens: request.tokens,
            pages: Vec::new(),
            tenant: request.tenant,
            sampling: request.sampling.unwrap_or_default(),
            priority: request.priority,
            order: 0,
            last_token_at: now,
            arrive_ns: 0,
            sent: None,
            pauses: 0,
            batch_max: 0,
            arrived: now,
            place: None,
            ttft_slo: if request.ttft_slo_ns > 0 { Duration::from_nanos(request.ttft_slo_ns) } else { Duration::MAX },
            tbt_slo: (request.tbt_slo_ns > 0).then(|| Duration::from_nanos(request.tbt_slo_ns)),
            prompt_len,
            max_tokens: request.max_tokens as usize,
            stop_tokens: request.stop_tokens,
            listener,
        }
    }

    /// The position of the token to compute next.
    pub(super) fn position(&self) -> u32 {
        u32::try_from(self.tokens.len() - 1).expect("checked against the context")
    }

    /// Whether the token that follows the prompt is all that was asked for.
    pub(super) fn is_one_token(&self) -> bool {
        self.max_tokens <= 1
    }

    /// Nobody listens any more.
    pub(super) fn is_abandoned(&self) -> bool {
        self.listener.is_closed()
    }

    /// How late the next token may still be; without a wish, any time.
    pub(super) fn slack(&self, now: Instant) -> Duration {
        self.tbt_slo.map_or(Duration::MAX, |slo| slo - now.since(self.last_token_at).min(slo))
    }

    /// Takes the token that follows and tells the listener, with what `fill` adds. `true`: the sequence is over.
    pub(super) fn take_token(&mut self, token: u32, now: Instant, fill: impl FnOnce(&mut Generated)) -> bool {
        self.last_token_at = now;
        let mut step = Generated::default();
        fill(&mut step);
        let reason = if self.stop_tokens.contains(&token) {
            Some(FinishReason::Stop)
        } else {
            step.tokens.push(token);
            self.tokens.push(token);
            self.place.iter().for_each(Place::grow);
            (self.generated() >= self.max_tokens).then_some(FinishReason::Length)
        };
        step.finished = reason.map(|reason| Finished {
            reason: reason.into(),
            generated_tokens: u32::try_from(self.generated()).unwrap_or(u32::MAX),
            pauses: self.pauses,
            batch_max: self.batch_max,
            arrive_ns: self.arrive_ns,
            sent: self.sent.clone(),
        });
        let is_over = step.finished.is_some();
        // A listener that left is noticed before the next step.
        let _ = self.listener.unbounded_send(Ok(step));
        is_over
    }

    /// Tells the listener something that is no token.
    pub(super) fn tell(&self, message: Generated) {
        // A listener that left is noticed before the next step.
        let _ = self.listener.unbounded_send(Ok(message));
    }

    /// The token that follows the last one, by its logits.
    pub(super) fn choose(&self, logits: &[f32]) -> u32 {
        sample(logits, &self.sampling, self.position() + 1)
    }

    /// Ends it with an error.
    pub(super) fn fail(self, refusal: Refusal) {
        let _ = self.listener.unbounded_send(Err(refusal));
    }

    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }
}
