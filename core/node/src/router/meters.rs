//! What a router counts.

use crate::metrics::{Counter, Gauge, Latency, Registry};

/// A router's metrics.
#[derive(Clone, Debug)]
pub(super) struct Meters {
    registry: Registry,
    pub(super) open: Gauge,
    pub(super) first_token: Latency,
    pub(super) between_tokens: Latency,
    pub(super) prompt_tokens: Counter,
    pub(super) cached_tokens: Counter,
    pub(super) generated_tokens: Counter,
}

impl Meters {
    pub(super) fn new(registry: &Registry) -> Self {
        let counter = |name, help| registry.counter(name, help, &[]);
        Self {
            registry: registry.clone(),
            open: registry.gauge("millpond_router_requests_open", "Requests that wait or run.", &[]),
            first_token: registry.latency(
                "millpond_router_time_to_first_token_seconds",
                "From a request's arrival to its first token.",
                &[],
            ),
            between_tokens: registry.latency(
                "millpond_router_inter_token_seconds",
                "From a token to the next one of the same request.",
                &[],
            ),
            prompt_tokens: counter("millpond_router_prompt_tokens_total", "Tokens of prompts that were served."),
            cached_tokens: counter("millpond_router_cached_tokens_total", "Those of them that came from the store."),
            generated_tokens: counter("millpond_router_generated_tokens_total", "Tokens that were generated."),
        }
    }

    /// Requests that ended so.
    pub(super) fn requests(&self, outcome: &str) -> Counter {
        self.registry.counter("millpond_router_requests_total", "Requests by outcome.", &[("outcome", outcome)])
    }

    /// Requests that were refused, `early` on arrival or `late` when their prompt was computed.
    pub(super) fn refusals(&self, stage: &str, reason: &str) -> Counter {
        let help = "Requests refused by admission, on arrival (early) or after their prefill (late).";
        self.registry.counter("millpond_router_refusals_total", help, &[("stage", stage), ("reason", reason)])
    }

    /// Requests of a tenant that ended so.
    pub(super) fn tenant_requests(&self, tenant: &str, outcome: &str) -> Counter {
        let labels = [("tenant", tenant), ("outcome", outcome)];
        self.registry.counter("millpond_router_tenant_requests_total", "Requests by tenant and outcome.", &labels)
    }

    /// Requests of a tenant that were refused by admission.
    pub(super) fn tenant_refusals(&self, tenant: &str, stage: &str) -> Counter {
        let labels = [("tenant", tenant), ("stage", stage)];
        self.registry.counter(
            "millpond_router_tenant_refusals_total",
            "Requests refused by admission, by tenant.",
            &labels,
        )
    }

    /// Tokens of a tenant, of prompts that were served or generated.
    pub(super) fn tenant_tokens(&self, tenant: &str, kind: &str) -> Counter {
        let labels = [("tenant", tenant), ("kind", kind)];
        self.registry.counter(
            "millpond_router_tenant_tokens_total",
            "Tokens of prompts and answers, by tenant.",
            &labels,
        )
    }

    /// Tries that failed for a node of this role.
    pub(super) fn retries(&self, role: &str) -> Counter {
        let help = "Tries that were repeated because a node failed.";
        self.registry.counter("millpond_router_retries_total", help, &[("role", role)])
    }
}
