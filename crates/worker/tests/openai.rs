//! The OpenAI routes of one worker.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{Worker, config, greedy, prompt, sampled, token_ids, with};
use futures::StreamExt as _;
use serde_json::{Value, json};
use worker::Role;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn chat(content: &str) -> Value {
    json!({
        "model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 9, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true,
    })
}

#[tokio::test]
async fn completions_take_text_and_token_ids() {
    let worker = Worker::start(Role::Both).await;
    let text = greedy(&[], 6);
    let text = with(text, "prompt", json!("hello"));
    let reply = worker.complete(&text).await;
    assert_eq!(reply["object"], "text_completion");
    assert_eq!(reply["model"], "m");
    assert!(reply["id"].as_str().unwrap().starts_with("cmpl-"));
    let choice = &reply["choices"][0];
    // The tokenizer of the random checkpoint has a token for every byte.
    assert_eq!(choice["prompt_token_ids"], json!([104, 101, 108, 108, 111]));
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(token_ids(&reply).len(), 6);
    assert_eq!(
        reply["usage"],
        json!({
            "prompt_tokens": 5, "total_tokens": 11, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0},
        })
    );

    let ids = with(text.clone(), "prompt", choice["prompt_token_ids"].clone());
    assert_eq!(worker.complete(&ids).await["choices"], reply["choices"]);
    let both = with(text.clone(), "prompt", json!(["hello", "hello"]));
    let two = worker.complete(&both).await;
    assert_eq!(two["choices"].as_array().unwrap().len(), 2);
    assert_eq!(two["choices"][1]["index"], 1);
    assert_eq!(two["choices"][1]["text"], choice["text"]);
    assert_eq!(two["usage"]["prompt_tokens"], 10);
    let echoed = worker.complete(&with(text, "echo", json!(true))).await;
    assert_eq!(
        echoed["choices"][0]["text"],
        format!("hello{}", choice["text"].as_str().unwrap())
    );
    worker.until_idle().await;
}

#[tokio::test]
async fn streams_say_what_whole_replies_say() {
    let worker = Worker::start(Role::Both).await;
    for request in [
        greedy(&prompt(1, 30), 20),
        with(sampled(&prompt(2, 17), 20, 4), "n", json!(2)),
        with(greedy(&prompt(3, 5), 12), "logprobs", json!(2)),
        with(
            with(greedy(&[], 12), "prompt", json!("hello there")),
            "echo",
            json!(true),
        ),
    ] {
        let whole = worker.complete(&request).await;
        let streamed = with(request.clone(), "stream", json!(true));
        let streamed = with(streamed, "stream_options", json!({"include_usage": true}));
        let mut chunks = worker.stream(COMPLETIONS, &streamed).await;
        let usage = chunks.pop().unwrap();
        assert_eq!(usage["choices"], json!([]));
        assert_eq!(
            usage["usage"]["completion_tokens"],
            whole["usage"]["completion_tokens"]
        );
        assert_eq!(
            usage["usage"]["prompt_tokens"],
            whole["usage"]["prompt_tokens"]
        );
        for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
            let of_choice: Vec<&Value> = chunks
                .iter()
                .map(|chunk| &chunk["choices"][0])
                .filter(|piece| piece["index"] == index)
                .collect();
            let text: String = of_choice
                .iter()
                .map(|piece| piece["text"].as_str().unwrap())
                .collect();
            assert_eq!(json!(text), choice["text"]);
            let join = |path: &str| -> Vec<Value> {
                of_choice
                    .iter()
                    .flat_map(|piece| {
                        piece
                            .pointer(path)
                            .and_then(Value::as_array)
                            .cloned()
                            .unwrap_or_default()
                    })
                    .collect()
            };
            assert_eq!(json!(join("/token_ids")), choice["token_ids"]);
            assert_eq!(json!(join("/prompt_token_ids")), choice["prompt_token_ids"]);
            if choice["logprobs"].is_object() {
                // The greedy choice is the likeliest: the same number in both lists, with the same digits.
                let logprobs = &choice["logprobs"];
                let token = logprobs["tokens"][0].as_str().unwrap();
                assert_eq!(
                    logprobs["top_logprobs"][0][token],
                    logprobs["token_logprobs"][0]
                );
                for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                    assert_eq!(
                        json!(join(&format!("/logprobs/{list}"))),
                        choice["logprobs"][list],
                        "{list}"
                    );
                }
            }
            let (last, others) = of_choice.split_last().unwrap();
            assert_eq!(last["finish_reason"], choice["finish_reason"]);
            assert!(others.iter().all(|piece| piece["finish_reason"].is_null()));
        }
    }
    worker.until_idle().await;
}

#[tokio::test]
async fn chats_stream_role_first() {
    let worker = Worker::start(Role::Both).await;
    let request = with(
        with(chat("hi"), "logprobs", json!(true)),
        "top_logprobs",
        json!(2),
    );
    let (status, whole) = worker.post(CHAT, &request).await;
    assert_eq!(status, 200, "{whole}");
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["message"]["role"], "assistant");
    let content = whole["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert_eq!(content.len(), 9);
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    // Greedy takes the likeliest.
    assert_eq!(
        content[0]["top_logprobs"][0]["logprob"],
        content[0]["logprob"]
    );
    let rendered = whole["prompt_token_ids"].as_array().unwrap().len();
    assert_eq!(whole["usage"]["prompt_tokens"], rendered);

    let chunks = worker
        .stream(CHAT, &with(request, "stream", json!(true)))
        .await;
    assert_eq!(chunks[0]["object"], "chat.completion.chunk");
    assert_eq!(
        chunks[0]["choices"][0]["delta"],
        json!({"role": "assistant", "content": ""})
    );
    let text: String = chunks
        .iter()
        .map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(json!(text), whole["choices"][0]["message"]["content"]);
    assert!(
        chunks[1..]
            .iter()
            .all(|chunk| chunk["choices"][0]["delta"]["role"].is_null())
    );
    assert_eq!(
        chunks.last().unwrap()["choices"][0]["finish_reason"],
        "length"
    );
}

#[tokio::test]
async fn stop_strings_and_tokens_end_a_completion() {
    let worker = Worker::start(Role::Both).await;
    let request = greedy(&prompt(5, 12), 24);
    let whole = worker.complete(&request).await;
    let ids = token_ids(&whole);
    let text = whole["choices"][0]["text"].as_str().unwrap().to_owned();

    let by_token = worker
        .complete(&with(request.clone(), "stop_token_ids", json!([ids[5]])))
        .await;
    let first = ids.iter().position(|id| *id == ids[5]).unwrap();
    assert_eq!(by_token["choices"][0]["finish_reason"], "stop");
    assert_eq!(by_token["choices"][0]["stop_reason"], ids[5]);
    assert_eq!(token_ids(&by_token), ids[..=first]);

    // A stop string from the middle of the text, over two characters.
    let characters: Vec<char> = text.chars().collect();
    let stop: String = characters[characters.len() / 2..][..2].iter().collect();
    let before = &text[..text.find(&stop).unwrap()];
    for streamed in [false, true] {
        let request = with(
            with(request.clone(), "stop", json!([stop])),
            "stream",
            json!(streamed),
        );
        let (got, finish, reason) = if streamed {
            let chunks = worker.stream(COMPLETIONS, &request).await;
            let text: String = chunks
                .iter()
                .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap())
                .collect();
            let last = chunks.last().unwrap()["choices"][0].clone();
            (
                text,
                last["finish_reason"].clone(),
                last["stop_reason"].clone(),
            )
        } else {
            let choice = worker.complete(&request).await["choices"][0].clone();
            (
                choice["text"].as_str().unwrap().to_owned(),
                choice["finish_reason"].clone(),
                choice["stop_reason"].clone(),
            )
        };
        assert_eq!(
            (got.as_str(), finish, reason),
            (before, json!("stop"), json!(stop))
        );
    }
    let shown = with(
        with(request, "stop", json!(stop)),
        "include_stop_str_in_output",
        json!(true),
    );
    assert_eq!(
        worker.complete(&shown).await["choices"][0]["text"],
        format!("{before}{stop}")
    );
    worker.until_idle().await;
}

#[tokio::test]
async fn seeds_name_their_samples() {
    let worker = Worker::start(Role::Both).await;
    let tokens = prompt(6, 20);
    let first = token_ids(&worker.complete(&sampled(&tokens, 16, 1)).await);
    assert_eq!(
        token_ids(&worker.complete(&sampled(&tokens, 16, 1)).await),
        first
    );
    assert_ne!(
        token_ids(&worker.complete(&sampled(&tokens, 16, 2)).await),
        first
    );
}

#[tokio::test]
async fn cached_tokens_are_told() {
    let worker = Worker::start(Role::Both).await;
    let request = greedy(&prompt(7, 40), 2);
    assert_eq!(
        worker.complete(&request).await["usage"]["prompt_tokens_details"]["cached_tokens"],
        0
    );
    assert_eq!(
        worker.complete(&request).await["usage"]["prompt_tokens_details"]["cached_tokens"],
        32
    );
}

#[tokio::test]
async fn errors_have_openais_shape() {
    let worker = Worker::start(Role::Both).await;
    let good = greedy(&prompt(8, 10), 4);
    for (request, status, code, param) in [
        (
            with(good.clone(), "model", json!("other")),
            404,
            json!("model_not_found"),
            json!("model"),
        ),
        (
            with(good.clone(), "max_tokens", json!(1 << 20)),
            400,
            json!("context_length_exceeded"),
            json!("prompt"),
        ),
        (
            with(good.clone(), "prompt", json!([])),
            400,
            Value::Null,
            json!("prompt"),
        ),
        (
            with(good.clone(), "prompt", json!([100_000])),
            400,
            Value::Null,
            json!("prompt"),
        ),
        (
            with(good.clone(), "prompt", json!("")),
            400,
            Value::Null,
            json!("prompt"),
        ),
        (
            with(good.clone(), "temperature", json!("x")),
            400,
            Value::Null,
            json!("temperature"),
        ),
        (
            with(good.clone(), "top_p", json!(7)),
            400,
            Value::Null,
            json!("top_p"),
        ),
        (
            with(good.clone(), "suffix", json!("x")),
            400,
            json!("unsupported_parameter"),
            json!("suffix"),
        ),
    ] {
        let (got, error) = worker.refused(&request).await;
        assert_eq!(
            (got, &error["code"], &error["param"]),
            (status, &code, &param),
            "{error}"
        );
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|message| !message.is_empty())
                && error["type"].is_string()
        );
        // An error before the first token is a plain reply also where a stream was asked for.
        assert_eq!(
            worker
                .refused(&with(request, "stream", json!(true)))
                .await
                .0,
            status
        );
    }
    let (status, text) = worker.get("/nowhere").await;
    assert_eq!(
        (
            status,
            serde_json::from_str::<Value>(&text).unwrap()["error"]["type"].clone()
        ),
        (404, json!("not_found_error"))
    );
    let not_json = common::client()
        .post(worker.url(COMPLETIONS))
        .body("{")
        .send()
        .await
        .unwrap();
    assert_eq!(not_json.status().as_u16(), 400);
    let (status, _) = worker
        .post(CHAT, &json!({"model": "m", "messages": []}))
        .await;
    assert_eq!(status, 400);
    worker.until_idle().await;
}

#[tokio::test]
async fn models_health_and_request_ids() {
    let worker = Worker::start(Role::Both).await;
    let models: Value = serde_json::from_str(&worker.get("/v1/models").await.1).unwrap();
    let (status, card) = worker.get("/v1/models/m").await;
    let card: Value = serde_json::from_str(&card).unwrap();
    assert_eq!((status, &card), (200, &models["data"][0]));
    let (status, error) = worker.get("/v1/models/other/name").await;
    let error: Value = serde_json::from_str(&error).unwrap();
    assert_eq!(
        (status, &error["error"]["code"]),
        (404, &json!("model_not_found"))
    );
    assert!(
        error["error"]["message"]
            .as_str()
            .unwrap()
            .contains("`other/name`")
    );
    assert_eq!(
        (&models["object"], &models["data"][0]["id"]),
        (&json!("list"), &json!("m"))
    );
    assert_eq!(models["data"][0]["owned_by"], "colocate");
    assert_eq!(worker.get("/health").await.0, 200);
    let request = worker.request(COMPLETIONS, &greedy(&prompt(9, 5), 1));
    let reply = request
        .header("x-request-id", "my-id")
        .send()
        .await
        .unwrap();
    assert_eq!(reply.headers()["x-request-id"], "my-id");
    let reply: Value = serde_json::from_str(&reply.text().await.unwrap()).unwrap();
    assert_eq!(reply["id"], "cmpl-my-id");
}

#[tokio::test]
async fn metrics_count_what_was_done() {
    let worker = Worker::start(Role::Both).await;
    worker.complete(&greedy(&prompt(10, 20), 8)).await;
    for (name, value) in [
        ("colocate_decode_tokens_total", 8.0),
        ("colocate_prompt_tokens_total", 20.0),
        ("colocate_prefill_tokens_total", 20.0),
        ("colocate_time_to_first_token_seconds_count", 1.0),
        ("colocate_time_per_output_token_seconds_count", 1.0),
        ("colocate_kv_blocks_total", 600.0),
        ("colocate_requests_total{outcome=\"finished\"}", 1.0),
    ] {
        worker.until(name, value).await;
    }
    let steps = worker.metric("colocate_steps_total").await;
    let sum = worker
        .metric("colocate_distinct_experts_token_weighted_sum")
        .await;
    // A step of one row chooses top-k experts, and one of twenty rows at most all of them.
    assert!(
        steps >= 8.0 && (2.0 * 8.0..=8.0 * 8.0).contains(&sum),
        "{steps} steps, {sum}"
    );
    assert!(worker.metric("colocate_distinct_experts_count").await >= steps);
}

/// A request that runs for thousands of steps.
fn endless(seed: u64) -> Value {
    greedy(&prompt(seed, 8), 4000)
}

#[tokio::test]
async fn a_client_that_goes_away_ends_its_requests() {
    let worker = Worker::start(Role::Both).await;
    for streamed in [false, true] {
        let body = with(with(endless(11), "n", json!(2)), "stream", json!(streamed));
        let mut asking = Box::pin(worker.request(COMPLETIONS, &body).send());
        if streamed {
            let mut chunks = asking.await.unwrap().bytes_stream();
            chunks.next().await.unwrap().unwrap();
        } else {
            // The request is dropped as soon as the engine works on it.
            tokio::select! {
                reply = &mut asking => panic!("the request ended: {reply:?}"),
                () = worker.until_at_least("colocate_steps_total", 1.0) => {}
            }
            drop(asking);
        }
        worker.until_idle().await;
    }
    assert!(worker.metric("colocate_decode_tokens_total").await < 16_000.0);
    // The client that waited for a whole reply may have gone before its second completion began.
    worker
        .until_at_least("colocate_requests_total{outcome=\"cancelled\"}", 3.0)
        .await;
}

/// Asks for a stream, waits for its first chunk, shuts the worker down, and gives the tokens that came and whether the stream ended as it
/// should.
async fn stream_through_shutdown(worker: Worker, request: Value) -> (usize, bool) {
    let request = with(request, "stream", json!(true));
    let reply = worker.request(COMPLETIONS, &request).send().await.unwrap();
    let mut bytes = reply.bytes_stream();
    let mut parser = protocol::sse::Parser::default();
    let mut events = parser.push(&bytes.next().await.unwrap().unwrap()).unwrap();
    let reading = tokio::spawn(async move {
        while let Some(Ok(piece)) = bytes.next().await {
            events.extend(parser.push(&piece).unwrap());
        }
        let done = events.last().is_some_and(protocol::sse::Event::is_done);
        let tokens = events
            .iter()
            .filter(|event| event.data.contains("token_ids"));
        (tokens.count(), done)
    });
    worker.shutdown().await;
    reading.await.unwrap()
}

#[tokio::test]
async fn requests_that_run_at_shutdown_are_finished() {
    let worker = Worker::start(Role::Both).await;
    let request = greedy(&prompt(12, 8), 300);
    assert_eq!(stream_through_shutdown(worker, request).await, (300, true));
}

#[tokio::test]
async fn a_grace_period_ends() {
    let mut impatient = config(Role::Both);
    impatient.grace = Duration::ZERO;
    let worker = Worker::with(impatient).await;
    let (tokens, _) = stream_through_shutdown(worker, endless(13)).await;
    assert!(tokens < 4000, "{tokens}");
}
