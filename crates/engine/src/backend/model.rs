//! The model as a backend.

use std::sync::Arc;

use super::{Backend, BackendFacts};
use crate::model::{ForwardOutput, KvStore, Model, Scratch, SequenceSlice};
use crate::options::EngineConfig;

/// A model with its keys and values.
#[derive(Debug)]
pub(crate) struct ModelBackend {
    model: Arc<Model>,
    facts: BackendFacts,
    kv: KvStore,
    scratch: Scratch,
}

impl ModelBackend {
    /// What the engine must know of `model` with blocks as configured.
    pub(crate) fn facts_of(model: &Model, config: &EngineConfig) -> BackendFacts {
        let m = model.config();
        BackendFacts {
            shape: model.shape(),
            fingerprint: model.fingerprint().to_owned(),
            vocabulary: m.vocab_size,
            max_positions: m.max_positions,
            layers: m.layers,
            kv_heads: m.kv_heads,
            head_dim: m.head_dim,
            block_size: config.block_size,
            num_blocks: config.num_blocks,
            eos_token_ids: m.eos_token_ids.clone(),
        }
    }

    /// Takes room for all blocks; `facts` are [`ModelBackend::facts_of`] the model, checked.
    pub(crate) fn new(model: Arc<Model>, facts: BackendFacts) -> Self {
        let kv = KvStore::new(model.config(), facts.block_size, facts.num_blocks)
            .expect("the block size was checked with the rest of the configuration");
        Self {
            model,
            facts,
            kv,
            scratch: Scratch::default(),
        }
    }
}

impl Backend for ModelBackend {
    fn facts(&self) -> &BackendFacts {
        &self.facts
    }

    fn forward(&mut self, batch: &[SequenceSlice<'_>], out: &mut ForwardOutput) {
        // Admission has checked tokens and lengths, the block manager owns the tables: what is refused here is a defect of this crate.
        if let Err(error) = self
            .model
            .forward(batch, &mut self.kv, &mut self.scratch, out)
        {
            panic!("the engine built a batch that its model refuses: {error}");
        }
    }

    fn block_bytes(&self) -> usize {
        self.kv.block_bytes()
    }

    fn read_block(&self, block: u32, out: &mut Vec<u8>) {
        out.extend_from_slice(self.kv.block(block));
    }

    fn write_block(&mut self, block: u32, bytes: &[u8]) {
        self.kv.write_block(block, bytes);
    }

    fn copy_block(&mut self, from: u32, to: u32) {
        let bytes = self.kv.block(from).to_vec();
        self.kv.write_block(to, &bytes);
    }
}
