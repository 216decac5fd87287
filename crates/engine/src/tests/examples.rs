//! One situation each.

use super::fake::*;
use crate::*;

/// Runs a request to its end and checks it against the oracle; gives its cached tokens.
fn run(engine: &mut Engine, request: &Request) -> usize {
    engine.add(request.clone()).unwrap();
    let out = drain(engine);
    let tokens = &out[&request.id];
    assert_eq!(outcome(tokens), oracle(request));
    tokens[0].first.as_ref().unwrap().cached_tokens
}

#[test]
fn a_cold_prompt_is_computed_once_in_chunks() {
    let mut engine = engine(16, small(1, 3));
    engine.add(request(1, prompt(1, 10), 2)).unwrap();
    let rows: Vec<_> = std::iter::from_fn(|| engine.has_work().then(|| engine.step().stats))
        .map(|s| (s.prefill_tokens, s.decode_tokens, s.generated_tokens))
        .collect();
    assert_eq!(
        rows,
        [(3, 0, 0), (3, 0, 0), (3, 0, 0), (1, 0, 1), (0, 1, 1)]
    );
}

#[test]
fn prefix_hits_give_the_counts_of_a_cold_prefill() {
    let mut engine = engine(32, small(4, 64));
    assert_eq!(run(&mut engine, &request(1, prompt(1, 12), 6)), 0);
    // Full hit: only the last token is computed, in a copy of the last block.
    assert_eq!(run(&mut engine, &request(2, prompt(1, 12), 3)), 11);
    assert_eq!(run(&mut engine, &request(3, prompt(1, 14), 3)), 12);
    assert_eq!(run(&mut engine, &request(4, prompt(1, 7), 3)), 4);
    assert_eq!(run(&mut engine, &request(5, prompt(1, 3), 3)), 0);
    // A prompt that goes on with what another request generated.
    let mut longer = request(6, prompt(1, 12), 3);
    longer
        .prompt
        .extend(oracle(&request(1, prompt(1, 12), 6)).tokens);
    longer.prompt.extend([5, 6]);
    assert_eq!(run(&mut engine, &longer), 16);
    let usage = engine.usage();
    assert_eq!(usage.blocks.used, 0);
    assert_eq!(
        (usage.prompt_tokens_total, usage.cached_tokens_total),
        (68, 43)
    );
}

#[test]
fn a_full_hit_without_room_for_a_copy_computes_its_last_block() {
    let mut engine = engine(2, small(1, 8));
    run(&mut engine, &request(1, prompt(1, 8), 1));
    assert_eq!(run(&mut engine, &request(2, prompt(1, 8), 1)), 4);
}

#[test]
fn without_a_prefix_cache_everything_is_computed() {
    let mut config = small(1, 8);
    config.prefix_cache = PrefixCache::Off;
    let mut engine = engine(8, config);
    for id in 0..3 {
        assert_eq!(run(&mut engine, &request(id, prompt(1, 8), 4)), 0);
        assert_eq!(engine.usage().blocks.cached, 0);
    }
}

#[test]
fn the_latest_request_gives_way_and_comes_back() {
    let mut engine = engine(6, small(3, 8));
    for id in 1..=3 {
        engine.add(request(id, prompt(id, 4), 16)).unwrap();
    }
    let mut preempted = 0;
    let mut out = std::collections::BTreeMap::<_, Vec<_>>::new();
    while engine.has_work() {
        let step = engine.step();
        preempted += step.stats.preempted;
        for token in step.tokens {
            out.entry(token.id.0).or_default().push(token);
        }
        engine.check_blocks();
    }
    assert!(preempted > 0);
    assert_eq!(engine.usage().preemptions_total, preempted as u64);
    for id in 1..=3 {
        assert_eq!(outcome(&out[&id]), oracle(&request(id, prompt(id, 4), 16)));
    }
}

#[test]
fn recordings_are_exact_and_gates_do_without_the_cache() {
    let mut engine = engine(32, small(4, 5));
    run(&mut engine, &request(1, prompt(1, 12), 3));
    let mut recorded = request(2, prompt(1, 12), 6);
    recorded.record.output_counts = true;
    assert_eq!(run(&mut engine, &recorded), 11);
    recorded.record.gates = true;
    assert_eq!(run(&mut engine, &recorded), 0);
}

#[test]
fn stop_and_length_end_a_request() {
    let mut engine = engine(32, small(4, 64));
    let free = oracle(&request(1, prompt(3, 6), 12));
    let mut stopping = request(2, prompt(3, 6), 12);
    stopping.sampling.stop_token_ids = vec![free.tokens[3]];
    let at = free
        .tokens
        .iter()
        .position(|&t| t == free.tokens[3])
        .unwrap();
    run(&mut engine, &stopping);
    let ended = oracle(&stopping);
    assert_eq!(ended.finish, FinishReason::Stop);
    assert_eq!(ended.tokens, free.tokens[..=at]);
    stopping.sampling.min_tokens = 12;
    run(&mut engine, &stopping);
    let ended = oracle(&stopping);
    assert_eq!(
        (ended.finish, ended.tokens.len()),
        (FinishReason::Length, 12)
    );
}

#[test]
fn impossible_requests_are_refused() {
    let mut engine = engine(4, small(4, 64));
    engine.add(request(1, prompt(1, 3), 3)).unwrap();
    type Change = fn(&mut Request);
    let cases: [(Change, &str); 12] = [
        (
            |r| r.id = RequestId(1),
            "expected a new request id, got 1, which is in use",
        ),
        (
            |r| r.prompt.clear(),
            "expected a prompt of at least one token, got none",
        ),
        (
            |r| r.prompt[2] = 13,
            "expected token ids below 13, got 13 at position 2 of the prompt",
        ),
        (
            |r| r.sampling.max_tokens = 15,
            "expected a request of at most 4 blocks of 4 tokens, got one that may need 5",
        ),
        (
            |r| r.sampling.max_tokens = 198,
            "expected prompt and generated tokens of at most 200, got 3 + 198",
        ),
        (
            |r| r.sampling.max_tokens = 0,
            "expected max_tokens of at least 1, got 0",
        ),
        (
            |r| r.sampling.temperature = -1.0,
            "expected temperature of at least 0, got -1",
        ),
        (
            |r| r.sampling.top_p = 0.0,
            "expected top_p above 0 and at most 1, got 0",
        ),
        (
            |r| r.sampling.min_p = f32::NAN,
            "expected min_p from 0 to 1, got NaN",
        ),
        (
            |r| r.sampling.min_tokens = 4,
            "expected min_tokens of at most max_tokens, got 4",
        ),
        (
            |r| r.hold_blocks = true,
            "expected max_tokens 1 of a request whose blocks are held, got 3",
        ),
        (
            |r| r.sampling.max_tokens = usize::MAX,
            "expected prompt and generated tokens of at most 200, got 3 + 18446744073709551615",
        ),
    ];
    for (change, message) in cases {
        let mut wrong = request(2, prompt(1, 3), 3);
        change(&mut wrong);
        assert_eq!(engine.add(wrong).unwrap_err().to_string(), message);
    }
    assert_eq!(engine.max_sequence(), 17);
    run(&mut engine, &request(3, prompt(1, 3), 14));
}

#[test]
fn configurations_are_checked() {
    let check = |change: fn(&mut EngineConfig)| {
        let mut config = small(4, 64);
        change(&mut config);
        config.check(&BackendFacts {
            shape: SHAPE,
            fingerprint: String::new(),
            vocabulary: 1,
            max_positions: 100,
            layers: 1,
            kv_heads: 1,
            head_dim: 1,
            block_size: 16,
            num_blocks: 1,
            eos_token_ids: vec![],
        })
    };
    assert_eq!(check(|_| ()), Ok(()));
    assert!(matches!(
        check(|c| c.num_blocks = 0),
        Err(ConfigError::Zero {
            field: "num_blocks"
        })
    ));
    assert!(matches!(
        check(|c| c.max_waiting = 0),
        Err(ConfigError::Zero {
            field: "max_waiting"
        })
    ));
    let most = u32::MAX as usize;
    assert_eq!(check(|c| c.num_blocks = u32::MAX as usize), Ok(()));
    assert_eq!(
        check(|c| c.num_blocks = usize::MAX),
        Err(ConfigError::Blocks {
            limit: most,
            got: usize::MAX
        })
    );
    assert_eq!(
        check(|c| (c.block_size, c.num_blocks) = (1 << 62, 4)),
        Err(ConfigError::Blocks { limit: 3, got: 4 })
    );
    assert!(matches!(
        check(|c| c.max_batched_tokens = 3),
        Err(ConfigError::BatchedTokens { .. })
    ));
    assert!(matches!(
        check(|c| c.max_model_len = Some(101)),
        Err(ConfigError::ModelLength { .. })
    ));
}

#[test]
fn stop_tokens_in_any_order_are_held_back_until_min_tokens() {
    let mut engine = engine(32, small(1, 64));
    for (id, temperature) in [(1, 0.0), (2, 1.0)] {
        let mut request = request(id, prompt(1, 9), 20);
        request.sampling.temperature = temperature;
        request.sampling.min_tokens = 20;
        request.sampling.ignore_eos = false;
        request.sampling.stop_token_ids = vec![9, 3, 12, 3, 1, 9, 7, 5];
        engine.add(request.clone()).unwrap();
        let out = drain(&mut engine);
        let tokens: Vec<u32> = out[&request.id].iter().map(|out| out.token).collect();
        assert_eq!(tokens.len(), 20);
        let stops = &request.sampling.stop_token_ids;
        assert!(
            tokens.iter().all(|t| *t != EOS && !stops.contains(t)),
            "{tokens:?}"
        );
    }
}

#[test]
fn no_more_wait_than_may() {
    let config = EngineConfig {
        max_waiting: 2,
        ..small(1, 64)
    };
    let mut engine = engine(8, config);
    engine.add(request(1, prompt(1, 9), 3)).unwrap();
    engine.add(request(2, prompt(2, 9), 3)).unwrap();
    let full = Err(AdmissionError::Full { limit: 2 });
    assert_eq!(engine.add(request(3, prompt(3, 9), 3)), full);
    // One of the two runs now.
    engine.step();
    assert_eq!(engine.add(request(3, prompt(3, 9), 3)), Ok(()));
    assert_eq!(engine.add(request(4, prompt(4, 9), 3)), full);
    assert_eq!(drain(&mut engine).len(), 3);
    assert_eq!(engine.usage().blocks.used, 0);
}

#[test]
fn an_abort_frees_at_once() {
    let mut engine = engine(8, small(1, 64));
    engine.add(request(1, prompt(1, 9), 9)).unwrap();
    engine.add(request(2, prompt(2, 9), 9)).unwrap();
    engine.step();
    engine.abort(RequestId(2));
    assert_eq!(engine.usage().waiting, 0);
    engine.abort(RequestId(1));
    engine.abort(RequestId(7));
    assert!(!engine.has_work());
    assert_eq!(engine.usage().blocks.used, 0);
    assert_eq!(engine.step(), Step::default());
}
