//! What a request asks of the engine.

use crate::cache::PinId;

/// A request's name inside one engine, chosen by the caller and never used twice while the first use is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// One request: a prompt to be continued.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Its name.
    pub id: RequestId,
    /// Token ids, at least one, each below the vocabulary size.
    pub prompt: Vec<u32>,
    /// How tokens are chosen, and when to stop.
    pub sampling: SamplingParams,
    /// What to record beside the tokens.
    pub record: Recording,
    /// The prefill side of a handoff: once the request has ended with [`FinishReason::Length`](crate::FinishReason::Length), its
    /// blocks stay until [`Engine::release_held`](crate::Engine::release_held). Needs `max_tokens` 1.
    pub hold_blocks: bool,
    /// The decode side of a handoff: the prompt's blocks as another engine computed them.
    pub prefilled: Option<PrefilledBlocks>,
}

impl Request {
    /// A plain request: nothing recorded, nothing handed over.
    #[must_use]
    pub fn new(id: RequestId, prompt: Vec<u32>, sampling: SamplingParams) -> Self {
        Self {
            id,
            prompt,
            sampling,
            record: Recording::default(),
            hold_blocks: false,
            prefilled: None,
        }
    }
}

/// How tokens are chosen, and when a request ends.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 takes the likeliest token (the lowest id on ties); otherwise logits are divided by it before sampling.
    pub temperature: f32,
    /// Samples from the smallest set of likeliest tokens whose probabilities sum to at least this; 1 keeps all. In (0, 1].
    pub top_p: f32,
    /// Samples from this many likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Leaves out tokens less likely than this fraction of the likeliest one's probability; 0 keeps all. In [0, 1].
    pub min_p: f32,
    /// Names the random stream: token at position `p` is drawn by (seed, `p`) alone. The engine draws no randomness of its own,
    /// so a caller whose user gave no seed passes a random one.
    pub seed: u64,
    /// The request ends with this many generated tokens, at least 1.
    pub max_tokens: usize,
    /// End-of-sequence and stop tokens are not chosen before this many tokens have been generated.
    pub min_tokens: usize,
    /// End-of-sequence tokens are tokens like any other.
    pub ignore_eos: bool,
    /// The request ends when one of these is generated.
    pub stop_token_ids: Vec<u32>,
    /// Log-probabilities of the chosen token and of this many likeliest ones; `None` computes none.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    /// Greedy, 16 tokens.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            max_tokens: 16,
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            logprobs: None,
        }
    }
}

/// What calibration wants to know beside the tokens. Both come with the request's last token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recording {
    /// Expert counts over the generated tokens that were fed back (all but the last one, which no step reads).
    pub output_counts: bool,
    /// Sums over the prompt's tokens of what the gates said. Such a request neither uses nor awaits cached prefixes, because
    /// the sums are of what it computes itself.
    pub gates: bool,
}

/// A prompt's keys, values and signature rows from another engine.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefilledBlocks {
    /// The leading blocks that this engine already had, as [`Engine::pin_prefix`](crate::Engine::pin_prefix) said. Used up by
    /// [`Engine::add`](crate::Engine::add), whether it succeeds or not.
    pub pin: PinId,
    /// The other blocks, as the other engine's [`Engine::read_held`](crate::Engine::read_held) gave them from
    /// [`Pinned::blocks`](crate::Pinned::blocks) on.
    pub payload: Vec<u8>,
}
