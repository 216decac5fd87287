//! The engine as its caller sees it.

mod execute;
mod transfer;
mod usage;

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::admission::{AdmissionError, Bounds};
use crate::backend::{Backend, ModelBackend};
use crate::cache::BlockId;
use crate::handoff::{self, Contents, HandoffError, KvGeometry};
use crate::model::{ForwardOutput, Model};
use crate::options::{ConfigError, EngineConfig, PrefixCache};
use crate::request::{PrefilledBlocks, Request, RequestId};
use crate::sampler::Sampler;
use crate::scheduler::{Limits, Scheduler};
use crate::sequence::{Import, Sequence};

pub use transfer::HeldBlocks;
pub use usage::Usage;

use transfer::Held;

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
    geometry: KvGeometry,
    bounds: Bounds,
    eos_token_ids: Vec<u32>,
    /// Requests that wait at most.
    max_waiting: usize,
    scheduler: Scheduler,
    /// Names of the requests that wait or run.
    alive: FxHashSet<RequestId>,
    held: FxHashMap<RequestId, Held>,
    sampler: Sampler,
    output: ForwardOutput,
}

impl Engine {
    /// An engine that runs `model`.
    ///
    /// # Errors
    /// A configuration that contradicts itself or the model.
    pub fn new(model: Arc<Model>, config: EngineConfig) -> Result<Self, ConfigError> {
        if !config.block_size.is_multiple_of(16) {
            return Err(ConfigError::BlockSize {
                got: config.block_size,
            });
        }
        let facts = ModelBackend::facts_of(&model, &config);
        config.check(&facts)?;
        Ok(Self::assemble(
            Box::new(ModelBackend::new(model, facts)),
            &config,
        ))
    }

    /// An engine over another backend; its block size and number of blocks count, not the configuration's.
    ///
    /// # Errors
    /// A configuration that contradicts itself or the backend.
    pub fn with_backend(
        backend: Box<dyn Backend>,
        config: EngineConfig,
    ) -> Result<Self, ConfigError> {
        let facts = backend.facts();
        let config = EngineConfig {
            block_size: facts.block_size,
            num_blocks: facts.num_blocks,
            ..config
        };
        config.check(facts)?;
        Ok(Self::assemble(backend, &config))
    }

    fn assemble(backend: Box<dyn Backend>, config: &EngineConfig) -> Self {
        let facts = backend.facts();
        let geometry = KvGeometry::new(facts, backend.block_bytes());
        let limits = Limits {
            max_num_seqs: config.max_num_seqs,
            max_batched_tokens: config.max_batched_tokens,
            prefix_cache: config.prefix_cache == PrefixCache::On,
        };
        Self {
            bounds: Bounds {
                vocabulary: facts.vocabulary,
                context: config.max_model_len.unwrap_or(facts.max_positions),
                block_size: facts.block_size,
                num_blocks: facts.num_blocks,
            },
            max_waiting: config.max_waiting,
            eos_token_ids: facts.eos_token_ids.clone(),
            scheduler: Scheduler::new(limits, geometry.clone(), facts.num_blocks),
            geometry,
            backend,
            alive: FxHashSet::default(),
            held: FxHashMap::default(),
            sampler: Sampler::default(),
            output: ForwardOutput::default(),
        }
    }

    /// Takes a request in; it runs as soon as there is room, in the order of arrival.
    ///
    /// # Errors
    /// A request that is malformed or can never fit, one too many, or handed-over blocks that are not what they should be.
    pub fn add(&mut self, mut request: Request) -> Result<(), AdmissionError> {
        let prefilled = request.prefilled.take();
        let pinned = match &prefilled {
            Some(prefilled) => self
                .scheduler
                .pins
                .take(prefilled.pin)
                .ok_or(HandoffError::Pin)?,
            None => None,
        };
        let import = self.check(&request, prefilled.as_ref(), pinned.as_deref());
        let import = match (import, pinned, prefilled) {
            (Ok(()), Some(pinned), Some(prefilled)) => Some(Import {
                pinned,
                payload: prefilled.payload,
            }),
            (Ok(()), _, _) => None,
            (Err(error), pinned, _) => {
                self.scheduler.blocks.release(pinned.into_iter().flatten());
                return Err(error);
            }
        };
        let names = self.scheduler.hasher.full_blocks(&request.prompt);
        self.alive.insert(request.id);
        let sequence = Sequence::new(request, self.geometry.shape, names, import);
        self.scheduler.waiting.push_back(sequence);
        Ok(())
    }

    /// Checks a request, and that the payload begins where the pinned blocks end.
    fn check(
        &self,
        request: &Request,
        prefilled: Option<&PrefilledBlocks>,
        pinned: Option<&[BlockId]>,
    ) -> Result<(), AdmissionError> {
        if self.alive.contains(&request.id) || self.held.contains_key(&request.id) {
            return Err(AdmissionError::DuplicateId { id: request.id.0 });
        }
        self.bounds.check(request, prefilled.is_some())?;
        if self.scheduler.waiting.len() >= self.max_waiting {
            return Err(AdmissionError::Full {
                limit: self.max_waiting,
            });
        }
        if let (Some(prefilled), Some(pinned)) = (prefilled, pinned) {
            let expected = Contents {
                tokens: request.prompt.len(),
                first_block: pinned.len(),
                prompt: self.scheduler.hasher.sequence(&request.prompt),
            };
            handoff::check(&self.geometry, &expected, &prefilled.payload)?;
        }
        Ok(())
    }

    /// Ends a request, wherever it is: waiting, running, or held for a peer. Its blocks are free at once. Unknown ids are ignored.
    pub fn abort(&mut self, id: RequestId) {
        if self.alive.remove(&id) {
            self.scheduler.remove(id);
        }
        self.release_held(id);
    }

    /// Whether a request runs or waits. Held blocks and pins are no work.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.alive.is_empty()
    }

    /// What a peer's engine must have in common with this one.
    #[must_use]
    pub fn geometry(&self) -> KvGeometry {
        self.geometry.clone()
    }

    /// The longest sequence, prompt and generated tokens together, that [`add`](Self::add) takes: the smaller one of the context and
    /// of what all blocks hold.
    #[must_use]
    pub fn max_sequence(&self) -> usize {
        self.bounds.max_sequence()
    }

    /// Panics unless every block is referenced exactly by those that list it.
    #[cfg(test)]
    pub(crate) fn check_blocks(&self) {
        let imports = (self.scheduler.waiting.iter()).filter_map(|s| s.import.as_ref());
        let owners = (self.scheduler.running.iter().map(|s| s.blocks.as_slice()))
            .chain(imports.map(|i| i.pinned.as_slice()))
            .chain(self.held.values().map(|h| h.blocks.as_slice()))
            .chain(self.scheduler.pins.blocks());
        self.scheduler.blocks.check(owners);
    }
}
