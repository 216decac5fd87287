//! Workers that fail, and what becomes of their requests.

use std::time::Duration;

use gateway::PrefillPolicyName;
use serde_json::{Value, json};

use crate::harness::{Gateway, blind, completion, config, eventually, last_code, said};
use crate::peer::{Peer, Script};

/// One prefill worker and two decode workers, the first of which fails: the client must not notice, and the request
/// must have been prefilled this often.
async fn survives(script: Script, prefills: usize) {
    for stream in [false, true] {
        let (prefill, one, two) = (
            Peer::start("p").await,
            Peer::start("d1").await,
            Peer::start("d2").await,
        );
        let gateway = Gateway::start(blind(&[&prefill], &[&one, &two])).await;
        one.script(script.clone());
        let response = gateway.post("/v1/completions", &completion(stream)).await;
        assert_eq!(response.status(), 200, "{script:?}");
        assert_eq!(response.headers()["x-colocate-decode"], two.base());
        let text = response.text().await.unwrap();
        assert!(if stream { said(&text) } else { text }.contains("w0 w1 w2 w3 "));
        assert_eq!(
            (
                prefill.served().len(),
                one.served().len(),
                two.served().len()
            ),
            (prefills, 1, 1)
        );
        gateway.settled().await;
        let failures = gateway
            .metric("colocate_gateway_failures_total", &[&one.addr.to_string()])
            .await;
        assert_eq!(failures, 1.0, "{script:?}");
        // The blocks of the first prefill are given back.
        eventually("released", async || {
            prefill.released().len() == prefills - 1
        })
        .await;
    }
}

#[tokio::test]
async fn a_decode_worker_that_fails_before_its_first_byte_is_replaced() {
    survives(Script::Refuse(500, "oops"), 2).await;
    survives(Script::Refuse(503, "shutting_down"), 2).await;
    survives(Script::Refuse(502, "kv_transfer_failed"), 2).await;
    survives(Script::Refuse(409, "kv_transfer_failed"), 2).await;
    survives(Script::Break, 2).await;
}

#[tokio::test]
async fn a_worker_that_never_stops_answering_is_replaced() {
    for (at_prefill, stream, content_type) in [
        (true, false, "application/json"),
        (false, false, "application/json"),
        (false, true, "text/event-stream"),
    ] {
        let (one, two) = (Peer::start("1").await, Peer::start("2").await);
        let (three, four) = (Peer::start("3").await, Peer::start("4").await);
        let mut config = blind(&[&one, &two], &[&three, &four]);
        config.prefill_policy = PrefillPolicyName::RoundRobin;
        config.max_reply_bytes = 100_000;
        let gateway = Gateway::start(config).await;
        let failing = if at_prefill { &one } else { &three };
        failing.script(Script::Endless(content_type));
        let response = gateway.post("/v1/completions", &completion(stream)).await;
        assert_eq!(response.status(), 200);
        let failures = gateway
            .metric("colocate_gateway_failures_total", &["bad_reply"])
            .await;
        assert_eq!(failures, 1.0);
        response.text().await.unwrap();
        gateway.settled().await;
    }
}

#[tokio::test]
async fn an_error_in_a_stream_is_booked_by_its_code() {
    for (code, status, kind) in [
        ("shutting_down", "503", "status"),
        ("kv_transfer_failed", "502", "kv_transfer"),
    ] {
        let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
        let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
        decode.script(Script::ErrorAfter(2, code));
        let text = gateway.stream().await;
        assert_eq!(said(&text), "w0 w1 ");
        // One error, the worker's own, and nothing after it.
        assert_eq!(last_code(&text), code);
        assert_eq!(text.matches("\"error\"").count(), 1);
        assert_eq!(gateway.booked(status).await, 1.0);
        let failures = gateway
            .metric("colocate_gateway_failures_total", &[kind])
            .await;
        assert_eq!(failures, 1.0);
        gateway.settled().await;
    }
}

#[tokio::test]
async fn an_error_as_the_first_event_is_not_the_clients() {
    let (prefill, one, two) = (
        Peer::start("p").await,
        Peer::start("d1").await,
        Peer::start("d2").await,
    );
    let gateway = Gateway::start(blind(&[&prefill], &[&one, &two])).await;
    one.script(Script::ErrorEvent("kv_transfer_failed"));
    let text = gateway.stream().await;
    assert_eq!(said(&text), "w0 w1 w2 w3 ");
    assert!(!text.contains("error"));
    assert_eq!(
        gateway
            .metric("colocate_gateway_failures_total", &["kv_transfer"])
            .await,
        1.0
    );
    gateway.settled().await;
}

#[tokio::test]
async fn a_lone_decode_worker_gets_a_second_chance() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(blind(&[&prefill], &[&decode])).await;
    decode.script(Script::Refuse(502, "kv_transfer_failed"));
    let arrived = async {
        decode.inner.arrived.notified().await;
        eventually("failed once", async || {
            gateway
                .metric("colocate_gateway_failures_total", &["kv_transfer"])
                .await
                >= 1.0
        })
        .await;
        decode.script(Script::Serve);
    };
    let body = completion(false);
    let (response, ()) = tokio::join!(gateway.post("/v1/completions", &body), arrived);
    // Either the script changed before the second try, or both failed: the client is told then.
    assert!([200, 502].contains(&response.status().as_u16()));
    assert_eq!((prefill.served().len(), decode.served().len()), (2, 2));
    gateway.settled().await;
}

#[tokio::test]
async fn retries_are_bounded_and_the_last_error_is_told() {
    let (prefill, one, two, three) = (
        Peer::start("p").await,
        Peer::start("d1").await,
        Peer::start("d2").await,
        Peer::start("d3").await,
    );
    let gateway = Gateway::start(blind(&[&prefill], &[&one, &two, &three])).await;
    for peer in [&one, &two, &three] {
        peer.script(Script::Refuse(500, "oops"));
    }
    let response = gateway.post("/v1/completions", &completion(true)).await;
    assert_eq!(response.status(), 500);
    let error: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
    assert_eq!(
        (&error["error"]["message"], &error["error"]["code"]),
        (&json!("scripted"), &json!("oops"))
    );
    assert_eq!(prefill.served().len(), 2);
    assert_eq!(
        one.served().len() + two.served().len() + three.served().len(),
        2
    );
    gateway.settled().await;
    eventually("released", async || prefill.released().len() == 2).await;
}

#[tokio::test]
async fn a_stream_that_breaks_says_so() {
    for script in [
        Script::BreakAfter(2),
        Script::EndAfter(2),
        Script::BreakInside(2),
    ] {
        let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
        let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
        decode.script(script);
        let response = gateway.post("/v1/completions", &completion(true)).await;
        assert_eq!(response.status(), 200);
        let text = response.text().await.unwrap();
        assert_eq!(said(&text), "w0 w1 ");
        assert_eq!(last_code(&text), "bad_upstream");
        assert!(text.contains("the connection to decode worker"), "{text}");
        gateway.settled().await;
        assert_eq!(gateway.booked("502").await, 1.0);
    }
}

#[tokio::test]
async fn a_worker_that_does_not_answer_in_time_is_given_up() {
    let (prefill, one, two) = (
        Peer::start("p").await,
        Peer::start("d1").await,
        Peer::start("d2").await,
    );
    let mut config = blind(&[&prefill], &[&one, &two]);
    config.timeouts.first_byte = Duration::from_millis(200);
    let gateway = Gateway::start(config).await;
    one.script(Script::Hang);
    two.script(Script::Hang);
    let response = gateway.post("/v1/completions", &completion(true)).await;
    assert_eq!(response.status(), 504);
    gateway.settled().await;
    eventually("both were told", async || {
        one.cancelled() == 1 && two.cancelled() == 1
    })
    .await;
    assert_eq!(
        gateway
            .metric("colocate_gateway_failures_total", &["timeout"])
            .await,
        1.0
    );
}

#[tokio::test]
async fn a_stream_that_stalls_is_ended() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let mut config = config(&[&prefill], &[&decode]);
    config.timeouts.between = Duration::from_millis(200);
    let gateway = Gateway::start(config).await;
    decode.hold_back();
    decode.let_pass(2);
    let text = gateway.stream().await;
    assert_eq!(said(&text), "w0 w1 ");
    assert_eq!(last_code(&text), "upstream_timeout");
    assert!(text.contains("did not answer within"), "{text}");
    gateway.settled().await;
    eventually("told", async || decode.cancelled() == 1).await;
}

#[tokio::test]
async fn a_prefill_worker_that_fails_is_replaced() {
    for script in [
        Script::Refuse(500, "oops"),
        // A worker for decoding among those for prefill.
        Script::Refuse(400, "kv_transfer_incompatible"),
        Script::Break,
        Script::NoParams,
        Script::Garbage,
    ] {
        let (one, two, decode) = (
            Peer::start("p1").await,
            Peer::start("p2").await,
            Peer::start("d").await,
        );
        let mut config = blind(&[&one, &two], &[&decode]);
        config.prefill_policy = PrefillPolicyName::RoundRobin;
        let gateway = Gateway::start(config).await;
        one.script(script.clone());
        let response = gateway.post("/v1/completions", &completion(false)).await;
        assert_eq!(response.status(), 200, "{script:?}");
        assert_eq!(response.headers()["x-colocate-prefill"], two.base());
        assert_eq!(
            gateway
                .metric("colocate_gateway_failures_total", &["prefill"])
                .await,
            1.0
        );
        gateway.settled().await;
    }
}

#[tokio::test]
async fn a_lone_prefill_worker_of_the_wrong_role_is_not_the_clients_fault() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(blind(&[&prefill], &[&decode])).await;
    prefill.script(Script::Refuse(400, "kv_transfer_incompatible"));
    let response = gateway.post("/v1/completions", &completion(false)).await;
    assert_eq!(response.status(), 502);
    gateway.settled().await;
}

#[tokio::test]
async fn a_prefill_that_was_cut_short_is_no_answer() {
    for reason in ["abort", "error"] {
        let (one, two, decode) = (
            Peer::start("p1").await,
            Peer::start("p2").await,
            Peer::start("d").await,
        );
        let mut config = blind(&[&one, &two], &[&decode]);
        config.prefill_policy = PrefillPolicyName::RoundRobin;
        let gateway = Gateway::start(config).await;
        one.script(Script::EndedBy(reason));
        let response = gateway.post("/v1/completions", &completion(false)).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["x-colocate-prefill"], two.base());
        assert!(response.text().await.unwrap().contains("w0 w1 w2 w3 "));
        eventually("released", async || one.released().len() == 1).await;
        gateway.settled().await;
    }
}

#[tokio::test]
async fn a_prefill_that_ended_by_itself_is_the_answer() {
    for reason in ["stop", "tool_calls", "content_filter", "function_call"] {
        let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
        let gateway = Gateway::start(blind(&[&prefill], &[&decode])).await;
        prefill.script(Script::EndedBy(reason));
        let response = gateway.post("/v1/completions", &completion(false)).await;
        assert_eq!(response.status(), 200);
        assert!(response.text().await.unwrap().contains(reason));
        assert!(decode.served().is_empty());
        eventually("released", async || prefill.released().len() == 1).await;
    }
}

#[tokio::test]
async fn a_worker_that_is_gone_is_passed_over_until_it_is_back() {
    let (prefill, mut one, two) = (
        Peer::start("p").await,
        Peer::start("d1").await,
        Peer::start("d2").await,
    );
    let mut config = config(&[&prefill], &[&one, &two]);
    config.timeouts.probe_interval = Duration::from_millis(20);
    let gateway = Gateway::start(config).await;
    assert_eq!(
        gateway
            .post("/v1/completions", &completion(false))
            .await
            .status(),
        200
    );
    one.stop();
    for _ in 0..4 {
        let response = gateway.post("/v1/completions", &completion(false)).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["x-colocate-decode"], two.base());
    }
    eventually("seen to be down", async || !gateway.is_up(&one).await).await;
    assert_eq!(gateway.get("/health").await.0, 200);
    one.start_again().await;
    eventually("seen to be back", async || gateway.is_up(&one).await).await;
    eventually("used again", async || {
        let response = gateway.post("/v1/completions", &completion(false)).await;
        response.headers()["x-colocate-decode"] == one.base()
    })
    .await;
    gateway.settled().await;
}

#[tokio::test]
async fn nobody_left_is_a_503() {
    let (prefill, mut decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(blind(&[&prefill], &[&decode])).await;
    assert_eq!(gateway.get("/health").await.0, 200);
    decode.stop();
    // The first request finds out, whichever way it does; from then on it is known.
    gateway.post("/v1/completions", &completion(false)).await;
    eventually("seen to be down", async || !gateway.is_up(&decode).await).await;
    let response = gateway.post("/v1/completions", &completion(true)).await;
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], "1");
    let body: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
    assert_eq!(body["error"]["code"], "no_worker_available");
    assert!(
        body["error"]["message"]
            .as_str()
            .unwrap()
            .starts_with("no decode worker is available")
    );
    let (status, health) = gateway.get("/health").await;
    assert_eq!((status, &health["status"]), (503, &json!("unavailable")));
    gateway.settled().await;
    // What was prefilled for nothing is given back.
    eventually("released", async || {
        prefill.released().len() == prefill.served().len()
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_is_not_well_gets_no_requests() {
    let (prefill, one, two) = (
        Peer::start("p").await,
        Peer::start("d1").await,
        Peer::start("d2").await,
    );
    let gateway = Gateway::start(config(&[&prefill], &[&one, &two])).await;
    *one.inner.well.lock().unwrap() = false;
    eventually("seen to be unwell", async || !gateway.is_up(&one).await).await;
    for _ in 0..3 {
        gateway.post("/v1/completions", &completion(false)).await;
    }
    assert!(one.served().is_empty());
    *one.inner.well.lock().unwrap() = true;
    eventually("seen to be well", async || gateway.is_up(&one).await).await;
}

#[tokio::test]
async fn a_refusal_is_passed_on_as_it_is() {
    let scripted = json!({"error": {"message": "scripted", "type": "server_error", "param": null, "code": "too_long"}});
    for at_prefill in [true, false] {
        let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
        let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
        let refusing = if at_prefill { &prefill } else { &decode };
        refusing.script(Script::Refuse(422, "too_long"));
        let response = gateway.post("/v1/completions", &completion(true)).await;
        assert_eq!(response.status(), 422);
        assert_eq!(response.text().await.unwrap(), scripted.to_string());
        assert_eq!(
            gateway.metric("colocate_gateway_failures_total", &[]).await,
            0.0
        );
        gateway.settled().await;
        let held = usize::from(!at_prefill);
        eventually("released", async || prefill.released().len() == held).await;
    }
}
