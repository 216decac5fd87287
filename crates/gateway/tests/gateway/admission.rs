//! What the gateway refuses by itself, in OpenAI's shape.

use serde_json::{Value, json};

use crate::harness::{Gateway, completion, config};
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
