//! The path of a request that nothing goes wrong with.

use experts::ModelShape;
use futures::StreamExt;
use protocol::handoff::Extras;
use serde_json::{Value, json};

use crate::harness::{Gateway, completion, config, events, eventually, last_code, said};
use crate::other_model::counts;
use crate::peer::{Peer, Script};

#[tokio::test]
async fn a_request_is_prefilled_here_and_decoded_there() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    *prefill.inner.extras.lock().unwrap() = Some(json!({"prompt_counts": "not counts"}));
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    let body = json!({"model": "m", "prompt": "one two three", "max_tokens": 4, "colocate_domain": "law", "x": {"y": [1]}});
    let response = gateway
        .client
        .post(gateway.url("/v1/completions"))
        .header("x-request-id", "mine-7")
        .body(body.to_string())
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["x-request-id"], "mine-7");
    assert_eq!(response.headers()["x-colocate-prefill"], prefill.base());
    assert_eq!(response.headers()["x-colocate-decode"], decode.base());
    assert_eq!(response.headers()["x-colocate-reason"], "turn");
    let reply: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
    assert_eq!(reply["choices"][0]["text"], "w0 w1 w2 w3 ");
    assert_eq!(reply["usage"]["prompt_tokens"], 3);

    let sent = &prefill.served()[0];
    assert_eq!(sent.headers["x-request-id"], "mine-7");
    assert_eq!(
        sent.body,
        json!({"model": "m", "prompt": "one two three", "max_tokens": 1, "x": {"y": [1]}, "min_tokens": 1, "stream": false,
            "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false}})
    );
    let sent = &decode.served()[0];
    assert_eq!(sent.headers["x-request-id"], "mine-7");
    assert_eq!(
        (&sent.body["max_tokens"], &sent.body["x"]),
        (&json!(4), &json!({"y": [1]}))
    );
    assert_eq!(sent.body.get("colocate_domain"), None);
    let params = &sent.body["kv_transfer_params"];
    assert_eq!(params["remote_engine_id"], "p");
    assert_eq!(params["unknown"], json!({"kept": [1.5]}));
    assert_eq!(params.get("colocate"), None, "our key is taken out");
    gateway.settled().await;
    assert!(prefill.released().is_empty());
    assert_eq!(
        gateway
            .metric("colocate_gateway_failures_total", &["bad_counts"])
            .await,
        1.0
    );
}

#[tokio::test]
async fn chunks_are_passed_on_as_they_come() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    decode.hold_back();
    decode.let_pass(1);
    let response = gateway.post("/v1/completions", &completion(true)).await;
    assert_eq!(
        response.headers()["content-type"],
        "text/event-stream; charset=utf-8"
    );
    let mut pieces = response.bytes_stream();
    // Each chunk arrives while the next is still held back: nothing waits for more.
    for token in 0..4 {
        let piece = pieces.next().await.unwrap().unwrap();
        assert_eq!(
            said(std::str::from_utf8(&piece).unwrap()),
            format!("w{token} ")
        );
        decode.let_pass(1);
    }
    // The usage, which the client did not ask for, is not passed on.
    decode.let_pass(1);
    assert_eq!(pieces.next().await.unwrap().unwrap(), "data: [DONE]\n\n");
    assert!(pieces.next().await.is_none());
    gateway.settled().await;
    assert_eq!(decode.cancelled(), 0);
    assert_eq!(
        gateway
            .metric("colocate_gateway_ttft_seconds_count", &[])
            .await,
        1.0
    );
    assert_eq!(
        gateway
            .metric("colocate_gateway_itl_seconds_count", &[])
            .await,
        3.0
    );
    assert_eq!(
        gateway
            .metric("colocate_gateway_tpot_seconds_count", &[])
            .await,
        1.0
    );
    assert_eq!(
        gateway
            .metric(
                "colocate_gateway_requests_total",
                &["/v1/completions", "\"200\""]
            )
            .await,
        1.0
    );
}

#[tokio::test]
async fn chat_is_served_alike_and_named_if_the_client_gives_no_name() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    for stream in [false, true] {
        let body = json!({"messages": [{"role": "user", "content": "hello there"}], "max_completion_tokens": 9, "max_tokens": 3,
            "stream": stream});
        let response = gateway.post("/v1/chat/completions", &body).await;
        let id = response.headers()["x-request-id"]
            .to_str()
            .unwrap()
            .to_owned();
        let text = response.text().await.unwrap();
        let content = if stream {
            said(&text)
        } else {
            let reply: Value = serde_json::from_str(&text).unwrap();
            reply["choices"][0]["message"]["content"]
                .as_str()
                .unwrap()
                .to_owned()
        };
        assert_eq!(content, "w0 w1 w2 ");
        let (first, then) = (
            prefill.served().pop().unwrap(),
            decode.served().pop().unwrap(),
        );
        assert_eq!(first.path, "/v1/chat/completions");
        assert_eq!(
            (
                first.headers["x-request-id"].clone(),
                then.headers["x-request-id"].clone()
            ),
            (id.parse().unwrap(), id.parse().unwrap())
        );
        assert_eq!(
            (
                &first.body["max_completion_tokens"],
                &then.body["max_completion_tokens"]
            ),
            (&json!(1), &json!(9))
        );
    }
    gateway.settled().await;
}

#[tokio::test]
async fn a_prefill_that_finished_is_the_answer() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    prefill.script(Script::Finished);
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    let reply: Value = serde_json::from_str(
        &gateway
            .post("/v1/completions", &completion(false))
            .await
            .text()
            .await
            .unwrap(),
    )
    .unwrap();
    assert_eq!(
        (
            &reply["choices"][0]["text"],
            &reply["choices"][0]["finish_reason"]
        ),
        (&json!("w0 "), &json!("stop"))
    );
    assert_eq!(reply.get("kv_transfer_params"), None);
    let mut body = completion(true);
    body["stream_options"] = json!({"include_usage": true});
    let response = gateway.post("/v1/completions", &body).await;
    assert_eq!(
        response.headers()["content-type"],
        "text/event-stream; charset=utf-8"
    );
    let events = events(&response.text().await.unwrap());
    assert_eq!(events.len(), 3);
    assert!(events[0].contains("\"text\":\"w0 \"") && events[1].contains("\"prompt_tokens\":3"));
    assert_eq!(events[2], "[DONE]");
    assert!(decode.served().is_empty());
    gateway.settled().await;
}

#[tokio::test]
async fn both_workers_must_have_counted_the_same_prompt() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    decode.script(Script::Miscounts(5));
    let response = gateway.post("/v1/completions", &completion(false)).await;
    assert_eq!(response.status(), 502);
    assert!(
        response
            .text()
            .await
            .unwrap()
            .contains("counted 3 prompt tokens")
    );

    // A stream is checked whether or not its client wants to see the usage.
    for wanted in [true, false] {
        let mut body = completion(true);
        body["stream_options"] = json!({"include_usage": wanted});
        let response = gateway.post("/v1/completions", &body).await;
        assert_eq!(response.status(), 200);
        let text = response.text().await.unwrap();
        assert_eq!(said(&text), "w0 w1 w2 w3 ");
        assert_eq!(last_code(&text), "token_counts_differ");
        assert!(text.contains("counted 3 prompt tokens"), "{text}");
    }
    gateway.settled().await;
    assert_eq!(
        gateway
            .metric("colocate_gateway_failures_total", &["tokens_differ"])
            .await,
        3.0
    );
}

#[tokio::test]
async fn usage_is_shown_to_who_asked_for_it() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    for (options, shown) in [
        (json!(null), false),
        (json!({"x": 1}), false),
        (json!({"include_usage": true}), true),
    ] {
        let mut body = completion(true);
        body["stream_options"] = options.clone();
        let text = gateway
            .post("/v1/completions", &body)
            .await
            .text()
            .await
            .unwrap();
        assert_eq!(said(&text), "w0 w1 w2 w3 ");
        assert_eq!(text.contains("\"usage\""), shown, "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"));
        let sent = &decode.served().pop().unwrap().body["stream_options"];
        assert_eq!(sent["include_usage"], true);
        assert_eq!(sent.get("x"), options.get("x"));
        assert_eq!(
            prefill.served().pop().unwrap().body.get("stream_options"),
            None
        );
    }
    gateway.settled().await;
}

#[tokio::test]
async fn a_prefill_reply_that_contradicts_itself_is_no_answer() {
    let extras = Extras {
        // Of eight tokens, where the prompt has three.
        prompt_counts: Some(counts(
            ModelShape {
                layers: 2,
                experts: 8,
                top_k: 2,
            },
            0,
        )),
        ..Extras::default()
    };
    for (script, extras) in [
        (Script::Serve, Some(extras.to_value())),
        (Script::Claims(4), None),
        (Script::Miscounts(4), Some(extras.to_value())),
    ] {
        let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
        let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
        prefill.script(script.clone());
        *prefill.inner.extras.lock().unwrap() = extras;
        let response = gateway.post("/v1/completions", &completion(false)).await;
        assert_eq!(response.status(), 502, "{script:?}");
        let error: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
        assert_eq!(error["error"]["code"], "token_counts_differ");
        assert!(decode.served().is_empty());
        let failures = gateway
            .metric("colocate_gateway_failures_total", &["contradiction"])
            .await;
        assert_eq!(failures, prefill.served().len() as f64);
        // What they hold for it is given back.
        eventually("released", async || {
            prefill.released().len() == prefill.served().len()
        })
        .await;
        gateway.settled().await;
    }
    // Numbers that agree are fine.
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    prefill.script(Script::Claims(3));
    let response = gateway.post("/v1/completions", &completion(false)).await;
    assert_eq!(response.status(), 200);
}

#[tokio::test]
async fn a_mismatch_in_the_piece_that_ends_a_stream_is_told() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    decode.script(Script::MiscountsAtOnce(5));
    decode.hold_back();
    decode.let_pass(1);
    let mut body = completion(true);
    body["stream_options"] = json!({"include_usage": true});
    let mut pieces = gateway.post("/v1/completions", &body).await.bytes_stream();
    pieces.next().await.unwrap().unwrap();
    decode.let_pass(1);
    let last = pieces.next().await.unwrap().unwrap();
    let last = std::str::from_utf8(&last).unwrap();
    assert!(last.contains("counted 3 prompt tokens"), "{last}");
    assert!(pieces.next().await.is_none());
    gateway.settled().await;
    assert_eq!(gateway.booked("502").await, 1.0);
}
