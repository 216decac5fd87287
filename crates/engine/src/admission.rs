//! What a request must be to be taken in.

use crate::handoff::HandoffError;
use crate::request::{Request, SamplingParams};

/// Why a request was refused. Nothing of it stays behind, its pin included.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AdmissionError {
    /// A living request has the name.
    #[error("expected a new request id, got {id}, which is in use")]
    DuplicateId {
        /// The name.
        id: u64,
    },
    /// There is nothing to continue.
    #[error("expected a prompt of at least one token, got none")]
    EmptyPrompt,
    /// A token id outside the vocabulary.
    #[error(
        "expected token ids below {vocabulary}, got {token} at position {position} of the prompt"
    )]
    Token {
        /// Token ids are below this.
        vocabulary: usize,
        /// The id that came.
        token: u32,
        /// Its place in the prompt.
        position: usize,
    },
    /// Prompt and generated tokens exceed the context.
    #[error(
        "expected prompt and generated tokens of at most {limit}, got {prompt_tokens} + {max_tokens}"
    )]
    ContextLength {
        /// The context.
        limit: usize,
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens to generate at most.
        max_tokens: usize,
    },
    /// The request would need more blocks than there are.
    #[error(
        "expected a request of at most {limit} blocks of {block_size} tokens, got one that may need {needed}"
    )]
    Blocks {
        /// All blocks of the engine.
        limit: usize,
        /// Tokens per block.
        block_size: usize,
        /// Blocks of prompt and generated tokens.
        needed: usize,
    },
    /// A sampling parameter outside its range.
    #[error("expected {field} {expected}, got {got}")]
    Sampling {
        /// The parameter.
        field: &'static str,
        /// Its range, in words.
        expected: &'static str,
        /// What came.
        got: f64,
    },
    /// Blocks are held for a handoff after one token.
    #[error("expected max_tokens 1 of a request whose blocks are held, got {max_tokens}")]
    HoldLength {
        /// Tokens to generate at most.
        max_tokens: usize,
    },
    /// Gate sums are of what a request computes itself.
    #[error("expected no handed-over blocks with a request that records gates")]
    GatesWithHandoff,
    /// As many requests wait as may.
    #[error("expected at most {limit} waiting requests, got one more")]
    Full {
        /// Requests that may wait.
        limit: usize,
    },
    /// The handed-over blocks cannot be taken.
    #[error("handed-over blocks: {0}")]
    Handoff(#[from] HandoffError),
}

/// What an engine can take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Token ids are below this.
    pub(crate) vocabulary: usize,
    /// The longest sequence.
    pub(crate) context: usize,
    pub(crate) block_size: usize,
    pub(crate) num_blocks: usize,
}

impl Bounds {
    /// The longest sequence, prompt and generated tokens together: the last generated token needs no place in a block.
    pub(crate) fn max_sequence(&self) -> usize {
        self.context.min(self.num_blocks * self.block_size + 1)
    }

    /// Checks everything of a request but its name and its handed-over blocks.
    pub(crate) fn check(&self, request: &Request, handed_over: bool) -> Result<(), AdmissionError> {
        if request.prompt.is_empty() {
            return Err(AdmissionError::EmptyPrompt);
        }
        let outside = |token: &&u32| **token as usize >= self.vocabulary;
        if let Some(&token) = request.prompt.iter().find(outside) {
            let position = request.prompt.iter().position(|&t| t == token);
            return Err(AdmissionError::Token {
                vocabulary: self.vocabulary,
                token,
                position: position.unwrap_or(0),
            });
        }
        check_sampling(&request.sampling)?;
        self.check_length(request.prompt.len(), request.sampling.max_tokens)?;
        if request.hold_blocks && request.sampling.max_tokens != 1 {
            return Err(AdmissionError::HoldLength {
                max_tokens: request.sampling.max_tokens,
            });
        }
        if request.record.gates && handed_over {
            return Err(AdmissionError::GatesWithHandoff);
        }
        Ok(())
    }

    fn check_length(&self, prompt_tokens: usize, max_tokens: usize) -> Result<(), AdmissionError> {
        let length = prompt_tokens.saturating_add(max_tokens);
        if length > self.context {
            return Err(AdmissionError::ContextLength {
                limit: self.context,
                prompt_tokens,
                max_tokens,
            });
        }
        if length > self.max_sequence() {
            return Err(AdmissionError::Blocks {
                limit: self.num_blocks,
                block_size: self.block_size,
                needed: (length - 1).div_ceil(self.block_size),
            });
        }
        Ok(())
    }
}

fn check_sampling(params: &SamplingParams) -> Result<(), AdmissionError> {
    let wrong = |field, expected, got| {
        Err(AdmissionError::Sampling {
            field,
            expected,
            got,
        })
    };
    let SamplingParams {
        temperature,
        top_p,
        min_p,
        max_tokens,
        min_tokens,
        ..
    } = *params;
    if !(temperature.is_finite() && temperature >= 0.0) {
        return wrong("temperature", "of at least 0", f64::from(temperature));
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return wrong("top_p", "above 0 and at most 1", f64::from(top_p));
    }
    if !(0.0..=1.0).contains(&min_p) {
        return wrong("min_p", "from 0 to 1", f64::from(min_p));
    }
    if max_tokens == 0 {
        return wrong("max_tokens", "of at least 1", 0.0);
    }
    if min_tokens > max_tokens {
        return wrong("min_tokens", "of at most max_tokens", min_tokens as f64);
    }
    Ok(())
}
