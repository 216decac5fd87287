//! Two workers hand requests over: the same tokens as from one worker, exact counts, and no block left behind.

#![allow(clippy::unwrap_used)]

mod common;

use common::{
    Worker, as_body, as_value, config, decode_request, greedy, prefill, prompt, prompt_counts,
    sampled, token_ids, with,
};
use protocol::{TransferParams, handoff::Transport};
use serde_json::json;
use worker::Role;

#[tokio::test]
async fn tokens_equal_a_single_workers() {
    let single = Worker::start(Role::Both).await;
    let (sender, receiver) = (
        Worker::start(Role::Prefill).await,
        Worker::start(Role::Decode).await,
    );
    // Shorter than a block, exactly blocks, one more and one less, many blocks.
    for (index, length) in [1, 5, 15, 16, 17, 32, 33, 100].into_iter().enumerate() {
        let tokens = prompt(index as u64, length);
        for request in [greedy(&tokens, 12), sampled(&tokens, 12, 5)] {
            let expected = single.complete(&request).await;
            let prefilled = prefill(&sender, &request).await;
            let got = receiver
                .complete(&decode_request(&request, &prefilled))
                .await;
            assert_eq!(
                got["choices"], expected["choices"],
                "prompt of {length} tokens"
            );
            assert_eq!(got["usage"]["prompt_tokens"], length);
            assert_eq!(got["usage"]["completion_tokens"], 12);
        }
    }
    for worker in [&single, &sender, &receiver] {
        worker.until_idle().await;
    }
    assert_eq!(
        sender.metric("colocate_handoffs_released_total").await,
        16.0
    );
    assert_eq!(
        receiver.metric("colocate_handoffs_pulled_total").await,
        16.0
    );
}

#[tokio::test]
async fn the_dialect_is_vllms() {
    let sender = Worker::start(Role::Prefill).await;
    let request = greedy(&prompt(1, 20), 9);
    let first = prefill(&sender, &request).await;
    let params = TransferParams::of_reply(&first).unwrap();
    let map = params.as_map();
    for (key, expected) in [
        ("do_remote_prefill", json!(true)),
        ("do_remote_decode", json!(false)),
        ("remote_block_ids", json!([[0, 1]])),
        ("remote_host", json!("127.0.0.1")),
        ("remote_port", json!(sender.bound.transfer.port())),
        ("tp_size", json!(1)),
        ("remote_num_tokens", json!(20)),
        ("remote_prefill_cached_tokens", json!(0)),
        ("transfer_mode", json!("pull")),
    ] {
        assert_eq!(map[key], expected, "{key}");
    }
    assert!(map["remote_engine_id"].is_string() && map["remote_request_id"].is_string());
    assert_eq!(params.transport(), Transport::Embedded);
    assert_eq!(first["choices"][0]["finish_reason"], "length");
    let second = prefill(&sender, &request).await;
    assert_eq!(
        second["kv_transfer_params"]["remote_prefill_cached_tokens"],
        16
    );
    assert_eq!(
        second["usage"]["prompt_tokens_details"]["cached_tokens"],
        16
    );
}

#[tokio::test]
async fn counts_of_a_prefix_hit_are_those_of_a_cold_run() {
    let (cold, warm) = (
        Worker::start(Role::Prefill).await,
        Worker::start(Role::Prefill).await,
    );
    let whole = prompt(3, 70);
    // The cache knows none of it, a part of it, and all of it.
    for length in [40, 70, 70, 33] {
        let request = greedy(&whole[..length], 4);
        let hit = prompt_counts(&prefill(&warm, &request).await);
        assert_eq!(hit.covered_tokens() as usize, length);
        if length == 70 {
            assert_eq!(hit, prompt_counts(&prefill(&cold, &request).await));
        }
    }
    assert!(warm.metric("colocate_prefix_hit_tokens_total").await >= 32.0);
}

#[tokio::test]
async fn blocks_that_the_receiver_has_are_not_sent() {
    let (sender, receiver) = (
        Worker::start(Role::Prefill).await,
        Worker::start(Role::Decode).await,
    );
    let request = greedy(&prompt(4, 64), 5);
    let mut bytes = Vec::new();
    let mut replies = Vec::new();
    for _ in 0..2 {
        let prefilled = prefill(&sender, &request).await;
        replies.push(token_ids(
            &receiver
                .complete(&decode_request(&request, &prefilled))
                .await,
        ));
        bytes.push(
            receiver
                .metric("colocate_handoffs_pulled_bytes_total")
                .await,
        );
    }
    assert_eq!(replies[0], replies[1]);
    assert!(bytes[1] - bytes[0] < bytes[0] / 2.0, "{bytes:?}");
    sender.until_idle().await;
    receiver.until_idle().await;
}

#[tokio::test]
async fn several_completions_share_one_handoff() {
    let single = Worker::start(Role::Both).await;
    let (sender, receiver) = (
        Worker::start(Role::Prefill).await,
        Worker::start(Role::Decode).await,
    );
    let request = with(sampled(&prompt(5, 37), 8, 3), "n", json!(3));
    let expected = single.complete(&request).await;
    let prefilled = prefill(&sender, &request).await;
    let got = receiver
        .complete(&decode_request(&request, &prefilled))
        .await;
    assert_eq!(got["choices"], expected["choices"]);
    assert_eq!(got["choices"].as_array().unwrap().len(), 3);
    sender.until_idle().await;
    receiver.until_idle().await;
}

#[tokio::test]
async fn handed_over_requests_stream() {
    let (sender, receiver) = (
        Worker::start(Role::Prefill).await,
        Worker::start(Role::Decode).await,
    );
    let request = greedy(&prompt(6, 21), 7);
    let prefilled = prefill(&sender, &request).await;
    let whole = token_ids(
        &receiver
            .complete(&decode_request(&request, &prefilled))
            .await,
    );
    let prefilled = prefill(&sender, &request).await;
    let streamed = with(decode_request(&request, &prefilled), "stream", json!(true));
    let chunks = receiver.stream("/v1/completions", &streamed).await;
    let ids: Vec<u64> = chunks.iter().flat_map(token_ids).collect();
    assert_eq!(ids, whole);
}

#[tokio::test]
async fn chat_is_handed_over_too() {
    let single = Worker::start(Role::Both).await;
    let (sender, receiver) = (
        Worker::start(Role::Prefill).await,
        Worker::start(Role::Decode).await,
    );
    let request = json!({
        "model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_completion_tokens": 6, "temperature": 0,
        "ignore_eos": true, "return_token_ids": true,
    });
    let (_, expected) = single.post("/v1/chat/completions", &request).await;
    let prefill_request =
        common::as_value(&protocol::handoff::prefill_body(&common::as_body(&request)));
    let (status, prefilled) = sender.post("/v1/chat/completions", &prefill_request).await;
    assert_eq!(status, 200, "{prefilled}");
    let (status, got) = receiver
        .post(
            "/v1/chat/completions",
            &decode_request(&request, &prefilled),
        )
        .await;
    assert_eq!(status, 200, "{got}");
    assert_eq!(got["choices"], expected["choices"]);
    assert_eq!(got["prompt_token_ids"], expected["prompt_token_ids"]);
}

#[tokio::test]
async fn calibration_gives_counts_and_gate_sums() {
    let worker = Worker::start(Role::Decode).await;
    let want =
        json!({"colocate": {"want": ["output_counts", "gate_probabilities", "gate_logits"]}});
    let request = with(greedy(&prompt(7, 24), 6), "kv_transfer_params", want);
    let reply = worker.complete(&request).await;
    let extras = protocol::handoff::Extras::read(&reply["kv_transfer_params"]["colocate"]).unwrap();
    let prompt_counts = extras.prompt_counts.unwrap();
    assert_eq!(
        (
            prompt_counts.covered_tokens(),
            prompt_counts.prompt_tokens()
        ),
        (24, 24)
    );
    // The last token was not fed back.
    assert_eq!(extras.output_counts.unwrap().covered_tokens(), 5);
    let cells = prompt_counts.shape().cells();
    let probabilities = extras.gate_probabilities.unwrap();
    assert_eq!(
        (probabilities.len(), extras.gate_logits.unwrap().len()),
        (cells, cells)
    );
    let layers = prompt_counts.shape().layers as f32;
    let sum: f32 = probabilities.iter().sum();
    assert!((sum - 24.0 * layers).abs() < 0.1, "{sum}");
    // Twice the same, also with the prompt in the cache.
    assert_eq!(
        worker.complete(&request).await["kv_transfer_params"],
        reply["kv_transfer_params"]
    );
    let streamed = with(request, "stream", json!(true));
    assert_eq!(worker.refused(&streamed).await.0, 400);
}

#[tokio::test]
async fn a_stop_string_in_the_first_token_holds_nothing() {
    // A lease that does not end within the test.
    let mut config = config(Role::Prefill);
    config.lease = std::time::Duration::from_secs(3600);
    let sender = Worker::with(config).await;
    let (mut tokens, mut text) = (Vec::new(), String::new());
    for seed in 0.. {
        tokens = prompt(seed, 20);
        let first = sender.complete(&greedy(&tokens, 1)).await;
        text = first["choices"][0]["text"].as_str().unwrap().to_owned();
        if !text.is_empty() {
            break;
        }
    }
    let request = with(greedy(&tokens, 9), "stop", json!(text));
    // The gateway asks for `min_tokens` 1, with which the first token's text is not looked at; others may not.
    let request = protocol::handoff::prefill_body(&as_body(&request));
    let request = with(as_value(&request), "min_tokens", json!(0));
    for round in 0..2 {
        let reply = sender.complete(&request).await;
        assert_eq!(
            reply["choices"][0]["finish_reason"], "stop",
            "round {round}"
        );
        assert!(TransferParams::of_reply(&reply).is_none(), "{reply}");
    }
    sender.until_idle().await;
    assert_eq!(sender.metric("colocate_handoffs_held_total").await, 2.0);
    assert_eq!(sender.metric("colocate_handoffs_aborted_total").await, 2.0);
}
