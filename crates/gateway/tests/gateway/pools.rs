//! The pools as a whole: their models, their policies, and workers that must not be mixed.

use gateway::{Config, DecodePolicyName, GatewayError};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::harness::{Gateway, completion, config};
use crate::peer::Peer;

#[tokio::test]
async fn models_are_those_that_both_sides_serve() {
    let (prefill, one, two) = (
        Peer::start("p").await,
        Peer::start("d1").await,
        Peer::start("d2").await,
    );
    let gateway = Gateway::start(config(&[&prefill], &[&one, &two])).await;
    let (status, models) = gateway.get("/v1/models").await;
    assert_eq!(status, 200);
    assert_eq!(
        models,
        json!({"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "colocate"}]})
    );
    let (status, model) = gateway.get("/v1/models/m").await;
    assert_eq!((status, &model), (200, &models["data"][0]));
    for unknown in ["only-p", "a/b", "m/"] {
        let (status, error) = gateway.get(&format!("/v1/models/{unknown}")).await;
        assert_eq!(status, 404, "{unknown}");
        assert_eq!(error["error"]["code"], "model_not_found");
        assert_eq!(error["error"]["param"], "model");
    }
}

async fn refused(config: Config) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let ready = || panic!("it said that it serves");
    let error = gateway::serve(config, listener, ready, futures::future::pending())
        .await
        .unwrap_err();
    assert!(
        matches!(
            error,
            GatewayError::MixedWorkers { .. }
                | GatewayError::Policy(_)
                | GatewayError::NoWorkers(_)
        ),
        "{error}"
    );
    error.to_string()
}

#[tokio::test]
async fn embedded_and_other_workers_are_not_mixed() {
    let (embedded, vllm) = (
        Peer::start("e").await,
        Peer::custom("v", "vllm", None).await,
    );
    let message = refused(config(&[&vllm], &[&embedded])).await;
    assert!(
        message.contains("must not mix them") && message.contains(&embedded.base()),
        "{message}"
    );
    refused(config(&[&embedded], &[&embedded, &vllm])).await;
    refused(config(&[&embedded, &vllm], &[&vllm])).await;
    // A pool of the other kind alone is fine.
    let (one, two) = (
        Peer::custom("v1", "vllm", None).await,
        Peer::custom("v2", "vllm", None).await,
    );
    let gateway = Gateway::start(config(&[&one], &[&two])).await;
    assert_eq!(
        gateway
            .post("/v1/completions", &completion(false))
            .await
            .status(),
        200
    );
}

#[tokio::test]
async fn a_worker_of_the_other_kind_that_comes_later_is_left_out() {
    let (prefill, one, mut two) = (
        Peer::start("p").await,
        Peer::start("d").await,
        Peer::custom("v", "vllm", None).await,
    );
    two.stop();
    let gateway = Gateway::start(config(&[&prefill], &[&one, &two])).await;
    assert_eq!(gateway.get("/health").await.0, 200, "it has looked around");
    two.start_again().await;
    crate::harness::eventually("looked at", async || {
        let (_, health) = gateway.get("/health").await;
        health["decode"][1]["reason"]
            .as_str()
            .is_some_and(|reason| reason.contains("cannot exchange KV blocks"))
    })
    .await;
    assert!(!gateway.is_up(&two).await);
}

#[tokio::test]
async fn a_worker_that_did_not_say_its_kind_is_asked_again() {
    let (prefill, one, two) = (
        Peer::start("p").await,
        Peer::start("d").await,
        Peer::custom("v", "vllm", None).await,
    );
    *two.inner.lists.lock().unwrap() = false;
    let gateway = Gateway::start(config(&[&prefill], &[&one, &two])).await;
    crate::harness::eventually("up, of no kind", async || gateway.is_up(&two).await).await;
    *two.inner.lists.lock().unwrap() = true;
    crate::harness::eventually("left out", async || {
        let (_, health) = gateway.get("/health").await;
        health["decode"][1]["reason"]
            .as_str()
            .is_some_and(|reason| reason.contains("cannot exchange KV blocks"))
    })
    .await;
    assert!(gateway.is_up(&one).await && !gateway.is_up(&two).await);
}

#[tokio::test]
async fn parameters_of_another_transport_are_not_passed_on() {
    let (prefill, decode) = (
        Peer::custom("p", "colocate", None).await,
        Peer::start("d").await,
    );
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    let response = gateway.post("/v1/completions", &completion(false)).await;
    assert_eq!(response.status(), 502);
    assert!(
        response
            .text()
            .await
            .unwrap()
            .contains("KV blocks do not move between the two")
    );
    assert!(decode.served().is_empty());
}

#[tokio::test]
async fn locality_needs_a_map_and_pools_need_workers() {
    let peer = Peer::start("p").await;
    let mut config = config(&[&peer], &[&peer]);
    config.decode_policy = Some(DecodePolicyName::Locality);
    assert!(refused(config).await.contains("locality map"));
    assert!(
        refused(crate::harness::config(&[&peer], &[]))
            .await
            .contains("at least one decode worker")
    );
}

#[tokio::test]
async fn every_policy_of_load_serves_and_explains_itself() {
    for &policy in DecodePolicyName::ALL
        .iter()
        .filter(|&&policy| policy != DecodePolicyName::Locality)
    {
        let (prefill, one, two) = (
            Peer::start("p").await,
            Peer::start("d1").await,
            Peer::start("d2").await,
        );
        let mut config = config(&[&prefill], &[&one, &two]);
        config.decode_policy = Some(policy);
        let gateway = Gateway::start(config).await;
        for domain in ["law", "code", "law"] {
            let request = gateway
                .client
                .post(gateway.url("/v1/completions"))
                .header("x-colocate-domain", domain);
            let response = request
                .body(completion(false).to_string())
                .send()
                .await
                .unwrap();
            let reply: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
            assert_eq!(reply["choices"][0]["text"], "w0 w1 w2 w3 ", "{policy}");
        }
        let (_, workers) = gateway.get("/colocate/workers").await;
        let recent = workers["recent_decisions"].as_array().unwrap();
        assert_eq!(recent.len(), 3);
        assert_eq!(
            (&recent[0]["policy"], &recent[0]["loads"]),
            (&json!(policy.as_str()), &json!([0, 0]))
        );
        assert!(recent[0]["reason"].is_string() && recent[0]["request_id"].is_string());
        let (_, health) = gateway.get("/health").await;
        assert_eq!(health["decode_policy"], policy.as_str());
        assert_eq!(
            gateway
                .metric("colocate_gateway_decision_seconds_count", &["decode"])
                .await,
            3.0
        );
        gateway.settled().await;
    }
}
