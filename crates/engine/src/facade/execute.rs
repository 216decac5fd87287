//! One step: what it reads, what it computes, and what becomes of the outcome.

use experts::{ExpertCounts, PromptCounts};

use super::{Engine, Held};
use crate::cache::BlockManager;
use crate::handoff;
use crate::model::{LogitsWanted, Phase, SequenceSlice};
use crate::sampler::{self, Sampler};
use crate::scheduler::{BlockMove, Plan};
use crate::sequence::Sequence;
use crate::step::{FinishReason, FirstToken, Recorded, Step, StepStats, TokenOut};

impl Engine {
    /// Computes one step: a token for every running request, chunks of prompts with what room is left.
    pub fn step(&mut self) -> Step {
        let plan = self.scheduler.plan();
        let mut stats = StepStats {
            preempted: plan.preempted,
            ..StepStats::default()
        };
        if plan.slots.is_empty() {
            return Step {
                tokens: Vec::new(),
                stats,
            };
        }
        self.move_blocks(&plan);
        self.forward(&plan, &mut stats);
        let tokens = self.take_in(&plan);
        stats.generated_tokens = tokens.len();
        stats
            .distinct_experts
            .clone_from(&self.output.distinct_experts);
        stats
            .distinct_experts_decode
            .clone_from(&self.output.distinct_experts_decode);
        Step { tokens, stats }
    }

    /// Brings keys and values to where the step needs them.
    fn move_blocks(&mut self, plan: &Plan) {
        for block_move in &plan.moves {
            match block_move {
                BlockMove::Copy { from, to } => self.backend.copy_block(*from, *to),
                BlockMove::Import { blocks, payload } => {
                    for (&block, sent) in
                        blocks.iter().zip(handoff::blocks(&self.geometry, payload))
                    {
                        self.backend.write_block(block, sent.kv);
                    }
                }
            }
        }
    }

    fn forward(&mut self, plan: &Plan, stats: &mut StepStats) {
        let mut batch = Vec::with_capacity(plan.slots.len());
        for slot in &plan.slots {
            let sequence = &self.scheduler.running[slot.index];
            let (first, end) = (sequence.computed, sequence.computed + slot.tokens);
            debug_assert!(
                (first / self.bounds.block_size..end.div_ceil(self.bounds.block_size))
                    .all(|block| self.scheduler.blocks.is_writable(sequence.blocks[block])),
                "a block that others may read is about to be written"
            );
            let decode = slot.tokens == 1 && first >= sequence.prompt_tokens;
            stats.rows += slot.tokens;
            *(if decode {
                &mut stats.decode_tokens
            } else {
                &mut stats.prefill_tokens
            }) += slot.tokens;
            batch.push(SequenceSlice {
                tokens: &sequence.tokens[first..end],
                first_position: first,
                block_table: &sequence.blocks,
                logits: if end == sequence.tokens.len() {
                    LogitsWanted::Last
                } else {
                    LogitsWanted::None
                },
                gates: sequence.records.wanted.gates,
                phase: if decode {
                    Phase::Decode
                } else {
                    Phase::Prefill
                },
            });
        }
        stats.batch = batch.len();
        self.backend.forward(&batch, &mut self.output);
    }

    /// Takes a step's output in: signature rows, records, new tokens, ended requests.
    fn take_in(&mut self, plan: &Plan) -> Vec<TokenOut> {
        let shape = self.geometry.shape;
        let cells = shape.layers as usize * shape.experts as usize;
        let choices = shape.layers as usize * shape.top_k as usize;
        let mut experts = self.output.experts.chunks_exact(choices.max(1));
        let mut gates = (self.output.gates.probabilities)
            .chunks_exact(cells.max(1))
            .zip(self.output.gates.logits.chunks_exact(cells.max(1)));
        let mut logits = self
            .output
            .logits
            .chunks_exact(self.bounds.vocabulary.max(1));
        let mut tokens = Vec::new();
        for slot in &plan.slots {
            let sequence = &mut self.scheduler.running[slot.index];
            for position in sequence.computed..sequence.computed + slot.tokens {
                let (block, offset) = (
                    position / self.bounds.block_size,
                    position % self.bounds.block_size,
                );
                let row = experts.next().unwrap_or_default();
                self.scheduler
                    .blocks
                    .record(sequence.blocks[block], offset, row);
                sequence.records.record_choices(position, row);
                if sequence.records.wanted.gates
                    && let Some((probabilities, logits)) = gates.next()
                    && position < sequence.prompt_tokens
                {
                    sequence
                        .records
                        .record_gates(position, probabilities, logits);
                }
            }
            self.scheduler.advance(slot.index, slot.tokens);
            let sequence = &mut self.scheduler.running[slot.index];
            if sequence.computed == sequence.tokens.len() {
                let first = (sequence.generated() == 0).then(|| FirstToken {
                    prompt_counts: prompt_counts(&self.scheduler.blocks, sequence),
                    cached_tokens: sequence.cached_tokens.unwrap_or(0),
                });
                let logits = logits.next().unwrap_or_default();
                tokens.push(generate(
                    &mut self.sampler,
                    &self.eos_token_ids,
                    sequence,
                    logits,
                    first,
                ));
            }
        }
        self.end_finished(&tokens);
        tokens
    }

    /// Takes ended requests out and frees or holds their blocks.
    fn end_finished(&mut self, tokens: &[TokenOut]) {
        for out in tokens {
            let Some(finish) = out.finish else {
                continue;
            };
            self.alive.remove(&out.id);
            let Some(at) = self.scheduler.running.iter().position(|s| s.id == out.id) else {
                continue;
            };
            let sequence = self.scheduler.running.remove(at);
            if sequence.hold_blocks && finish == FinishReason::Length {
                let prompt = &sequence.tokens[..sequence.prompt_tokens];
                self.held.insert(
                    out.id,
                    Held {
                        tokens: prompt.len(),
                        prompt: self.scheduler.hasher.sequence(prompt),
                        blocks: sequence.blocks,
                    },
                );
            } else {
                self.scheduler.blocks.release(sequence.blocks.into_iter());
            }
        }
    }
}

/// Counts over the prompt, at the moment when its last token has just been computed: its last block holds no generated token yet.
fn prompt_counts(blocks: &BlockManager, sequence: &Sequence) -> PromptCounts {
    let tokens = sequence.prompt_tokens as u32;
    let counts = blocks.sum(&sequence.blocks);
    let nothing = ExpertCounts::zeros(counts.shape());
    PromptCounts::new(counts, tokens).unwrap_or_else(|error| {
        debug_assert!(false, "prompt counts: {error}");
        tracing::error!(%error, request = %sequence.id, "prompt counts");
        PromptCounts::new(nothing, tokens).expect("no counts are consistent")
    })
}

/// Chooses a sequence's next token and says whether it is the last.
fn generate(
    sampler: &mut Sampler,
    eos: &[u32],
    sequence: &mut Sequence,
    logits: &[f32],
    first: Option<FirstToken>,
) -> TokenOut {
    let params = &sequence.sampling;
    let eos = if params.ignore_eos { &[] } else { eos };
    let mut suppressed = Vec::new();
    if sequence.generated() < params.min_tokens {
        suppressed.extend(eos.iter().chain(&params.stop_token_ids));
        suppressed.sort_unstable();
        suppressed.dedup();
    }
    let token = sampler.choose(logits, params, sequence.tokens.len(), &suppressed);
    let logprobs = params
        .logprobs
        .map(|top| sampler::logprobs(logits, token, top));
    let stops = eos.contains(&token) || params.stop_token_ids.contains(&token);
    sequence.tokens.push(token);
    let finish = if stops {
        Some(FinishReason::Stop)
    } else if sequence.generated() == sequence.sampling.max_tokens {
        Some(FinishReason::Length)
    } else {
        None
    };
    let wanted = sequence.records.wanted;
    let recorded = (finish.is_some() && (wanted.output_counts || wanted.gates)).then(|| Recorded {
        output_counts: sequence.records.output_counts.take(),
        gates: sequence.records.gates.take(),
    });
    TokenOut {
        id: sequence.id,
        token,
        logprobs,
        finish,
        first,
        recorded,
    }
}
