//! Workers that hang: their connections stay open, and nothing comes. Every timeout of a request is far longer than a test.

use futures::StreamExt;

use crate::harness::{Gateway, alert, completion, eventually, last_code, said};
use crate::peer::{Peer, Script};

/// Failures of requests that were given up because their worker fell silent.
async fn given_up(gateway: &Gateway, peer: &Peer) -> f64 {
    let labels = ["silent", &peer.addr.to_string()];
    gateway
        .metric("colocate_gateway_failures_total", &labels)
        .await
}

#[tokio::test]
async fn during_the_prefill_another_worker_is_tried() {
    let (one, two, decode) = (
        Peer::start("p1").await,
        Peer::start("p2").await,
        Peer::start("d").await,
    );
    let gateway = Gateway::start(alert(&[&one, &two], &[&decode])).await;
    one.script(Script::Hang);
    let body = completion(true);
    let falls = async {
        one.inner.arrived.notified().await;
        one.fall_silent();
    };
    let (response, ()) = tokio::join!(gateway.post("/v1/completions", &body), falls);
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["x-colocate-prefill"], two.base());
    assert_eq!(said(&response.text().await.unwrap()), "w0 w1 w2 w3 ");
    assert_eq!(given_up(&gateway, &one).await, 1.0);
    assert!(!gateway.is_up(&one).await);
    gateway.settled().await;
    eventually("it is told, should it wake", async || one.cancelled() == 1).await;
}

#[tokio::test]
async fn before_the_first_byte_of_decode_another_worker_is_tried() {
    for stream in [true, false] {
        let (prefill, one, two) = (
            Peer::start("p").await,
            Peer::start("d1").await,
            Peer::start("d2").await,
        );
        let gateway = Gateway::start(alert(&[&prefill], &[&one, &two])).await;
        one.script(Script::Hang);
        let body = completion(stream);
        let falls = async {
            one.inner.arrived.notified().await;
            one.fall_silent();
        };
        let (response, ()) = tokio::join!(gateway.post("/v1/completions", &body), falls);
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["x-colocate-decode"], two.base());
        assert_eq!(given_up(&gateway, &one).await, 1.0);
        // It may have taken the blocks.
        assert_eq!(prefill.served().len(), 2);
        gateway.settled().await;
        eventually("released", async || prefill.released().len() == 1).await;
    }
}

#[tokio::test]
async fn in_the_middle_of_a_stream_the_client_is_told() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(alert(&[&prefill], &[&decode])).await;
    decode.hold_back();
    decode.let_pass(2);
    let response = gateway.post("/v1/completions", &completion(true)).await;
    assert_eq!(response.status(), 200);
    decode.fall_silent();
    let text = response.text().await.unwrap();
    assert_eq!(said(&text), "w0 w1 ");
    assert_eq!(last_code(&text), "worker_down");
    assert_eq!(given_up(&gateway, &decode).await, 1.0);
    let booked = gateway.booked("503").await;
    assert_eq!(booked, 1.0);
    gateway.settled().await;
}

#[tokio::test]
async fn a_worker_that_is_going_down_may_finish_what_it_has() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(alert(&[&prefill], &[&decode])).await;
    decode.hold_back();
    decode.let_pass(1);
    let mut pieces = gateway
        .post("/v1/completions", &completion(true))
        .await
        .bytes_stream();
    let mut text = pieces.next().await.unwrap().unwrap().to_vec();
    *decode.inner.well.lock().unwrap() = false;
    eventually("down", async || !gateway.is_up(&decode).await).await;
    decode.let_pass(100);
    while let Some(piece) = pieces.next().await {
        text.extend_from_slice(&piece.unwrap());
    }
    assert_eq!(said(std::str::from_utf8(&text).unwrap()), "w0 w1 w2 w3 ");
    assert!(text.ends_with(b"data: [DONE]\n\n"));
    gateway.settled().await;
}
