//! The whole engine over a real, tiny model: in company, with few blocks, or handed over, a request gives the bits that it gives alone.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use engine::testing::{RandomModel, write_random_checkpoint};
use engine::{
    Engine, EngineConfig, FinishReason, GateSums, LoadOptions, Model, PrefilledBlocks, Request,
    RequestId, SamplingParams, TokenOut,
};
use experts::{ExpertCounts, PromptCounts};

fn model() -> Arc<Model> {
    let dir = tempfile::tempdir().unwrap();
    write_random_checkpoint(dir.path(), &RandomModel::default(), 11).unwrap();
    Arc::new(Model::load(dir.path(), &LoadOptions::default()).unwrap())
}

fn engine(model: &Arc<Model>, num_blocks: usize, max_batched_tokens: usize) -> Engine {
    let config = EngineConfig {
        num_blocks,
        max_num_seqs: 5,
        max_batched_tokens,
        ..EngineConfig::default()
    };
    Engine::new(Arc::clone(model), config).unwrap()
}

/// Prompts that share beginnings, some as long as whole blocks; every other request is sampled.
fn requests() -> Vec<Request> {
    let text = b"It is a truth universally acknowledged, that a single man in possession of a good fortune";
    let lengths = [1, 15, 16, 17, 32, 33, 48, 48, 64, 80, 20];
    let prompts = lengths.iter().enumerate().map(|(i, &len)| {
        let from = if i % 3 == 2 { 7 } else { 0 };
        text[from..from + len]
            .iter()
            .map(|&b| u32::from(b))
            .collect()
    });
    prompts
        .zip(0u64..)
        .map(|(prompt, id): (Vec<u32>, u64)| {
            let sampling = SamplingParams {
                temperature: if id % 2 == 0 { 0.0 } else { 0.9 },
                top_p: 0.95,
                seed: id,
                max_tokens: 20,
                logprobs: Some(3),
                ..SamplingParams::default()
            };
            let mut request = Request::new(RequestId(id), prompt, sampling);
            request.record.output_counts = true;
            request
        })
        .collect()
}

/// Everything that a request gave, its log-probabilities as bits.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    tokens: Vec<(u32, Vec<u32>)>,
    finish: Option<FinishReason>,
    prompt_counts: Option<PromptCounts>,
    output_counts: Option<ExpertCounts>,
    gates: Option<GateSums>,
}

impl Outcome {
    fn take(&mut self, out: TokenOut) {
        let logprobs = out.logprobs.unwrap();
        let top = logprobs.top.iter().map(|&(_, p)| p.to_bits());
        let bits = std::iter::once(logprobs.chosen.to_bits())
            .chain(top)
            .collect();
        self.tokens.push((out.token, bits));
        self.finish = out.finish;
        if let Some(first) = out.first {
            self.prompt_counts = Some(first.prompt_counts);
        }
        let recorded = out.recorded.unwrap_or_default();
        self.output_counts = recorded.output_counts;
        self.gates = recorded.gates;
    }
}

fn step(engine: &mut Engine, outcomes: &mut BTreeMap<RequestId, Outcome>) {
    let step = engine.step();
    assert!(step.stats.rows > 0);
    for token in step.tokens {
        outcomes.entry(token.id).or_default().take(token);
    }
}

fn drain(engine: &mut Engine) -> BTreeMap<RequestId, Outcome> {
    let mut outcomes = BTreeMap::new();
    while engine.has_work() {
        step(engine, &mut outcomes);
    }
    assert_eq!(engine.usage().blocks.used, 0);
    outcomes
}

/// Each request in a fresh engine with room for everything.
fn alone(model: &Arc<Model>, requests: &[Request]) -> BTreeMap<RequestId, Outcome> {
    let run = |request: &Request| {
        let mut engine = engine(model, 16, 256);
        engine.add(request.clone()).unwrap();
        drain(&mut engine)
    };
    requests.iter().flat_map(run).collect()
}

#[test]
fn company_chunks_cache_and_preemption_change_nothing() {
    let model = model();
    let requests = requests();
    let mut engine = engine(&model, 13, 24);
    for request in &requests {
        engine.add(request.clone()).unwrap();
    }
    let together = drain(&mut engine);
    let usage = engine.usage();
    assert!(
        usage.preemptions_total > 0 && usage.cached_tokens_total > 0,
        "{usage:?}"
    );
    assert_eq!(together, alone(&model, &requests));
    // Again, over what is cached by now.
    for request in &requests {
        engine.add(request.clone()).unwrap();
    }
    assert_eq!(drain(&mut engine), together);
}

#[test]
fn a_handoff_changes_nothing() {
    let model = model();
    let requests = requests();
    let (mut prefill, mut decode) = (engine(&model, 24, 32), engine(&model, 18, 32));
    let mut outcomes = BTreeMap::new();
    for request in &requests {
        let mut first = request.clone();
        first.hold_blocks = true;
        first.sampling.max_tokens = 1;
        first.sampling.min_tokens = 1;
        prefill.add(first).unwrap();
        let mut counts = BTreeMap::new();
        while prefill.has_work() {
            step(&mut prefill, &mut counts);
        }
        let pinned = decode.pin_prefix(&request.prompt);
        let payload = prefill.read_held(request.id, pinned.blocks).unwrap();
        prefill.release_held(request.id);
        let mut taken = request.clone();
        taken.prefilled = Some(PrefilledBlocks {
            pin: pinned.id,
            payload,
        });
        decode.add(taken).unwrap();
        // Others are decoding meanwhile.
        step(&mut decode, &mut outcomes);
        step(&mut decode, &mut outcomes);
    }
    assert_eq!(prefill.usage().blocks.used, 0);
    while decode.has_work() {
        step(&mut decode, &mut outcomes);
    }
    assert_eq!(decode.usage().blocks.used, 0);
    assert_eq!(outcomes, alone(&model, &requests));
}

#[test]
fn gate_sums_do_not_depend_on_company() {
    let model = model();
    let mut requests = requests();
    for request in &mut requests {
        request.record.gates = true;
        request.sampling.max_tokens = 2;
    }
    let mut engine = engine(&model, 13, 24);
    for request in &requests {
        engine.add(request.clone()).unwrap();
    }
    let together = drain(&mut engine);
    assert_eq!(together, alone(&model, &requests));
    // Probabilities sum to one per token and layer.
    for request in &requests {
        let gates = together[&request.id].gates.as_ref().unwrap();
        let sum: f32 = gates.probabilities.iter().sum();
        let expected = (request.prompt.len() * 3) as f32;
        assert!((sum - expected).abs() < 1e-3 * expected, "{sum} {expected}");
    }
}
