//! The seam between deciding what a step computes and computing it.
//!
//! [`Engine`](crate::Engine) decides; a [`Backend`] computes over keys and values that it owns. The model is one; tests put a
//! small fake in its place.

mod model;

use experts::ModelShape;

use crate::model::{ForwardOutput, SequenceSlice};

pub(crate) use model::ModelBackend;

/// What the engine must know of a backend, fixed for its life.
#[derive(Debug, Clone, PartialEq)]
pub struct BackendFacts {
    /// Layers, experts and top-k of the MoE layers.
    pub shape: ModelShape,
    /// Names the model: keys and values of equal fingerprints may be exchanged.
    pub fingerprint: String,
    /// Token ids are below this.
    pub vocabulary: usize,
    /// The longest sequence, prompt and generated tokens together.
    pub max_positions: usize,
    /// Attention layers.
    pub layers: usize,
    /// Key and value heads per layer.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Blocks.
    pub num_blocks: usize,
    /// Tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
}

/// Computes steps over paged keys and values that it owns.
pub trait Backend: Send {
    /// What the engine must know, fixed for the backend's life.
    fn facts(&self) -> &BackendFacts;

    /// Computes one step, see [`Model::forward`](crate::Model::forward).
    fn forward(&mut self, batch: &[SequenceSlice<'_>], out: &mut ForwardOutput);

    /// Bytes of one block: keys and values of all layers and heads.
    fn block_bytes(&self) -> usize;

    /// Appends the [`Backend::block_bytes`] of a block to `out`.
    fn read_block(&self, block: u32, out: &mut Vec<u8>);

    /// Writes a block as another backend of the same fingerprint read it; `bytes` are exactly [`Backend::block_bytes`].
    fn write_block(&mut self, block: u32, bytes: &[u8]);

    /// Copies a block's keys and values.
    fn copy_block(&mut self, from: u32, to: u32);
}
