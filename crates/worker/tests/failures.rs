//! What can go wrong with a handoff is an error for that request alone, and strands no block on either side.

#![allow(clippy::unwrap_used)]

mod common;

use std::net::SocketAddr;
use std::time::Duration;

use common::{Worker, config, decode_request, greedy, prefill, prompt, token_ids, with};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use worker::Role;
use worker::transfer::wire::{self, Kind};

/// Points transfer parameters elsewhere.
fn at(request: &Value, address: SocketAddr) -> Value {
    let mut request = request.clone();
    request["kv_transfer_params"]["remote_host"] = json!(address.ip().to_string());
    request["kv_transfer_params"]["remote_port"] = json!(address.port());
    request
}

/// A peer that answers the first pull with `answer` and then closes.
async fn fake_peer(answer: Vec<u8>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let request = wire::read(&mut stream, wire::SMALL).await;
            if matches!(request, Ok((Kind::Pull, _))) {
                stream.write_all(&answer).await.unwrap();
            }
        }
    });
    address
}

fn frame(kind: Kind, payload: &[u8]) -> Vec<u8> {
    [&wire::header(kind, payload)[..], payload].concat()
}

/// What the sender really gives for a request.
async fn real_answer(request: &Value, blocks_of: &Worker, geometry: u64) -> Vec<u8> {
    let params = &request["kv_transfer_params"];
    let tokens: Vec<u32> = serde_json::from_value(request["prompt"].clone()).unwrap();
    let pull = wire::Pull {
        ticket: wire::Ticket {
            engine_id: params["remote_engine_id"].as_str().unwrap().into(),
            request_id: params["remote_request_id"].as_str().unwrap().into(),
        },
        prompt_digest: wire::prompt_digest(&tokens),
        prompt_tokens: tokens.len() as u32,
        geometry_digest: geometry,
        first_block: 0,
    };
    let mut stream = TcpStream::connect(blocks_of.bound.transfer).await.unwrap();
    wire::write(&mut stream, Kind::Pull, &pull.encode())
        .await
        .unwrap();
    let (kind, payload) = wire::read(&mut stream, 1 << 30).await.unwrap();
    assert_eq!(kind, Kind::Blocks);
    payload
}

/// The digest of the geometry that all workers here share.
fn geometry_digest() -> u64 {
    let model = engine::Model::load(common::model_dir(), &engine::LoadOptions::default()).unwrap();
    let engine =
        engine::Engine::new(std::sync::Arc::new(model), config(Role::Both).engine).unwrap();
    wire::geometry_digest(&engine.geometry())
}

#[tokio::test]
async fn damaged_transfers_fail_the_request_alone() {
    let (sender, receiver) = (
        Worker::start(Role::Prefill).await,
        Worker::start(Role::Decode).await,
    );
    let request = greedy(&prompt(1, 50), 5);
    let expected = token_ids(&Worker::start(Role::Both).await.complete(&request).await);
    let decode = decode_request(&request, &prefill(&sender, &request).await);
    let payload = real_answer(&decode, &sender, geometry_digest()).await;
    let good = frame(Kind::Blocks, &payload);

    let truncated = good[..good.len() / 2].to_vec();
    let header_only = good[..10].to_vec();
    let mut bad_checksum = good.clone();
    *bad_checksum.last_mut().unwrap() ^= 1;
    let mut huge = good.clone();
    huge[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut one_more = payload.clone();
    one_more.push(0);
    for (answer, code, reason) in [
        (truncated, "kv_transfer_failed", "short"),
        (header_only, "kv_transfer_failed", "short"),
        (bad_checksum, "kv_transfer_failed", "checksum"),
        (huge, "kv_transfer_failed", "length"),
        (
            frame(Kind::Blocks, &one_more),
            "kv_transfer_failed",
            "length",
        ),
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
            "kv_transfer_failed",
            "frame",
        ),
        (frame(Kind::Released, b""), "kv_transfer_failed", "frame"),
        (Vec::new(), "kv_transfer_failed", "short"),
    ] {
        let counter = format!("colocate_handoffs_failed_total{{reason=\"{reason}\"}}");
        let before = receiver.metric(&counter).await;
        let (status, error) = receiver
            .refused(&at(&decode, fake_peer(answer).await))
            .await;
        assert_eq!(
            (status, error["code"].as_str().unwrap()),
            (502, code),
            "{reason}: {error}"
        );
        assert_eq!(receiver.metric(&counter).await, before + 1.0, "{reason}");
    }
    // Payloads whose checksum is right and whose content is not: another geometry, a damaged signature row, a byte too few, nothing.
    let flipped = |at: usize| {
        let mut bytes = payload.clone();
        bytes[at] ^= 0x55;
        bytes
    };
    for (payload, expected) in [
        (flipped(12), (400, "kv_transfer_incompatible")),
        (flipped(92), (502, "kv_transfer_failed")),
        (
            payload[..payload.len() - 1].to_vec(),
            (502, "kv_transfer_failed"),
        ),
        (Vec::new(), (502, "kv_transfer_failed")),
    ] {
        let peer = fake_peer(frame(Kind::Blocks, &payload)).await;
        let (status, error) = receiver.refused(&at(&decode, peer)).await;
        assert_eq!(
            (status, error["code"].as_str().unwrap()),
            expected,
            "{error}"
        );
    }
    receiver.until_idle().await;

    // The blocks are still there, because nobody acknowledged them, and the request can be served.
    assert_eq!(token_ids(&receiver.complete(&decode).await), expected);
    sender.until_idle().await;
    receiver.until_idle().await;
}

#[tokio::test]
async fn a_peer_that_is_gone_or_silent_is_a_retriable_error() {
    let sender = Worker::start(Role::Prefill).await;
    let mut impatient = config(Role::Decode);
    impatient.transfer_timeout = Duration::from_millis(100);
    let receiver = Worker::with(impatient).await;
    let request = greedy(&prompt(2, 20), 5);
    let decode = decode_request(&request, &prefill(&sender, &request).await);

    let (status, error) = receiver
        .refused(&at(&decode, common::dead_address().await))
        .await;
    assert_eq!(
        (status, error["code"].as_str()),
        (502, Some("kv_transfer_failed")),
        "{error}"
    );

    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (status, error) = receiver
        .refused(&at(&decode, silent.local_addr().unwrap()))
        .await;
    assert_eq!(
        (status, error["code"].as_str()),
        (502, Some("kv_transfer_failed")),
        "{error}"
    );
    assert_eq!(
        receiver
            .metric("colocate_handoffs_failed_total{reason=\"timeout\"}")
            .await,
        1.0
    );
    receiver.until_idle().await;
}

#[tokio::test]
async fn an_expired_lease_frees_the_blocks_and_fails_the_late() {
    let mut short = config(Role::Prefill);
    short.lease = Duration::from_millis(50);
    let (sender, receiver) = (Worker::with(short).await, Worker::start(Role::Decode).await);
    let request = greedy(&prompt(3, 40), 5);
    let decode = decode_request(&request, &prefill(&sender, &request).await);
    sender.until("colocate_handoffs_expired_total", 1.0).await;
    let (status, error) = receiver.refused(&decode).await;
    assert_eq!(
        (status, error["code"].as_str()),
        (502, Some("kv_transfer_failed")),
        "{error}"
    );
    assert_eq!(
        receiver
            .metric("colocate_handoffs_failed_total{reason=\"not_held\"}")
            .await,
        1.0
    );
    sender.until_idle().await;
    receiver.until_idle().await;
}

#[tokio::test]
async fn blocks_can_be_pulled_once() {
    let (sender, receiver) = (
        Worker::start(Role::Prefill).await,
        Worker::start(Role::Decode).await,
    );
    let request = greedy(&prompt(4, 40), 5);
    let decode = decode_request(&request, &prefill(&sender, &request).await);
    receiver.complete(&decode).await;
    sender.until("colocate_handoffs_held_now", 0.0).await;
    let (status, error) = receiver.refused(&decode).await;
    assert_eq!(
        (status, error["code"].as_str()),
        (502, Some("kv_transfer_failed")),
        "{error}"
    );
    receiver.until_idle().await;
}

#[tokio::test]
async fn another_prompt_or_model_or_engine_is_refused() {
    let (sender, receiver) = (
        Worker::start(Role::Prefill).await,
        Worker::start(Role::Decode).await,
    );
    let mut other = config(Role::Decode);
    other.model_dir = common::other_model_dir().into();
    let other_model = Worker::with(other).await;
    let mut blocks = config(Role::Decode);
    blocks.engine.block_size = 32;
    let other_blocks = Worker::with(blocks).await;
    let tokens = prompt(5, 30);
    let request = greedy(&tokens, 5);

    let mut different = tokens.clone();
    different[29] += 1;
    let cases: [(&Worker, &[u32], u16, &str); 4] = [
        (&receiver, &tokens[..29], 400, "kv_transfer_incompatible"),
        (&receiver, &different, 400, "kv_transfer_incompatible"),
        (&other_model, &tokens, 400, "kv_transfer_incompatible"),
        (&other_blocks, &tokens, 400, "kv_transfer_incompatible"),
    ];
    for (worker, tokens, expected_status, code) in cases {
        let prefilled = prefill(&sender, &request).await;
        let decode = with(
            decode_request(&request, &prefilled),
            "prompt",
            json!(tokens),
        );
        let (status, error) = worker.refused(&decode).await;
        assert_eq!(
            (status, error["code"].as_str()),
            (expected_status, Some(code)),
            "{error}"
        );
        worker.until_idle().await;
        // Refused requests free the blocks at once.
        sender.until_idle().await;
    }
    let mut restarted = decode_request(&request, &prefill(&sender, &request).await);
    restarted["kv_transfer_params"]["remote_engine_id"] = json!("another");
    let (status, error) = receiver.refused(&restarted).await;
    assert_eq!(
        (status, error["code"].as_str()),
        (502, Some("kv_transfer_failed")),
        "{error}"
    );
    receiver.until_idle().await;
}

#[tokio::test]
async fn a_request_that_the_decode_worker_refuses_frees_the_prefill_side() {
    let (sender, receiver) = (
        Worker::start(Role::Prefill).await,
        Worker::start(Role::Decode).await,
    );
    let request = greedy(&prompt(6, 30), 5);
    for (key, value, expected) in [
        ("temperature", json!(-1), 400),
        ("max_tokens", json!(1_000_000), 400),
        ("model", json!("unknown"), 404),
        ("suffix", json!("x"), 400),
        ("top_p", json!("wide"), 400),
    ] {
        let decode = with(
            decode_request(&request, &prefill(&sender, &request).await),
            key,
            value,
        );
        assert_eq!(receiver.refused(&decode).await.0, expected, "{key}");
        sender.until_idle().await;
        receiver.until_idle().await;
    }
    assert_eq!(sender.metric("colocate_handoffs_expired_total").await, 0.0);
}

#[tokio::test]
async fn roles_are_kept() {
    let (sender, receiver) = (
        Worker::start(Role::Prefill).await,
        Worker::start(Role::Decode).await,
    );
    let request = greedy(&prompt(7, 20), 5);
    let prefill_request =
        common::as_value(&protocol::handoff::prefill_body(&common::as_body(&request)));
    let (status, error) = receiver.refused(&prefill_request).await;
    assert_eq!(
        (status, error["code"].as_str()),
        (400, Some("kv_transfer_incompatible")),
        "{error}"
    );
    let decode = decode_request(&request, &prefill(&sender, &request).await);
    let (status, error) = sender.refused(&decode).await;
    assert_eq!(
        (status, error["code"].as_str()),
        (400, Some("kv_transfer_incompatible")),
        "{error}"
    );
    sender.until_idle().await;

    // vLLM's parameters are not ours.
    let mut foreign = decode_request(&request, &prefill(&sender, &request).await);
    foreign["kv_transfer_params"]
        .as_object_mut()
        .unwrap()
        .remove("transport");
    let (status, error) = receiver.refused(&foreign).await;
    assert_eq!(
        (status, error["code"].as_str()),
        (400, Some("kv_transfer_incompatible")),
        "{error}"
    );
    assert!(error["message"].as_str().unwrap().contains("vLLM"));

    for (key, value) in [
        ("stream", json!(true)),
        ("max_tokens", json!(2)),
        ("prompt", json!([[5, 6], [7]])),
    ] {
        let wrong = with(prefill_request.clone(), key, value);
        assert_eq!(sender.refused(&wrong).await.0, 400, "{key}");
    }
    let both = with(
        request,
        "kv_transfer_params",
        json!({"do_remote_decode": true, "do_remote_prefill": true}),
    );
    assert_eq!(sender.refused(&both).await.0, 400);
}

#[tokio::test]
async fn a_peer_that_speaks_nonsense_does_not_disturb_the_sender() {
    let (sender, receiver) = (
        Worker::start(Role::Prefill).await,
        Worker::start(Role::Decode).await,
    );
    let request = greedy(&prompt(8, 20), 5);
    let decode = decode_request(&request, &prefill(&sender, &request).await);
    let mut huge = wire::header(Kind::Pull, b"").to_vec();
    huge[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    for nonsense in [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        huge,
        frame(Kind::Pull, b"short"),
        frame(Kind::Release, b"\xff\xff"),
        frame(Kind::Done, b""),
        b"CL".to_vec(),
    ] {
        let mut stream = TcpStream::connect(sender.bound.transfer).await.unwrap();
        stream.write_all(&nonsense).await.unwrap();
        stream.shutdown().await.unwrap();
        // The sender ends the connection by itself; a reset counts as an end.
        let _ = stream.read_to_end(&mut Vec::new()).await;
    }
    receiver.complete(&decode).await;
    sender.until_idle().await;
}

#[tokio::test]
async fn a_prefill_whose_client_goes_away_holds_nothing() {
    let mut slow = config(Role::Prefill);
    slow.engine.max_num_seqs = 1;
    slow.engine.max_batched_tokens = 1;
    let sender = Worker::with(slow).await;
    let request = greedy(&prompt(9, 400), 5);
    let prefill_request =
        common::as_value(&protocol::handoff::prefill_body(&common::as_body(&request)));
    let sending = tokio::spawn(sender.request("/v1/completions", &prefill_request).send());
    sender.until_at_least("colocate_steps_total", 1.0).await;
    sending.abort();
    sender.until_idle().await;
}

#[tokio::test]
async fn too_much_work_is_refused() {
    let mut config = config(Role::Both);
    config.engine.max_num_seqs = 1;
    config.engine.max_waiting = 1;
    let worker = Worker::with(config).await;
    let tokens = prompt(1, 4);
    for (prompts, n, param) in [(9, 128, "n"), (1025, 1, "prompt")] {
        let many = with(greedy(&tokens, 1), "prompt", json!(vec![&tokens; prompts]));
        let (status, error) = worker.refused(&with(many, "n", json!(n))).await;
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{error}");
    }
    // Many more than can run and wait, and each long enough that they meet.
    let (status, error) = worker
        .refused(&with(greedy(&tokens, 200), "n", json!(128)))
        .await;
    assert_eq!(status, 503, "{error}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("overloaded"), "{message}");
    worker.until_idle().await;
    worker.complete(&greedy(&tokens, 2)).await;
}

/// Status and error object of what a worker answers to these bytes.
async fn answer_to(worker: &Worker, head: &str, body: &[u8]) -> (u16, Value) {
    let mut stream = TcpStream::connect(worker.bound.http).await.unwrap();
    let head = format!("{head}\r\nHost: w\r\nConnection: close\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body).await.unwrap();
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).await.unwrap();
    let reply = String::from_utf8(reply).unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let reply: Value = serde_json::from_str(body).unwrap();
    (status, reply["error"].clone())
}

#[tokio::test]
async fn bad_bodies_and_methods_have_their_status() {
    let worker = Worker::start(Role::Both).await;
    let post = "POST /v1/completions HTTP/1.1";
    // A length that is not one, in the middle: what a body is like that breaks off.
    let broken = b"Transfer-Encoding: chunked\r\n\r\n4\r\n{\"a\"\r\nzz\r\n";
    let (status, error) = answer_to(&worker, post, broken).await;
    assert_eq!(status, 400, "{error}");
    assert_eq!(error["type"], "invalid_request_error");
    let long = common::client()
        .post(worker.url("/v1/completions"))
        .body(vec![b' '; (32 << 20) + 1]);
    // A client may see the connection close while it still sends.
    if let Ok(reply) = long.send().await {
        assert_eq!(reply.status().as_u16(), 413);
    }
    for (method, path) in [("GET", "/v1/completions"), ("DELETE", "/v1/models")] {
        let head = format!("{method} {path} HTTP/1.1");
        let (status, error) = answer_to(&worker, &head, b"\r\n").await;
        assert_eq!(status, 405, "{error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let (status, _) = answer_to(&worker, "GET /nothing HTTP/1.1", b"\r\n").await;
    assert_eq!(status, 404);
}
