//! The embedded engine: checkpoint, model, paged KV cache, scheduler, sampler.
//!
//! Synchronous: no threads, no sockets, no clock. The lower half computes: [`checkpoint`] reads a Hugging Face directory, [`model`]
//! computes a step over paged keys and values, [`tokenizer`] goes between text and ids. The upper half decides *what* a step computes:
//! [`Engine`] takes [`Request`]s and gives [`Step`]s; below it are the scheduler, [`cache`] (whose block is it, which prefix is known,
//! which experts did its tokens choose), sampling, and [`handoff`] (the form in which blocks travel between engines). [`Backend`] is the
//! seam between the halves; [`stop`] looks for stop strings in the text that comes out.
//!
//! A token's logits are the same bits whatever else is in the batch, however its prompt was chunked and wherever its prefix
//! came from; the module docs of [`model`] say how.

mod admission;
mod backend;
pub mod cache;
pub mod checkpoint;
mod facade;
pub mod handoff;
pub mod model;
mod options;
mod request;
mod sampler;
mod scheduler;
mod sequence;
mod step;
pub mod stop;
pub mod testing;
#[cfg(test)]
mod tests;
pub mod tokenizer;

pub use admission::AdmissionError;
pub use backend::{Backend, BackendFacts};
pub use cache::{BlockUsage, PinId, Pinned};
pub use checkpoint::{LoadError, LoadOptions};
pub use facade::{Engine, HeldBlocks, Usage};
pub use handoff::{HandoffError, KvGeometry};
pub use model::{
    ForwardError, ForwardOutput, GateRows, KvStore, LogitsWanted, Model, ModelConfig, Phase,
    Scratch, SequenceSlice, WeightBytes,
};
pub use options::{ConfigError, EngineConfig, PrefixCache};
pub use request::{PrefilledBlocks, Recording, Request, RequestId, SamplingParams};
pub use step::{
    FinishReason, FirstToken, GateSums, Recorded, Step, StepStats, TokenLogprobs, TokenOut,
};
pub use tokenizer::{ChatOptions, Detokenizer, Tokenizer, TokenizerError};
