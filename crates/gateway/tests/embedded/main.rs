//! The gateway in front of real embedded workers with a small random model: what a client gets through it is what one
//! worker alone gives, under every policy, and nothing stays behind on any worker.

#![allow(clippy::unwrap_used)]

mod cluster;

use std::time::Duration;

use bytes::Bytes;
use cluster::{Cluster, Worker, eventually, text_of};
use experts::{CalibrationFile, CalibrationHeader, CalibrationRecord};
use futures::StreamExt;
use gateway::{DecodePolicyName, PrefillPolicyName};
use locality::{FitConfig, LocalityMap, MaskChoice, Transform};
use protocol::handoff::Extras;
use serde_json::{Value, json};

const DECODE_WORKERS: usize = 3;

fn prompts() -> Vec<String> {
    let long = "The quick brown fox jumps over the lazy dog. ".repeat(6);
    [
        "a",
        "fn main() { println!(\"hello\"); }",
        "The court finds for the plaintiff.",
        &long,
    ]
    .into_iter()
    .map(str::to_owned)
    // The same prompt again is a prefix hit; another that begins alike is a partial one.
    .chain([long.clone(), format!("{long}And again.")])
    .collect()
}

fn completion(prompt: &str, stream: bool) -> Value {
    json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": stream, "ignore_eos": true})
}

/// A map fitted to counts that the worker recorded.
async fn fitted(worker: &Worker, clusters: usize) -> LocalityMap {
    let mut records = Vec::new();
    for prompt in prompts() {
        let mut body = completion(&prompt, false);
        body["kv_transfer_params"] = json!({"colocate": {"want": ["output_counts"]}});
        let reply: Value =
            serde_json::from_str(&worker.post("/v1/completions", &body).await).unwrap();
        let extras = Extras::read(&reply["kv_transfer_params"]["colocate"]).unwrap();
        records.push(CalibrationRecord::new(extras.prompt_counts.unwrap(), None));
    }
    let header = CalibrationHeader::new("random", records[0].prompt.shape());
    let config = FitConfig {
        clusters,
        transform: Some(Transform::Count),
        mask: MaskChoice::All,
        ..FitConfig::default()
    };
    locality::fit(&CalibrationFile { header, records }, &config, &mut |_| {})
        .unwrap()
        .0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_tokens_of_one_worker_alone_under_every_policy() {
    let cluster = Cluster::start(DECODE_WORKERS).await;
    let mut alone = Vec::new();
    for prompt in prompts() {
        alone.push(text_of(
            &cluster
                .alone
                .post("/v1/completions", &completion(&prompt, false))
                .await,
        ));
    }
    let map = fitted(&cluster.alone, DECODE_WORKERS).await;
    for &policy in DecodePolicyName::ALL {
        let gateway = cluster
            .gateway(|config| {
                config.decode_policy = Some(policy);
                config.locality_map = (policy == DecodePolicyName::Locality).then(|| map.clone());
            })
            .await;
        let mut reasons = Vec::new();
        for stream in [false, true] {
            for (prompt, expected) in prompts().iter().zip(&alone) {
                let response = gateway
                    .post("/v1/completions", &completion(prompt, stream))
                    .await;
                assert_eq!(response.status(), 200);
                reasons.push(
                    response.headers()["x-colocate-reason"]
                        .to_str()
                        .unwrap()
                        .to_owned(),
                );
                assert_eq!(
                    &text_of(&response.text().await.unwrap()),
                    expected,
                    "{policy}, {prompt:?}"
                );
            }
        }
        if policy == DecodePolicyName::Locality {
            assert!(
                reasons
                    .iter()
                    .all(|reason| ["band", "nearest"].contains(&reason.as_str())),
                "{reasons:?}"
            );
        }
        gateway.settled().await;
    }
    cluster.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once_are_not_mixed_up() {
    let cluster = Cluster::start(2).await;
    let gateway = cluster
        .gateway(|config| config.decode_policy = Some(DecodePolicyName::LeastLoaded))
        .await;
    let bodies: Vec<Value> = (0..12)
        .map(|request| completion(&format!("Request number {request}: "), request % 2 == 0))
        .collect();
    let mut alone = Vec::new();
    for body in &bodies {
        alone.push(text_of(&cluster.alone.post("/v1/completions", body).await));
    }
    let asked = bodies.iter().map(|body| async {
        text_of(
            &gateway
                .post("/v1/completions", body)
                .await
                .text()
                .await
                .unwrap(),
        )
    });
    assert_eq!(futures::future::join_all(asked).await, alone);
    let (_, workers) = gateway.get("/colocate/workers").await;
    let placed: Vec<u64> = workers["decode"]
        .as_array()
        .unwrap()
        .iter()
        .map(|worker| worker["placed"].as_u64().unwrap())
        .collect();
    assert_eq!(placed.iter().sum::<u64>(), 12);
    assert!(placed.iter().all(|&placed| placed >= 3), "{placed:?}");
    gateway.settled().await;
    cluster.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chat_and_usage_are_those_of_the_request_as_a_whole() {
    let cluster = Cluster::start(1).await;
    let gateway = cluster.gateway(|_| {}).await;
    let body = json!({"messages": [{"role": "user", "content": "Hello, how are you today?"}], "max_tokens": 9, "temperature": 0, "ignore_eos": true});
    let alone: Value =
        serde_json::from_str(&cluster.alone.post("/v1/chat/completions", &body).await).unwrap();
    let through: Value = serde_json::from_str(
        &gateway
            .post("/v1/chat/completions", &body)
            .await
            .text()
            .await
            .unwrap(),
    )
    .unwrap();
    assert_eq!(through["choices"], alone["choices"]);
    assert_eq!(through["usage"], alone["usage"]);
    assert!(through.get("kv_transfer_params").is_none_or(Value::is_null));
    let mut stream = body.clone();
    stream["stream"] = json!(true);
    stream["stream_options"] = json!({"include_usage": true});
    let text = gateway
        .post("/v1/chat/completions", &stream)
        .await
        .text()
        .await
        .unwrap();
    assert_eq!(
        text_of(&text),
        alone["choices"][0]["message"]["content"].as_str().unwrap()
    );
    assert!(text.contains("\"prompt_tokens\"") && text.ends_with("data: [DONE]\n\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_map_for_another_number_of_workers_is_refitted() {
    let cluster = Cluster::start(2).await;
    let map = fitted(&cluster.alone, 4).await;
    let gateway = cluster
        .gateway(|config| config.locality_map = Some(map))
        .await;
    let (_, health) = gateway.get("/health").await;
    assert_eq!(health["decode_policy"], "locality");
    assert_eq!(
        (
            &health["locality_map"]["clusters"],
            &health["locality_map"]["refitted_from"]
        ),
        (&json!(2), &json!(4))
    );
    assert_eq!(health["locality_map"]["tau"], json!(0.1));
    let response = gateway
        .post("/v1/completions", &completion("fn main() {}", false))
        .await;
    assert!(
        ["band", "nearest"].contains(&response.headers()["x-colocate-reason"].to_str().unwrap())
    );
    let (_, workers) = gateway.get("/colocate/workers").await;
    let decision = &workers["recent_decisions"][0];
    assert_eq!(decision["similarities"].as_array().unwrap().len(), 2);
    assert_eq!(decision["coverage"], json!(1.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_is_forgotten_everywhere() {
    let cluster = Cluster::start(1).await;
    let gateway = cluster.gateway(|_| {}).await;
    let mut body = completion("Tell me a long story.", true);
    body["max_tokens"] = json!(3000);
    let mut pieces = gateway.post("/v1/completions", &body).await.bytes_stream();
    pieces.next().await.unwrap().unwrap();
    drop(pieces);
    gateway.settled().await;
    cluster.settled().await;
    // And one that leaves at any moment before.
    for wait in 0..400 {
        body["prompt"] = json!(format!("Client {wait} asks for a story."));
        let _ = tokio::time::timeout(
            Duration::from_micros(wait * 30),
            gateway.post("/v1/completions", &body),
        )
        .await;
    }
    gateway.settled().await;
    cluster.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_hangs_does_not_take_its_requests_with_it() {
    let mut cluster = Cluster::start(2).await;
    let reserve = cluster.alone.url();
    let gateway = cluster
        .gateway(|config| {
            config.prefill.push(reserve);
            config.prefill_policy = PrefillPolicyName::RoundRobin;
            config.decode_policy = Some(DecodePolicyName::RoundRobin);
            config.timeouts.probe = Duration::from_millis(300);
        })
        .await;
    let body = completion("Hello there", false);
    let expected = text_of(&cluster.alone.post("/v1/completions", &body).await);
    // In the middle of a stream.
    let mut long = completion("Tell me a long story.", true);
    long["max_tokens"] = json!(3000);
    let response = gateway.post("/v1/completions", &long).await;
    assert_eq!(
        response.headers()["x-colocate-decode"],
        cluster.decode[0].url().as_str().trim_end_matches('/')
    );
    let mut pieces = response.bytes_stream();
    pieces.next().await.unwrap().unwrap();
    cluster.decode[0].hang();
    let mut last = Bytes::new();
    while let Some(piece) = pieces.next().await {
        last = piece.unwrap();
    }
    assert!(
        last.ends_with(b"\"code\":\"worker_down\"}}\n\n"),
        "{last:?}"
    );
    cluster.decode[0].wake();
    gateway.settled().await;
    eventually("it is up again", async || {
        let (_, health) = gateway.get("/health").await;
        health["decode"][0]["healthy"] == json!(true)
    })
    .await;
    // Before the first byte, at either worker: round-robin comes by the one that hangs.
    for stream in [false, true] {
        cluster.decode[0].hang();
        cluster.prefill.hang();
        for _ in 0..2 {
            let response = gateway
                .post("/v1/completions", &completion("Hello there", stream))
                .await;
            assert_eq!(response.status(), 200);
            assert_eq!(text_of(&response.text().await.unwrap()), expected);
        }
        cluster.decode[0].wake();
        cluster.prefill.wake();
        eventually("both are up again", async || {
            let (_, health) = gateway.get("/health").await;
            [&health["prefill"][0], &health["decode"][0]]
                .iter()
                .all(|worker| worker["healthy"] == json!(true))
        })
        .await;
    }
    gateway.settled().await;
    cluster.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_goes_is_replaced_and_its_errors_are_passed_on() {
    let mut cluster = Cluster::start(2).await;
    let gateway = cluster
        .gateway(|config| config.decode_policy = Some(DecodePolicyName::RoundRobin))
        .await;
    let refused = gateway
        .post(
            "/v1/completions",
            &json!({"prompt": "x", "max_tokens": 100_000}),
        )
        .await;
    assert_eq!(refused.status(), 400);
    assert!(
        refused
            .text()
            .await
            .unwrap()
            .contains("context_length_exceeded")
    );
    let expected = text_of(
        &cluster
            .alone
            .post("/v1/completions", &completion("Hello", false))
            .await,
    );
    cluster.decode[0].stop();
    for stream in [false, true, false, true] {
        let response = gateway
            .post("/v1/completions", &completion("Hello", stream))
            .await;
        assert_eq!(response.status(), 200);
        assert_eq!(text_of(&response.text().await.unwrap()), expected);
    }
    cluster.decode[1].stop();
    eventually("nobody is left", async || {
        gateway
            .post("/v1/completions", &completion("Hello", false))
            .await
            .status()
            == 503
    })
    .await;
    assert_eq!(gateway.get("/health").await.0, 503);
    gateway.settled().await;
}
