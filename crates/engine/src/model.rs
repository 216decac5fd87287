//! The forward pass of a Qwen3-MoE model over paged keys and values.
//!
//! **Same bits in any company.** A token's logits do not depend on the other rows of its batch, on how its prompt was cut into
//! chunks, or on whether its prefix was computed or came from the cache. It follows from
//! - one kernel family for every number of rows, whose accumulation order does not depend on that number or on padding;
//! - a residual stream in f32, rounded to bf16 only where a matrix product reads it;
//! - attention that reads keys and values after they were rounded to bf16 and stored, also inside a chunk, over splits of the
//!   context at fixed positions;
//! - expert outputs that are kept apart and summed per token in top-k order.

mod config;
mod kv;

pub use config::ModelConfig;
pub use kv::KvStore;

use std::path::Path;

use crate::checkpoint::{LoadError, LoadOptions};

/// Which rows of a slice want logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogitsWanted {
    /// No row: a prefill chunk that is not the last one.
    None,
    /// The last row.
    #[default]
    Last,
    /// Every row, for prompt log-probabilities and tests.
    All,
}

/// What a slice is to the statistics; it changes nothing in the computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Prompt tokens.
    Prefill,
    /// A generated token that is fed back.
    Decode,
}

/// Consecutive tokens of one sequence in one step.
#[derive(Debug, Clone)]
pub struct SequenceSlice<'a> {
    /// The token ids, at least one, each below the vocabulary size.
    pub tokens: &'a [u32],
    /// Position of the first of them in the sequence. Keys and values of all positions before it are in the blocks.
    pub first_position: usize,
    /// The sequence's blocks in order: position `p` lives in `block_table[p / block_size]`. Covers every position up to the
    /// slice's last; the blocks that the slice writes are not written by another slice of the batch.
    pub block_table: &'a [u32],
    /// Which rows want logits.
    pub logits: LogitsWanted,
    /// Whether gate probabilities and logits of its rows are kept (see [`GateRows`]).
    pub gates: bool,
    /// Prefill or decode, for [`ForwardOutput::distinct_experts_decode`].
    pub phase: Phase,
}

/// What the gates of the slices that asked for it said, before top-k.
///
/// Both are `[rows, moe_layers, experts]`, rows in batch order, only those of slices with [`SequenceSlice::gates`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GateRows {
    /// Softmax over all experts (not renormalised over the chosen ones).
    pub probabilities: Vec<f32>,
    /// The router's logits.
    pub logits: Vec<f32>,
}

/// What a step brought. Reused between steps: [`Model::forward`] overwrites it and keeps its allocations.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ForwardOutput {
    /// `[rows that wanted logits, vocabulary]`, in batch order.
    pub logits: Vec<f32>,
    /// Chosen experts of every row, `[rows, moe_layers, top_k]`, in batch order, each row's in falling order of probability.
    pub experts: Vec<u16>,
    /// The gates' own numbers, for the slices that asked.
    pub gates: GateRows,
    /// Distinct experts that any row chose, per MoE layer.
    pub distinct_experts: Vec<u32>,
    /// Distinct experts that any row of a [`Phase::Decode`] slice chose, per MoE layer.
    pub distinct_experts_decode: Vec<u32>,
}

/// Working memory of [`Model::forward`]: grows to the largest step seen and is reused, so that steps allocate nothing.
#[derive(Debug, Default)]
pub struct Scratch {}

/// A loaded model: read-only, shared between engines.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
}

impl Model {
    /// Loads the Hugging Face directory `dir`.
    ///
    /// # Errors
    /// Names what is missing, damaged or unsupported; never panics on a bad directory.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self, LoadError> {
        let _ = options;
        Err(LoadError::Io {
            path: dir.to_path_buf(),
            source: std::io::ErrorKind::Unsupported.into(),
        })
    }

    /// The model's shape and constants.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// A hash of configuration and weights (not of padding): two models with the same fingerprint compute the same bits on
    /// the same instruction set, so their keys and values may be exchanged.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        ""
    }

    /// Computes one step: writes the keys and values of all rows into `kv` and what was asked for into `out`.
    ///
    /// # Panics
    /// When the batch breaks the rules of [`SequenceSlice`]: no tokens, an id outside the vocabulary, a position from
    /// [`ModelConfig::max_positions`] on, a block table that is too short or names blocks that `kv` does not have. Whoever admits requests checks these.
    pub fn forward(
        &self,
        batch: &[SequenceSlice<'_>],
        kv: &mut KvStore,
        scratch: &mut Scratch,
        out: &mut ForwardOutput,
    ) {
        let _ = (batch, kv, scratch, out);
    }
}
