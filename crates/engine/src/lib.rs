//! The embedded engine: checkpoint, model, paged KV cache, scheduler, sampler.
//!
//! Synchronous: no threads, no sockets, no clock. The lower half is here: [`checkpoint`] reads a Hugging Face directory,
//! [`model`] computes a step over paged keys and values, [`tokenizer`] goes between text and ids. Whoever decides *what* a step
//! computes (scheduler, prefix index, sampling) stands on these.
//!
//! A token's logits are the same bits whatever else is in the batch, however its prompt was chunked and wherever its prefix
//! came from; the module docs of [`model`] say how.

pub mod checkpoint;
pub mod model;

pub use checkpoint::{LoadError, LoadOptions};
pub use model::{
    ForwardOutput, GateRows, KvStore, LogitsWanted, Model, ModelConfig, Phase, Scratch,
    SequenceSlice,
};
