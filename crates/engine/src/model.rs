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
mod forward;
mod kv;
mod weights;

pub use config::ModelConfig;
pub use forward::Scratch;
pub use kv::KvStore;

use std::path::Path;

use experts::ModelShape;
use kernels::{Isa, RopeTable, ShapeError};

use crate::checkpoint::{Checkpoint, LoadError, LoadOptions};
use weights::Weights;

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

/// Why a step was refused. Nothing was computed, unless the kernels refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForwardError {
    /// A slice without tokens.
    #[error("slice {slice} of the batch has no tokens")]
    Empty {
        /// Index in the batch.
        slice: usize,
    },
    /// A position that the model does not have.
    #[error("slice {slice} of the batch ends at position {end}, expected at most {limit}")]
    Position {
        /// Index in the batch.
        slice: usize,
        /// One after its last position.
        end: usize,
        /// [`ModelConfig::max_positions`].
        limit: usize,
    },
    /// A block table that does not reach the last position.
    #[error("slice {slice} of the batch has {got} blocks, expected {expected}")]
    BlockTable {
        /// Index in the batch.
        slice: usize,
        /// Blocks needed.
        expected: usize,
        /// Blocks given.
        got: usize,
    },
    /// A block that the store does not have.
    #[error("slice {slice} of the batch names block {block}, expected less than {limit}")]
    Block {
        /// Index in the batch.
        slice: usize,
        /// The block.
        block: u32,
        /// Blocks in the store.
        limit: usize,
    },
    /// A token that the vocabulary does not have.
    #[error("slice {slice} of the batch has token {token}, expected less than {limit}")]
    Token {
        /// Index in the batch.
        slice: usize,
        /// The token id.
        token: u32,
        /// [`ModelConfig::vocab_size`].
        limit: usize,
    },
    /// The kernels refused: a key-value store of another model's geometry.
    #[error(transparent)]
    Kernel(#[from] ShapeError),
}

/// How many bytes of packed weights a step reads from memory, norms and single embedding rows left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightBytes {
    /// By every step, whatever its batch: attention, routers, dense layers, the output matrix.
    pub dense: usize,
    /// For each distinct expert of each MoE layer, padding included.
    pub expert: usize,
}

/// A loaded model: read-only, shared between engines.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    weights: Weights,
    rope: RopeTable,
    isa: Isa,
    fingerprint: String,
    expert_padding: usize,
}

impl Model {
    /// Loads the Hugging Face directory `dir`: config.json, generation_config.json if there is one, and model.safetensors or
    /// the files that model.safetensors.index.json names.
    ///
    /// # Errors
    /// Names what is missing, damaged or unsupported; never panics on a bad directory.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self, LoadError> {
        let padding = options.expert_padding;
        if !(1..=1024).contains(&padding) {
            return Err(LoadError::Padding(padding));
        }
        let config = ModelConfig::read(dir)?;
        let mut checkpoint = Checkpoint::open(dir)?;
        let weights = Weights::load(&mut checkpoint, &config, padding)?;
        let mut hasher = checkpoint.finish()?;
        hasher.update(format!("{config:?}").as_bytes());
        let rope = RopeTable::new(config.rope_theta, config.head_dim, config.max_positions)
            .map_err(|source| LoadError::Pack {
                name: "the rotary table".to_owned(),
                source,
            })?;
        let fingerprint = hasher.finalize().to_hex()[..32].to_owned();
        Ok(Self {
            config,
            weights,
            rope,
            isa: Isa::detect(),
            fingerprint,
            expert_padding: padding,
        })
    }

    /// Computes with the instruction set `isa` from now on. The bits stay the same.
    pub fn set_isa(&mut self, isa: Isa) {
        self.isa = isa;
    }

    /// The instruction set in use, by default the fastest that the processor has.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The model's shape and constants.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What a router sees of the model: its MoE layers only.
    #[must_use]
    pub fn shape(&self) -> ModelShape {
        self.config.shape()
    }

    /// How many times each expert's intermediate size was padded.
    #[must_use]
    pub fn expert_padding(&self) -> usize {
        self.expert_padding
    }

    /// What a step reads: `dense + expert * distinct experts, summed over the MoE layers`.
    #[must_use]
    pub fn weight_bytes(&self) -> WeightBytes {
        self.weights.bytes()
    }

    /// A hash of configuration and weights (not of padding): two models with the same fingerprint compute the same bits, so
    /// their keys and values may be exchanged.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Computes one step: writes the keys and values of all rows into `kv` and what was asked for into `out`.
    ///
    /// In the last layer the experts compute only the rows that want logits; the choices of all rows are recorded all the same.
    ///
    /// # Errors
    /// When the batch breaks the rules of [`SequenceSlice`]. Whoever admits requests checks token ids and lengths, so that
    /// one request cannot spoil a whole step.
    pub fn forward(
        &self,
        batch: &[SequenceSlice<'_>],
        kv: &mut KvStore,
        scratch: &mut Scratch,
        out: &mut ForwardOutput,
    ) -> Result<(), ForwardError> {
        let Self {
            config,
            weights,
            rope,
            isa,
            ..
        } = self;
        forward::Step {
            config,
            weights,
            rope,
            isa: *isa,
            batch,
            scratch,
        }
        .run(kv, out)
    }
}
