//! The engine as its caller sees it.

use std::sync::Arc;

use crate::backend::Backend;
use crate::cache::{BlockUsage, PinId, Pinned};
use crate::handoff::{HandoffError, KvGeometry};
use crate::model::Model;
use crate::request::{Request, RequestId};
use crate::step::Step;

/// How much an engine holds and does at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Tokens per block of keys and values, a multiple of 16.
    pub block_size: usize,
    /// Blocks.
    pub num_blocks: usize,
    /// Requests that run at once; the others wait.
    pub max_num_seqs: usize,
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
    /// A step could not hold one token of every running request.
    #[error("expected max_batched_tokens of at least max_num_seqs ({max_num_seqs}), got {got}")]
    BatchedTokens {
        /// Requests that run at once.
        max_num_seqs: usize,
        /// The tokens that came.
        got: usize,
    },
    /// More positions than the model has.
    #[error("expected max_model_len of at most {max_positions}, the model's, got {got}")]
    ModelLength {
        /// The model's positions.
        max_positions: usize,
        /// The length that came.
        got: usize,
    },
}

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
    /// The handed-over blocks cannot be taken.
    #[error("handed-over blocks: {0}")]
    Handoff(#[from] HandoffError),
}

/// What an engine is busy with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Where the blocks are.
    pub blocks: BlockUsage,
    /// Requests that run.
    pub running: usize,
    /// Requests that wait for blocks or for a place.
    pub waiting: usize,
    /// Finished requests whose blocks are held for a peer.
    pub held: usize,
    /// Pins that wait for their request.
    pub pinned: usize,
    /// Prompt tokens of all requests that began to run, since the start.
    pub prompt_tokens_total: u64,
    /// Of these, tokens that came from the prefix cache or a handoff.
    pub cached_tokens_total: u64,
    /// Requests that lost their blocks to older ones, since the start.
    pub preemptions_total: u64,
}

/// A finished prefill whose blocks wait for a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldBlocks {
    /// Blocks of the prompt.
    pub blocks: usize,
    /// Tokens of the prompt.
    pub tokens: usize,
}

/// An engine: a model, its blocks, and the requests that they serve.
///
/// Synchronous: nothing happens but inside its methods, and every outcome follows from the calls alone. A request's tokens and
/// log-probabilities do not depend on the other requests, nor on what was cached, preempted or handed over.
///
/// A handoff: the sending side [`add`](Self::add)s a request with [`Request::hold_blocks`] and, when it has ended, answers the
/// peer's [`read_held`](Self::read_held) and then [`release_held`](Self::release_held); when to give up on a peer is the caller's to say.
/// The receiving side asks [`pin_prefix`](Self::pin_prefix), fetches the blocks from there on, and `add`s the request with
/// [`PrefilledBlocks`](crate::PrefilledBlocks).
pub struct Engine {
    backend: Box<dyn Backend>,
}

impl Engine {
    /// An engine that runs `model`.
    ///
    /// # Errors
    /// A configuration that contradicts itself or the model.
    pub fn new(model: Arc<Model>, config: EngineConfig) -> Result<Self, ConfigError> {
        let _ = (model, config);
        Err(ConfigError::Zero {
            field: "num_blocks",
        })
    }

    /// Takes a request in; it runs as soon as there is room, in the order of arrival.
    ///
    /// # Errors
    /// A request that is malformed or can never fit, or handed-over blocks that are not what they should be.
    pub fn add(&mut self, request: Request) -> Result<(), AdmissionError> {
        let _ = request;
        Ok(())
    }

    /// Ends a request, wherever it is: waiting, running, or held for a peer. Its blocks are free at once. Unknown ids are ignored.
    pub fn abort(&mut self, id: RequestId) {
        let _ = id;
    }

    /// Computes one step: a token for every running request, chunks of prompts with what room is left.
    pub fn step(&mut self) -> Step {
        Step::default()
    }

    /// Whether a request runs or waits. Held blocks and pins are no work.
    #[must_use]
    pub fn has_work(&self) -> bool {
        false
    }

    /// What the engine is busy with.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage::default()
    }

    /// What a peer's engine must have in common with this one.
    #[must_use]
    pub fn geometry(&self) -> KvGeometry {
        KvGeometry::new(self.backend.facts(), self.backend.block_bytes())
    }

    /// The longest sequence, prompt and generated tokens together, that [`add`](Self::add) takes: the smaller one of the context and
    /// of what all blocks hold.
    #[must_use]
    pub fn max_sequence(&self) -> usize {
        0
    }

    /// The blocks that a finished request holds for a peer, if it does.
    #[must_use]
    pub fn held(&self, id: RequestId) -> Option<HeldBlocks> {
        let _ = id;
        None
    }

    /// Keys, values and signature rows of a held prompt from block `first_block` on, with a header that says what they are. Asked
    /// from the number of its blocks on, it gives a header alone.
    ///
    /// # Errors
    /// Nothing is held under that name, or `first_block` lies beyond the prompt.
    pub fn read_held(&self, id: RequestId, first_block: usize) -> Result<Vec<u8>, HandoffError> {
        let _ = first_block;
        Err(HandoffError::NotHeld { id: id.0 })
    }

    /// Lets the blocks of a finished request go; they stay in the prefix cache until needed. Unknown ids are ignored.
    pub fn release_held(&mut self, id: RequestId) {
        let _ = id;
    }

    /// References the leading blocks of a prompt that the engine already has, so that a peer need not send them. They stay until
    /// [`add`](Self::add) uses the pin or [`unpin`](Self::unpin) gives it back. Should no request be able to run for want of blocks,
    /// pins lose theirs, the latest first; a request that comes with such a pin computes its prompt itself.
    pub fn pin_prefix(&mut self, tokens: &[u32]) -> Pinned {
        let _ = tokens;
        Pinned {
            id: PinId(0),
            blocks: 0,
        }
    }

    /// Gives a pin back that no request will use. Unknown pins are ignored.
    pub fn unpin(&mut self, id: PinId) {
        let _ = id;
    }
}
