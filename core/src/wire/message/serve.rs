//! Messages between router, decode and prefill nodes.
//!
//! A request has one owner at a time. The router opens one [`METHOD_GENERATE`] stream at a decode node; the decode node
//! reserves pages, grants them, and calls [`METHOD_PREFILL`] at the prefill node that the router named; the prefill node
//! writes KV into the grant and answers with the first token, ahead of the KV's end; tokens come back over the router's stream. Dropping a call
//! cancels everything below it, so no reservation outlives its request. Text never travels here: who speaks HTTP owns the
//! tokenizer. Lengths are tokens unless a name says otherwise; durations are nanoseconds.

use alloc::string::String;
use alloc::vec::Vec;

use crate::layout::{Dtype, Layout, LayoutError, Shape};

/// Router → decode node, a stream: [`GenerateRequest`] is answered by [`Generated`] messages.
pub const METHOD_GENERATE: u16 = 0x0301;
/// Decode node → prefill node, a stream: [`PrefillRequest`] is answered by [`PrefillStep`] messages.
pub const METHOD_PREFILL: u16 = 0x0302;
/// Anybody → a serving node, one answer: [`LoadRequest`] is answered by [`Load`].
pub const METHOD_LOAD: u16 = 0x0303;

/// Longest request id, in bytes.
pub const REQUEST_ID_LEN_MAX: usize = 128;
/// Most stop tokens of one request.
pub const STOP_TOKENS_MAX: usize = 64;
/// Most tokens of one prompt, whatever the model says.
pub const PROMPT_TOKENS_MAX: usize = 1 << 20;

/// A [`Layout`] as its fields, so that a refusal can name the one that differs.
///
/// ```
/// use millpond_core::layout::{Dtype, Layout, Shape};
/// use millpond_core::wire::message::serve::KvLayout;
/// let layout =
///     Layout::new(Shape { layer_count: 2, kv_head_count: 2, head_dim: 8, dtype: Dtype::F32, block_tokens: 16 }).unwrap();
/// assert_eq!(Layout::try_from(KvLayout::from(layout)), Ok(layout));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct KvLayout {
    /// Transformer layers.
    #[prost(uint32, tag = "1")]
    pub layer_count: u32,
    /// KV heads per layer.
    #[prost(uint32, tag = "2")]
    pub kv_head_count: u32,
    /// Elements per head.
    #[prost(uint32, tag = "3")]
    pub head_dim: u32,
    /// [`Dtype::code`].
    #[prost(uint32, tag = "4")]
    pub dtype_code: u32,
    /// Tokens per block.
    #[prost(uint32, tag = "5")]
    pub block_tokens: u32,
}

impl From<Layout> for KvLayout {
    fn from(layout: Layout) -> Self {
        let Shape { layer_count, kv_head_count, head_dim, dtype, block_tokens } = layout.shape();
        Self { layer_count, kv_head_count, head_dim, dtype_code: dtype.code(), block_tokens }
    }
}

impl TryFrom<KvLayout> for Layout {
    type Error = LayoutError;

    fn try_from(fields: KvLayout) -> Result<Self, LayoutError> {
        let KvLayout { layer_count, kv_head_count, head_dim, dtype_code, block_tokens } = fields;
        let dtype = Dtype::from_code(dtype_code).ok_or(LayoutError::UnknownDtype { code: dtype_code })?;
        Self::new(Shape { layer_count, kv_head_count, head_dim, dtype, block_tokens })
    }
}

/// How a token is chosen from logits. All zero: the most likely one.
///
/// ```
/// use millpond_core::wire::message::serve::Sampling;
/// assert_eq!(Sampling::default().temperature, 0.0); // greedy
/// ```
#[derive(Clone, Copy, PartialEq, ::prost::Message)]
pub struct Sampling {
    /// 0 is greedy.
    #[prost(float, tag = "1")]
    pub temperature: f32,
    /// Mass of the most likely tokens kept; 0 and 1 keep all.
    #[prost(float, tag = "2")]
    pub top_p: f32,
    /// With the token's position it decides the draw, wherever it is made.
    #[prost(uint64, tag = "3")]
    pub seed: u64,
}

/// One generation: everything the decode node has to know.
///
/// ```
/// use millpond_core::wire::message::serve::GenerateRequest;
/// use prost::Message;
/// let request = GenerateRequest { request_id: "r1".into(), tokens: vec![1, 2], max_tokens: 8, ..Default::default() };
/// assert_eq!(GenerateRequest::decode(&request.encode_to_vec()[..]).unwrap(), request);
/// ```
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct GenerateRequest {
    /// Names the request in every node's records; unique while it runs.
    #[prost(string, tag = "1")]
    pub request_id: String,
    /// The model's id; a node that serves another refuses.
    #[prost(string, tag = "2")]
    pub model: String,
    /// The prompt, at least one token.
    #[prost(uint32, repeated, tag = "3")]
    pub tokens: Vec<u32>,
    /// Tokens to generate at most, at least one.
    #[prost(uint32, tag = "4")]
    pub max_tokens: u32,
    /// How tokens are chosen.
    #[prost(message, optional, tag = "5")]
    pub sampling: Option<Sampling>,
    /// Generation ends with any of these; the stop token itself is not streamed.
    #[prost(uint32, repeated, tag = "6")]
    pub stop_tokens: Vec<u32>,
    /// Where the prefill node's port is, `host:port`; empty: the decode node computes the prompt itself (colocated).
    #[prost(string, tag = "7")]
    pub prefill: String,
    /// Whose blocks it may reuse and makes; empty is the default tenant.
    #[prost(string, tag = "8")]
    pub tenant: String,
    /// Wanted time between tokens; 0: none. The request with most slack is paused first, and a node whose steps would take
    /// longer with it refuses it as late.
    #[prost(uint64, tag = "9")]
    pub tbt_slo_ns: u64,
    /// Higher is paused later, and let into the batch sooner.
    #[prost(uint32, tag = "10")]
    pub priority: u32,
    /// How long the first token may take from now on; 0: any time. A computed prompt is held no longer for a place.
    #[prost(uint64, tag = "11")]
    pub ttft_slo_ns: u64,
}

/// One message of the stream. The first one with tokens carries `started`; the last one carries `finished`.
///
/// ```
/// use millpond_core::wire::message::serve::Generated;
/// let step = Generated { tokens: vec![17], ..Default::default() };
/// assert!(step.finished.is_none());
/// ```
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Generated {
    /// New tokens, in order.
    #[prost(uint32, repeated, tag = "1")]
    pub tokens: Vec<u32>,
    /// How the prompt was handled.
    #[prost(message, optional, tag = "2")]
    pub started: Option<Started>,
    /// Why it ended; nothing follows.
    #[prost(message, optional, tag = "3")]
    pub finished: Option<Finished>,
}

/// How the prompt of a request was handled.
///
/// ```
/// use millpond_core::wire::message::serve::Started;
/// assert_eq!(Started { cached_tokens: 32, ..Default::default() }.cached_tokens, 32);
/// ```
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Started {
    /// Tokens whose KV came from the store.
    #[prost(uint32, tag = "1")]
    pub cached_tokens: u32,
    /// Waiting for pages at the decode node.
    #[prost(uint64, tag = "2")]
    pub reserve_ns: u64,
    /// From the prefill call to the first token.
    #[prost(uint64, tag = "3")]
    pub prefill_ns: u64,
    /// What the prefill node measured until then.
    #[prost(message, optional, tag = "6")]
    pub prefill: Option<PrefillTimes>,
}

/// The end of a generation.
///
/// ```
/// use millpond_core::wire::message::serve::{FinishReason, Finished};
/// let finished = Finished { reason: FinishReason::Length.into(), ..Default::default() };
/// assert_eq!(finished.reason(), FinishReason::Length);
/// ```
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Finished {
    /// Why.
    #[prost(enumeration = "FinishReason", tag = "1")]
    pub reason: i32,
    /// Tokens generated, a stop token not counted.
    #[prost(uint32, tag = "2")]
    pub generated_tokens: u32,
    /// How often it gave its pages away and came back.
    #[prost(uint32, tag = "3")]
    pub pauses: u32,
    /// The largest batch it was decoded in.
    #[prost(uint32, tag = "4")]
    pub batch_max: u32,
    /// From the first token to the last byte of KV.
    #[prost(uint64, tag = "5")]
    pub arrive_ns: u64,
    /// How the prompt's KV came; nothing when it was handed over in the process, or not waited for.
    #[prost(message, optional, tag = "6")]
    pub sent: Option<PrefillDone>,
}

/// Why a generation ended.
///
/// ```
/// use millpond_core::wire::message::serve::FinishReason;
/// assert_eq!(FinishReason::try_from(1), Ok(FinishReason::Stop));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum FinishReason {
    /// From a newer node.
    Unspecified = 0,
    /// A stop token came.
    Stop = 1,
    /// `max_tokens` were generated, or the context is full.
    Length = 2,
}

/// Where the prefill node writes the KV of one request.
///
/// ```
/// use millpond_core::wire::message::serve::KvTarget;
/// let target = KvTarget { address: "127.0.0.1:7000".into(), page_offsets: vec![0, 4096], ..Default::default() };
/// assert_eq!(target.page_offsets.len(), 2);
/// ```
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct KvTarget {
    /// The decode node's port, `host:port`.
    #[prost(string, tag = "1")]
    pub address: String,
    /// The grant's token in its fixed wire form.
    #[prost(bytes = "vec", tag = "2")]
    pub token: Vec<u8>,
    /// Byte offset in the region of each page, in block order; enough for the whole prompt.
    #[prost(uint64, repeated, tag = "3")]
    pub page_offsets: Vec<u64>,
    /// The arrival counter: one arrival per layer of each page, so pages times layers in all.
    #[prost(uint64, tag = "4")]
    pub counter: u64,
    /// The geometry of the pages.
    #[prost(message, optional, tag = "5")]
    pub layout: Option<KvLayout>,
}

/// Compute a prompt and write its KV into a target.
///
/// ```
/// use millpond_core::wire::message::serve::PrefillRequest;
/// assert!(PrefillRequest::default().target.is_none());
/// ```
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PrefillRequest {
    /// See [`GenerateRequest::request_id`].
    #[prost(string, tag = "1")]
    pub request_id: String,
    /// See [`GenerateRequest::model`].
    #[prost(string, tag = "2")]
    pub model: String,
    /// See [`GenerateRequest::tokens`].
    #[prost(uint32, repeated, tag = "3")]
    pub tokens: Vec<u32>,
    /// How the first token is chosen.
    #[prost(message, optional, tag = "4")]
    pub sampling: Option<Sampling>,
    /// Where the KV goes.
    #[prost(message, optional, tag = "5")]
    pub target: Option<KvTarget>,
    /// See [`GenerateRequest::tenant`].
    #[prost(string, tag = "6")]
    pub tenant: String,
    /// Wanted transport by name (`tcp`, `shm`); empty: the best one shared.
    #[prost(string, tag = "7")]
    pub via: String,
}

/// One message of a prefill's stream: the first token as soon as it is known, then that all KV was written.
///
/// ```
/// use millpond_core::wire::message::serve::{FirstToken, PrefillStep};
/// let step = PrefillStep { first: Some(FirstToken { token: 5, ..Default::default() }), ..Default::default() };
/// assert!(step.done.is_none());
/// ```
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PrefillStep {
    /// The prompt was computed; some of its KV may still be on its way.
    #[prost(message, optional, tag = "1")]
    pub first: Option<FirstToken>,
    /// Every write of KV was acknowledged; nothing follows.
    #[prost(message, optional, tag = "2")]
    pub done: Option<PrefillDone>,
}

/// The first generated token.
///
/// ```
/// use millpond_core::wire::message::serve::FirstToken;
/// assert_eq!(FirstToken { token: 5, ..Default::default() }.token, 5);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct FirstToken {
    /// The token.
    #[prost(uint32, tag = "1")]
    pub token: u32,
    /// Tokens of the prompt whose KV came from the store.
    #[prost(uint32, tag = "2")]
    pub cached_tokens: u32,
    /// Where the time went so far.
    #[prost(message, optional, tag = "3")]
    pub times: Option<PrefillTimes>,
}

/// All KV of a prompt lies in its target.
///
/// ```
/// use millpond_core::wire::message::serve::PrefillDone;
/// assert_eq!(PrefillDone { via: "tcp".into(), ..Default::default() }.via, "tcp");
/// ```
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PrefillDone {
    /// The transport it took.
    #[prost(string, tag = "1")]
    pub via: String,
    /// Where the time went.
    #[prost(message, optional, tag = "2")]
    pub times: Option<PrefillTimes>,
}

/// Where the time of a prefill went.
///
/// ```
/// use millpond_core::wire::message::serve::PrefillTimes;
/// assert_eq!(PrefillTimes::default().compute_ns, 0);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct PrefillTimes {
    /// Waiting for its turn.
    #[prost(uint64, tag = "1")]
    pub queue_ns: u64,
    /// Looking up and loading blocks from the store.
    #[prost(uint64, tag = "2")]
    pub load_ns: u64,
    /// Computing.
    #[prost(uint64, tag = "3")]
    pub compute_ns: u64,
    /// From the end of the computation to the last acknowledged write.
    #[prost(uint64, tag = "4")]
    pub send_ns: u64,
    /// Bytes of KV written into the target.
    #[prost(uint64, tag = "5")]
    pub sent_bytes: u64,
}

/// Ask a node how busy it is.
///
/// ```
/// assert_eq!(millpond_core::wire::message::serve::LoadRequest::default(), Default::default());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct LoadRequest {}

/// How busy a serving node is.
///
/// ```
/// use millpond_core::wire::message::serve::Load;
/// assert_eq!(Load { running: 3, ..Default::default() }.running, 3);
/// ```
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Load {
    /// The model it serves.
    #[prost(string, tag = "1")]
    pub model: String,
    /// Requests being computed now (decode: the batch).
    #[prost(uint32, tag = "2")]
    pub running: u32,
    /// Requests waiting for their turn, for KV or for pages.
    #[prost(uint32, tag = "3")]
    pub waiting: u32,
    /// Prompt tokens not yet computed.
    #[prost(uint64, tag = "4")]
    pub waiting_tokens: u64,
    /// KV pages that are free.
    #[prost(uint32, tag = "5")]
    pub pages_free: u32,
    /// KV pages in all.
    #[prost(uint32, tag = "6")]
    pub pages_total: u32,
    /// The geometry of its pages.
    #[prost(message, optional, tag = "7")]
    pub layout: Option<KvLayout>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    #[test]
    fn a_layout_of_unknown_dtype_is_refused_by_name() {
        let fields = KvLayout { layer_count: 1, kv_head_count: 1, head_dim: 1, dtype_code: 99, block_tokens: 1 };
        assert_eq!(Layout::try_from(fields), Err(LayoutError::UnknownDtype { code: 99 }));
    }

    #[test]
    fn a_finish_reason_of_a_newer_node_reads_as_unspecified() {
        let finished = Finished { reason: 77, ..Default::default() };
        let read = Finished::decode(&finished.encode_to_vec()[..]).unwrap();
        assert_eq!(read.reason(), FinishReason::Unspecified);
    }
}
