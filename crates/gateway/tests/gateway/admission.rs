//! What the gateway refuses by itself, in OpenAI's shape.

use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};

use crate::harness::{Gateway, completion, config, eventually};
use crate::peer::Peer;

#[tokio::test]
async fn what_is_no_request_is_refused() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let mut config = config(&[&prefill], &[&decode]);
    config.max_body_bytes = 1000;
    let gateway = Gateway::start(config).await;
    let large = json!({"prompt": "x".repeat(1000)}).to_string();
    let check = async |method: &str, path: &str, body: &str, status: u16, part: &str| {
        let request = gateway
            .client
            .request(method.parse().unwrap(), gateway.url(path))
            .body(body.to_owned());
        let response = request.send().await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{method} {path} {body}");
        assert!(response.headers().contains_key("x-request-id"));
        let text = response.text().await.unwrap();
        let error: Value = serde_json::from_str(&text).unwrap();
        assert!(
            error["error"]["message"].as_str().unwrap().contains(part),
            "{text}"
        );
        for key in ["type", "param", "code"] {
            assert!(error["error"].get(key).is_some(), "{text}");
        }
    };
    check("POST", "/v1/completions", "{", 400, "not JSON").await;
    check("POST", "/v1/completions", "[]", 400, "a JSON object").await;
    check(
        "POST",
        "/v1/chat/completions",
        r#"{"messages":[],"stream":"yes"}"#,
        400,
        "`stream`",
    )
    .await;
    check(
        "POST",
        "/v1/completions",
        r#"{"prompt":["a","b"]}"#,
        400,
        "one request per prompt",
    )
    .await;
    check(
        "POST",
        "/v1/completions",
        &large,
        413,
        "larger than 1000 bytes",
    )
    .await;
    check("GET", "/v1/completions", "", 405, "does not answer GET").await;
    check("POST", "/v1/embeddings", "{}", 404, "/v1/embeddings").await;
    assert!(prefill.served().is_empty() && decode.served().is_empty());
    assert_eq!(
        gateway
            .metric(
                "colocate_gateway_requests_total",
                &["/v1/completions", "400"]
            )
            .await,
        3.0
    );
}

#[tokio::test]
async fn a_request_that_does_not_arrive_gives_its_place_up() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let mut config = config(&[&prefill], &[&decode]);
    config.timeouts.request = Duration::from_millis(100);
    let gateway = Gateway::start(config).await;
    let never = futures::stream::pending::<Result<Vec<u8>, std::convert::Infallible>>();
    let response = gateway
        .client
        .post(gateway.url("/v1/completions"))
        .body(reqwest::Body::wrap_stream(never))
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 408);
    let error: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "request_timeout");
}

#[tokio::test]
async fn decision_headers_can_be_left_out() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let mut config = config(&[&prefill], &[&decode]);
    config.decision_headers = false;
    let gateway = Gateway::start(config).await;
    for stream in [false, true] {
        let response = gateway.post("/v1/completions", &completion(stream)).await;
        assert!(
            response
                .headers()
                .keys()
                .all(|name| !name.as_str().starts_with("x-colocate"))
        );
    }
}

#[tokio::test]
async fn requests_in_flight_are_bounded() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let mut config = config(&[&prefill], &[&decode]);
    config.max_in_flight = 1;
    let gateway = Gateway::start(config).await;
    decode.hold_back();
    decode.let_pass(1);
    let mut pieces = gateway
        .post("/v1/completions", &completion(true))
        .await
        .bytes_stream();
    pieces.next().await.unwrap().unwrap();
    // The stream has begun and is not over: it keeps its place.
    let response = gateway
        .post("/v1/chat/completions", &completion(false))
        .await;
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], "1");
    let error: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "too_many_requests_in_flight");
    for key in ["message", "type", "param"] {
        assert!(error["error"].get(key).is_some(), "{error}");
    }
    assert_eq!(prefill.served().len(), 1, "the second went nowhere");
    let refused = gateway.booked("503").await;
    assert_eq!(refused, 1.0);
    // An operator is let in all the same.
    assert_eq!(gateway.get("/health").await.0, 200);
    decode.let_pass(100);
    while let Some(piece) = pieces.next().await {
        piece.unwrap();
    }
    for _ in 0..2 {
        eventually("there is a place again", async || {
            let response = gateway.post("/v1/completions", &completion(false)).await;
            response.status() == 200
        })
        .await;
    }
    gateway.settled().await;
}
