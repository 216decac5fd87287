//! A fake model, and an oracle that knows what it says without an engine.
//!
//! A position's "keys and values" are one number, a hash of the numbers of all positions before it and of its token. Its logits and
//! its experts are hashes of that. So a block that is missing, stale, misplaced, or overwritten while others read it shows in tokens,
//! log-probabilities and counts.

use experts::{ExpertCounts, ModelShape, PromptCounts};

use crate::backend::{Backend, BackendFacts};
use crate::model::{ForwardOutput, LogitsWanted, Phase, SequenceSlice};
use crate::sampler::{Sampler, logprobs};
use crate::{
    Engine, EngineConfig, FinishReason, GateSums, PrefixCache, Request, RequestId, SamplingParams,
    TokenOut,
};

pub(super) const SHAPE: ModelShape = ModelShape {
    layers: 3,
    experts: 8,
    top_k: 2,
};
pub(super) const VOCABULARY: usize = 13;
pub(super) const EOS: u32 = 0;
pub(super) const BLOCK: usize = 4;

pub(super) struct Fake {
    facts: BackendFacts,
    store: Vec<u64>,
}

/// An engine over the fake, with `num_blocks` blocks of [`BLOCK`] tokens.
pub(super) fn engine(num_blocks: usize, config: EngineConfig) -> Engine {
    let backend = Fake {
        facts: BackendFacts {
            shape: SHAPE,
            fingerprint: "fake".into(),
            vocabulary: VOCABULARY,
            max_positions: 200,
            layers: 1,
            kv_heads: 1,
            head_dim: 4,
            block_size: BLOCK,
            num_blocks,
            eos_token_ids: vec![EOS],
        },
        store: vec![0; num_blocks * BLOCK],
    };
    Engine::with_backend(Box::new(backend), config).unwrap()
}

pub(super) fn small(max_num_seqs: usize, max_batched_tokens: usize) -> EngineConfig {
    EngineConfig {
        max_num_seqs,
        max_batched_tokens,
        prefix_cache: PrefixCache::On,
        ..EngineConfig::default()
    }
}

fn mix(a: u64, b: u64) -> u64 {
    let mut x = (a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(0x2545_f491_4f6c_dd1d);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn state(before: u64, token: u32) -> u64 {
    mix(before, u64::from(token) + 1)
}

fn logits(after: u64) -> Vec<f32> {
    // Coarse, so that ties occur.
    (0..VOCABULARY as u64)
        .map(|t| (mix(after, 1000 + t) % 24) as f32 / 4.0)
        .collect()
}

fn choices(state: u64) -> Vec<u16> {
    let experts = u64::from(SHAPE.experts);
    (0..u64::from(SHAPE.layers))
        .flat_map(|layer| {
            let h = mix(state, 2000 + layer);
            let (a, b) = (h % experts, (h >> 16) % (experts - 1));
            [a as u16, if b < a { b as u16 } else { b as u16 + 1 }]
        })
        .collect()
}

fn gates(state: u64, which: u64) -> Vec<f32> {
    (0..u64::from(SHAPE.layers * SHAPE.experts))
        .map(|i| (mix(state, which + i) % 1000) as f32 / 999.0)
        .collect()
}

impl Backend for Fake {
    fn facts(&self) -> &BackendFacts {
        &self.facts
    }

    fn forward(&mut self, batch: &[SequenceSlice<'_>], out: &mut ForwardOutput) {
        *out = ForwardOutput::default();
        let slot = |table: &[u32], p: usize| table[p / BLOCK] as usize * BLOCK + p % BLOCK;
        // All reads come before all writes: what one slice writes is nothing that another reads in the same step.
        let before: Vec<u64> = batch
            .iter()
            .map(|s| {
                (0..s.first_position)
                    .fold(0, |fold, p| mix(fold, self.store[slot(s.block_table, p)]))
            })
            .collect();
        let mut distinct = vec![[false; 8]; SHAPE.layers as usize];
        let mut written = std::collections::HashSet::new();
        for (slice, mut fold) in batch.iter().zip(before) {
            assert!(!slice.tokens.is_empty());
            assert!(slice.phase == Phase::Prefill || slice.tokens.len() == 1);
            for (i, &token) in slice.tokens.iter().enumerate() {
                let at = slot(slice.block_table, slice.first_position + i);
                assert!(written.insert(at), "two rows of a step write position {at}");
                let s = state(fold, token);
                self.store[at] = s;
                fold = mix(fold, s);
                let ids = choices(s);
                for (i, &id) in ids.iter().enumerate() {
                    distinct[i / SHAPE.top_k as usize][id as usize] = true;
                }
                out.experts.extend(ids);
                if slice.gates {
                    out.gates.probabilities.extend(gates(s, 3000));
                    out.gates.logits.extend(gates(s, 4000));
                }
            }
            if slice.logits != LogitsWanted::None {
                out.logits.extend(logits(fold));
            }
        }
        out.distinct_experts = distinct
            .iter()
            .map(|layer| layer.iter().filter(|&&d| d).count() as u32)
            .collect();
    }

    fn block_bytes(&self) -> usize {
        BLOCK * 8
    }

    fn read_block(&self, block: u32, out: &mut Vec<u8>) {
        let start = block as usize * BLOCK;
        for state in &self.store[start..start + BLOCK] {
            out.extend_from_slice(&state.to_le_bytes());
        }
    }

    fn write_block(&mut self, block: u32, bytes: &[u8]) {
        let start = block as usize * BLOCK;
        assert_eq!(bytes.len(), self.block_bytes());
        for (state, bytes) in self.store[start..].iter_mut().zip(bytes.as_chunks::<8>().0) {
            *state = u64::from_le_bytes(*bytes);
        }
    }

    fn copy_block(&mut self, from: u32, to: u32) {
        let (from, to) = (from as usize * BLOCK, to as usize * BLOCK);
        self.store.copy_within(from..from + BLOCK, to);
    }
}

/// The chosen token's log-probability and those of the likeliest tokens, as bits.
pub(super) type LogprobBits = (u32, Vec<(u32, u32)>);

/// What a request must give, whatever happens around it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Outcome {
    pub(super) tokens: Vec<u32>,
    pub(super) logprobs: Vec<Option<LogprobBits>>,
    pub(super) finish: FinishReason,
    pub(super) prompt_counts: PromptCounts,
    pub(super) output_counts: Option<ExpertCounts>,
    pub(super) gates: Option<GateSums>,
}

/// Computes a request's outcome with neither cache nor batch.
pub(super) fn oracle(request: &Request) -> Outcome {
    let params = &request.sampling;
    let (mut fold, mut tokens) = (0, request.prompt.clone());
    let mut counts = [ExpertCounts::zeros(SHAPE), ExpertCounts::zeros(SHAPE)];
    let cells = (SHAPE.layers * SHAPE.experts) as usize;
    let mut sums = GateSums {
        probabilities: vec![0.0; cells],
        logits: vec![0.0; cells],
    };
    let mut all_logprobs = Vec::new();
    let mut computed = 0;
    let finish = loop {
        while computed < tokens.len() {
            let s = state(fold, tokens[computed]);
            fold = mix(fold, s);
            let in_prompt = computed < request.prompt.len();
            for (layer, ids) in choices(s).chunks(SHAPE.top_k as usize).enumerate() {
                counts[usize::from(!in_prompt)].record(layer, ids).unwrap();
            }
            if in_prompt {
                sums.probabilities
                    .iter_mut()
                    .zip(gates(s, 3000))
                    .for_each(|(a, b)| *a += b);
                sums.logits
                    .iter_mut()
                    .zip(gates(s, 4000))
                    .for_each(|(a, b)| *a += b);
            }
            computed += 1;
        }
        let generated = tokens.len() - request.prompt.len();
        let logits = logits(fold);
        let mut stops = params.stop_token_ids.clone();
        if !params.ignore_eos {
            stops.push(EOS);
        }
        stops.sort_unstable();
        let suppressed = if generated < params.min_tokens {
            &stops[..]
        } else {
            &[]
        };
        let token = Sampler::default().choose(&logits, params, tokens.len(), suppressed);
        all_logprobs.push(
            params
                .logprobs
                .map(|top| bits(&logprobs(&logits, token, top))),
        );
        tokens.push(token);
        if stops.contains(&token) {
            break FinishReason::Stop;
        }
        if generated + 1 == params.max_tokens {
            break FinishReason::Length;
        }
    };
    let [prompt, output] = counts;
    Outcome {
        tokens: tokens.split_off(request.prompt.len()),
        logprobs: all_logprobs,
        finish,
        prompt_counts: PromptCounts::complete(prompt).unwrap(),
        output_counts: request.record.output_counts.then_some(output),
        gates: request.record.gates.then_some(sums),
    }
}

pub(super) fn bits(l: &crate::TokenLogprobs) -> LogprobBits {
    let top = l.top.iter().map(|&(t, p)| (t, p.to_bits())).collect();
    (l.chosen.to_bits(), top)
}

/// Puts a request's tokens together again.
pub(super) fn outcome(out: &[TokenOut]) -> Outcome {
    let last = out.last().unwrap();
    assert!(
        out[..out.len() - 1]
            .iter()
            .all(|t| t.finish.is_none() && t.recorded.is_none())
    );
    assert!(out[1..].iter().all(|t| t.first.is_none()));
    let recorded = last.recorded.clone().unwrap_or_default();
    Outcome {
        tokens: out.iter().map(|t| t.token).collect(),
        logprobs: out.iter().map(|t| t.logprobs.as_ref().map(bits)).collect(),
        finish: last.finish.unwrap(),
        prompt_counts: out[0].first.clone().unwrap().prompt_counts,
        output_counts: recorded.output_counts,
        gates: recorded.gates,
    }
}

/// A prompt that shares its beginning with all other prompts of the same family.
pub(super) fn prompt(family: u64, len: usize) -> Vec<u32> {
    (0..len as u64)
        .map(|i| (mix(family, i) % VOCABULARY as u64) as u32)
        .collect()
}

pub(super) fn request(id: u64, prompt: Vec<u32>, max_tokens: usize) -> Request {
    let sampling = SamplingParams {
        max_tokens,
        ignore_eos: true,
        logprobs: Some(2),
        ..SamplingParams::default()
    };
    Request::new(RequestId(id), prompt, sampling)
}

/// Steps until there is no work, and gives each request's tokens.
pub(super) fn drain(engine: &mut Engine) -> std::collections::BTreeMap<RequestId, Vec<TokenOut>> {
    let mut tokens = std::collections::BTreeMap::<_, Vec<_>>::new();
    while engine.has_work() {
        let step = engine.step();
        assert!(step.stats.rows > 0, "nothing runs: {:?}", engine.usage());
        engine.check_blocks();
        for token in step.tokens {
            tokens.entry(token.id).or_default().push(token);
        }
    }
    tokens
}
