//! A request on its way through the engine.

use experts::{ExpertCounts, ModelShape};

use crate::cache::{BlockHash, BlockId};
use crate::request::{Recording, Request, RequestId, SamplingParams};
use crate::step::GateSums;

/// A request on its way: its tokens, its blocks, and how far both agree.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: RequestId,
    pub(crate) prompt_tokens: usize,
    /// Prompt and generated tokens.
    pub(crate) tokens: Vec<u32>,
    /// Leading tokens whose keys and values are in `blocks`. Less than all of them: the last one's logits are yet to come.
    pub(crate) computed: usize,
    /// Enough for all tokens while the sequence runs, none while it waits.
    pub(crate) blocks: Vec<BlockId>,
    /// Names of the full blocks of `tokens`.
    pub(crate) names: Vec<BlockHash>,
    pub(crate) sampling: SamplingParams,
    pub(crate) hold_blocks: bool,
    /// Handed-over blocks that wait for a place.
    pub(crate) import: Option<Import>,
    /// Set when the sequence first runs.
    pub(crate) cached_tokens: Option<usize>,
    pub(crate) records: Records,
}

/// Handed-over blocks that wait for a place.
#[derive(Debug)]
pub(crate) struct Import {
    /// Leading blocks that were here already, with a reference for this.
    pub(crate) pinned: Vec<BlockId>,
    /// The others; checked.
    pub(crate) payload: Vec<u8>,
}

/// What a sequence records. Every position is recorded once, when it is first computed.
#[derive(Debug)]
pub(crate) struct Records {
    pub(crate) wanted: Recording,
    pub(crate) output_counts: Option<ExpertCounts>,
    pub(crate) gates: Option<GateSums>,
    /// The next position to count as output.
    next_output: usize,
    /// The next position to add to the gate sums.
    next_gates: usize,
}

impl Sequence {
    pub(crate) fn new(
        request: Request,
        shape: ModelShape,
        names: Vec<BlockHash>,
        import: Option<Import>,
    ) -> Self {
        let cells = shape.layers as usize * shape.experts as usize;
        let record = request.record;
        Self {
            id: request.id,
            prompt_tokens: request.prompt.len(),
            computed: 0,
            blocks: Vec::new(),
            names,
            sampling: request.sampling,
            hold_blocks: request.hold_blocks,
            import,
            cached_tokens: None,
            records: Records {
                wanted: record,
                output_counts: record.output_counts.then(|| ExpertCounts::zeros(shape)),
                gates: record.gates.then(|| GateSums {
                    probabilities: vec![0.0; cells],
                    logits: vec![0.0; cells],
                }),
                next_output: request.prompt.len(),
                next_gates: 0,
            },
            tokens: request.prompt,
        }
    }

    /// Tokens yet to be computed, at least one.
    pub(crate) fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }

    /// Whether the prompt may take up cached blocks.
    pub(crate) fn reads_cache(&self) -> bool {
        !self.records.wanted.gates
    }

    /// Blocks of all tokens.
    pub(crate) fn blocks_needed(&self, block_size: usize) -> usize {
        self.tokens.len().div_ceil(block_size)
    }
}

impl Records {
    /// Takes the choices of one position, `[moe_layers, top_k]`.
    pub(crate) fn record_choices(&mut self, position: usize, choices: &[u16]) {
        let Some(counts) = &mut self.output_counts else {
            return;
        };
        if position != self.next_output {
            return;
        }
        self.next_output += 1;
        let top_k = counts.shape().top_k.max(1) as usize;
        for (layer, ids) in choices.chunks_exact(top_k).enumerate() {
            if let Err(error) = counts.record(layer, ids) {
                debug_assert!(false, "output counts: {error}");
                tracing::error!(%error, "output counts");
            }
        }
    }

    /// Takes what the gates said of one position, `[moe_layers, experts]` each.
    pub(crate) fn record_gates(&mut self, position: usize, probabilities: &[f32], logits: &[f32]) {
        let Some(sums) = &mut self.gates else {
            return;
        };
        if position != self.next_gates {
            return;
        }
        self.next_gates += 1;
        for (sum, value) in [
            (&mut sums.probabilities, probabilities),
            (&mut sums.logits, logits),
        ] {
            sum.iter_mut().zip(value).for_each(|(s, v)| *s += v);
        }
    }
}
