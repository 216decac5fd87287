//! How large an engine is.

use experts::ShapeError;

use crate::backend::BackendFacts;

/// How much an engine holds and does at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineConfig {
    /// Tokens per block of keys and values, a multiple of 16.
    pub block_size: usize,
    /// Blocks.
    pub num_blocks: usize,
    /// Requests that run at once; the others wait.
    pub max_num_seqs: usize,
    /// Requests that wait at most; more are refused.
    pub max_waiting: usize,
    /// Tokens that one step computes, at least `max_num_seqs`. Longer prompts are computed in chunks.
    pub max_batched_tokens: usize,
    /// The longest sequence, prompt and generated tokens together; `None` takes the model's.
    pub max_model_len: Option<usize>,
    /// What happens to a request's blocks once nobody needs them.
    pub prefix_cache: PrefixCache,
}

/// Whether prompts take up the blocks of earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrefixCache {
    /// Blocks keep their names until they are needed for something else.
    #[default]
    On,
    /// Every prompt is computed.
    Off,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            block_size: 16,
            num_blocks: 1024,
            max_num_seqs: 64,
            max_waiting: 4096,
            max_batched_tokens: 512,
            max_model_len: None,
            prefix_cache: PrefixCache::On,
        }
    }
}

/// A configuration that no engine can have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The block size is 0 or not a multiple of 16.
    #[error("expected a block size that is a multiple of 16, got {got}")]
    BlockSize {
        /// The size that came.
        got: usize,
    },
    /// Something that must be at least 1 is 0.
    #[error("expected {field} to be at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// More blocks than have names, or more tokens in them than can be counted.
    #[error("expected num_blocks of at most {limit}, got {got}")]
    Blocks {
        /// The most blocks of this size.
        limit: usize,
        /// The blocks that came.
        got: usize,
    },
    /// A step could not hold one token of every running request.
    #[error("expected max_batched_tokens of at least max_num_seqs ({max_num_seqs}), got {got}")]
    BatchedTokens {
        /// Requests that run at once.
        max_num_seqs: usize,
        /// The tokens that came.
        got: usize,
    },
    /// The model has no MoE layers, or a shape that no model has.
    #[error("expected a mixture-of-experts model: {0}")]
    Shape(#[from] ShapeError),
    /// More positions than the model has.
    #[error("expected max_model_len of at most {max_positions}, the model's, got {got}")]
    ModelLength {
        /// The model's positions.
        max_positions: usize,
        /// The length that came.
        got: usize,
    },
}

impl EngineConfig {
    /// Checks the configuration against itself and the model.
    pub(crate) fn check(&self, facts: &BackendFacts) -> Result<(), ConfigError> {
        facts.shape.check()?;
        let sizes = [
            ("block_size", self.block_size),
            ("num_blocks", self.num_blocks),
            ("max_num_seqs", self.max_num_seqs),
            ("max_waiting", self.max_waiting),
            ("max_model_len", self.max_model_len.unwrap_or(1)),
        ];
        if let Some((field, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ConfigError::Zero { field });
        }
        // Blocks are named by 32 bits, and the longest sequence is one token longer than what they hold.
        let limit = (u32::MAX as usize).min((usize::MAX - 1) / self.block_size);
        if self.num_blocks > limit {
            return Err(ConfigError::Blocks {
                limit,
                got: self.num_blocks,
            });
        }
        if self.max_batched_tokens < self.max_num_seqs {
            return Err(ConfigError::BatchedTokens {
                max_num_seqs: self.max_num_seqs,
                got: self.max_batched_tokens,
            });
        }
        match self.max_model_len {
            Some(got) if got > facts.max_positions => Err(ConfigError::ModelLength {
                max_positions: facts.max_positions,
                got,
            }),
            _ => Ok(()),
        }
    }
}
