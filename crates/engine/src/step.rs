//! What a step of the engine brought.

use experts::{ExpertCounts, PromptCounts};

use crate::request::RequestId;

/// The result of one [`Engine::step`](crate::Engine::step).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Step {
    /// At most one token per running request, in the order of arrival.
    pub tokens: Vec<TokenOut>,
    /// What the step did. With [`StepStats::rows`] 0 nothing could run: there is no work, or all of it waits for blocks that
    /// are held for a peer, and nothing changes before a release, an abort or an expiry.
    pub stats: StepStats,
}

/// One generated token.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenOut {
    /// Whose it is.
    pub id: RequestId,
    /// The token. With [`FinishReason::Stop`] it is the token that ended the request, which is not part of its text.
    pub token: u32,
    /// Log-probabilities, where the request asked.
    pub logprobs: Option<TokenLogprobs>,
    /// Set on the request's last token.
    pub finish: Option<FinishReason>,
    /// Set on the request's first token.
    pub first: Option<FirstToken>,
    /// Set on the last token of a request that records anything.
    pub recorded: Option<Recorded>,
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-sequence or stop token was generated.
    Stop,
    /// `max_tokens` were generated.
    Length,
}

/// Natural logarithms of probabilities at temperature 1, before any other sampling parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The chosen token's.
    pub chosen: f32,
    /// The likeliest tokens and theirs, likeliest first, the lowest id first on ties.
    pub top: Vec<(u32, f32)>,
}

/// What is known of a request once its prompt has been processed.
#[derive(Debug, Clone, PartialEq)]
pub struct FirstToken {
    /// Expert counts over all of the prompt's tokens, equal to those of a cold prefill.
    pub prompt_counts: PromptCounts,
    /// Prompt tokens that were not computed, because a cached prefix or a handoff brought them.
    pub cached_tokens: usize,
}

/// What a request recorded, see [`Recording`](crate::Recording).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Recorded {
    /// Expert counts over the generated tokens that were fed back.
    pub output_counts: Option<ExpertCounts>,
    /// Gate sums over the prompt.
    pub gates: Option<GateSums>,
}

/// Sums over a prompt's tokens of what the gates said, `[moe_layers, experts]`, added in the order of positions.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GateSums {
    /// Of the probabilities (softmax over all experts).
    pub probabilities: Vec<f32>,
    /// Of the router's logits.
    pub logits: Vec<f32>,
}

/// What one step did.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepStats {
    /// Requests that took part.
    pub batch: usize,
    /// Rows (tokens) that were computed: prefill and decode.
    pub rows: usize,
    /// Of these, rows of prompts, and of what preempted requests compute again.
    pub prefill_tokens: usize,
    /// Of these, generated tokens that were fed back.
    pub decode_tokens: usize,
    /// Tokens that the step generated.
    pub generated_tokens: usize,
    /// Distinct experts that any row chose, per MoE layer.
    pub distinct_experts: Vec<u32>,
    /// Distinct experts that any decode row chose, per MoE layer.
    pub distinct_experts_decode: Vec<u32>,
    /// Requests that lost their blocks to older ones.
    pub preempted: usize,
}

impl StepStats {
    /// Mean over the MoE layers of the distinct experts of all rows; 0 when there was no step or no such layer.
    ///
    /// Weighted by [`StepStats::generated_tokens`] and summed over steps it gives the mean over generated tokens of the distinct
    /// experts per layer in the step that made them.
    #[must_use]
    pub fn distinct_experts_mean(&self) -> f64 {
        if self.distinct_experts.is_empty() {
            return 0.0;
        }
        let sum: u64 = self.distinct_experts.iter().map(|&n| u64::from(n)).sum();
        sum as f64 / self.distinct_experts.len() as f64
    }
}
