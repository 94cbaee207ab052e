//! One request's way through the router, for its record and the metrics.
//!
//! Exactly one outcome is noted; a ticket that is dropped without one belonged to a client that went away.

use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::serve::{Finished, Started};
use serde_json::{Value, json};

use super::link::{Lost, Timers};
use super::meters::Meters;
use super::records::Records;
use super::request::{Failure, Generate};
use crate::metrics::Holding;

/// Failed tries that a record lists.
const TRIES_MAX: usize = 32;

pub(super) struct Ticket {
    pub(super) began: Instant,
    pub(super) token_count: u64,
    id: String,
    tenant: Option<String>,
    records: Records,
    meters: Meters,
    timers: Timers,
    last_token: Option<Instant>,
    ended: bool,
    _open: Holding,
}

impl Ticket {
    pub(super) fn new(records: Records, meters: Meters, timers: Timers, request: &Generate) -> Self {
        let began = timers.now();
        records.update(request.tenant.as_deref(), &request.id, |record| {
            *record = json!({"id": request.id, "model": request.model, "outcome": "open", "tries": []});
            if let Some(tenant) = &request.tenant {
                record["tenant"] = tenant.as_str().into();
            }
        });
        let open = meters.open.hold();
        Self {
            began,
            token_count: 0,
            id: request.id.clone(),
            tenant: request.tenant.clone(),
            records,
            meters,
            timers,
            last_token: None,
            ended: false,
            _open: open,
        }
    }

    pub(super) fn now(&self) -> Instant {
        self.timers.now()
    }

    fn since_began(&self) -> Duration {
        self.now().since(self.began)
    }

    /// Notes a field of the record.
    pub(super) fn note(&self, field: &str, value: impl Into<Value>) {
        let value = value.into();
        self.records.update(self.tenant.as_deref(), &self.id, |record| record[field] = value);
    }

    /// Notes where a try went and how it failed, if it did.
    pub(super) fn tried(&self, prefill: Option<&str>, decode: &str, lost: Option<&Lost>) {
        let at = self.since_began().as_micros();
        let outcome = lost.map_or_else(|| "served".to_owned(), |lost| format!("{lost:?}"));
        let value = json!({"prefill": prefill, "decode": decode, "until_us": at, "outcome": outcome});
        self.records.update(self.tenant.as_deref(), &self.id, |record| {
            if let Some(tries) = record["tries"].as_array_mut()
                && tries.len() < TRIES_MAX
            {
                tries.push(value);
            }
        });
    }

    /// The first token is there.
    pub(super) fn begun(&mut self, prompt_tokens: u64, started: &Started) {
        let first = self.since_began();
        self.meters.first_token.observe(first);
        self.meters.prompt_tokens.add(prompt_tokens);
        if let Some(tenant) = &self.tenant {
            self.meters.tenant_tokens(tenant, "prompt").add(prompt_tokens);
        }
        self.meters.cached_tokens.add(started.cached_tokens.into());
        let prefill = started.prefill.unwrap_or_default();
        self.records.update(self.tenant.as_deref(), &self.id, |record| {
            record["prompt_tokens"] = prompt_tokens.into();
            record["cached_tokens"] = started.cached_tokens.into();
            record["first_token_us"] = first.as_micros().into();
            record["decode_us"] = json!({
                "reserve": micros(started.reserve_ns), "prefill": micros(started.prefill_ns),
            });
            record["prefill_us"] = json!({
                "queue": micros(prefill.queue_ns), "load": micros(prefill.load_ns),
                "compute": micros(prefill.compute_ns),
            });
        });
    }

    /// The decode node's account of the end.
    pub(super) fn finished(&self, finished: &Finished) {
        self.records.update(self.tenant.as_deref(), &self.id, |record| {
            record["pauses"] = finished.pauses.into();
            record["batch_max"] = finished.batch_max.into();
            let Some(sent) = &finished.sent else { return };
            let times = sent.times.unwrap_or_default();
            record["via"] = sent.via.as_str().into();
            record["sent_bytes"] = times.sent_bytes.into();
            record["prefill_us"]["send"] = micros(times.send_ns).into();
            record["decode_us"]["arrive"] = micros(finished.arrive_ns).into();
        });
    }

    /// `count` more tokens came.
    pub(super) fn tokens(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        let (now, count) = (self.now(), count as u64);
        if let Some(last) = self.last_token {
            let each = Duration::from_nanos(now.since(last).as_nanos() / count);
            (0..count).for_each(|_| self.meters.between_tokens.observe(each));
        }
        self.last_token = Some(now);
        self.token_count += count;
        self.meters.generated_tokens.add(count);
    }

    /// The answer ended as it should.
    pub(super) fn done(&mut self, how: &str) {
        self.end(how, Value::Null);
    }

    /// There is no answer, or no more of it.
    pub(super) fn failed(&mut self, failure: &Failure) {
        if let (Some(tenant), Failure::Overloaded { stage, .. }, false) = (&self.tenant, failure, self.ended) {
            self.meters.tenant_refusals(tenant, stage.name()).add(1);
        }
        self.end("failed", failure.to_string().into());
    }

    fn end(&mut self, outcome: &str, error: Value) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.meters.requests(outcome).add(1);
        if let Some(tenant) = &self.tenant {
            self.meters.tenant_requests(tenant, outcome).add(1);
            self.meters.tenant_tokens(tenant, "generated").add(self.token_count);
        }
        let (took, tokens) = (self.since_began().as_micros(), self.token_count);
        self.records.update(self.tenant.as_deref(), &self.id, |record| {
            record["outcome"] = outcome.into();
            record["generated_tokens"] = tokens.into();
            record["took_us"] = took.into();
            if !error.is_null() {
                record["error"] = error;
            }
        });
    }
}

fn micros(nanos: u64) -> u64 {
    nanos / 1_000
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.end("cancelled", Value::Null);
    }
}
