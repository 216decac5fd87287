//! Clients that do not wait for the end: both workers hear of it, and nothing stays behind.

use std::time::Duration;

use futures::StreamExt;
use serde_json::json;

use crate::harness::{Gateway, completion, config, eventually};
use crate::peer::{Peer, Script};

#[tokio::test]
async fn during_the_prefill() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    prefill.script(Script::Hang);
    let body = completion(true);
    tokio::select! {
        _ = gateway.post("/v1/completions", &body) => panic!("nobody answers"),
        () = prefill.inner.arrived.notified() => {}
    }
    eventually("the prefill worker is told", async || {
        prefill.cancelled() == 1
    })
    .await;
    gateway.settled().await;
    assert!(decode.served().is_empty());
    eventually("booked", async || gateway.booked("499").await == 1.0).await;
}

#[tokio::test]
async fn while_the_reply_of_the_prefill_is_on_its_way() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    prefill.script(Script::Halting);
    prefill.hold_back();
    let body = completion(true);
    let head_has_come = async {
        prefill.inner.arrived.notified().await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    };
    tokio::select! {
        _ = gateway.post("/v1/completions", &body) => panic!("nobody answers"),
        () = head_has_come => {}
    }
    eventually("booked", async || gateway.booked("499").await == 1.0).await;
    prefill.let_pass(1);
    eventually("its blocks are given back", async || {
        prefill.released().len() == 1
    })
    .await;
    gateway.settled().await;
    assert!(decode.served().is_empty());
}

#[tokio::test]
async fn before_the_first_token() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    decode.script(Script::Hang);
    let body = completion(true);
    tokio::select! {
        _ = gateway.post("/v1/completions", &body) => panic!("nobody answers"),
        () = decode.inner.arrived.notified() => {}
    }
    eventually("the decode worker is told", async || {
        decode.cancelled() == 1
    })
    .await;
    eventually("the prefill worker is told", async || {
        prefill.released().len() == 1
    })
    .await;
    let params = &prefill.released()[0].body["kv_transfer_params"];
    assert_eq!(
        (&params["remote_engine_id"], &params["transport"]),
        (&json!("p"), &json!("colocate"))
    );
    assert_eq!(
        params["remote_request_id"],
        prefill.served()[0].headers["x-request-id"]
            .to_str()
            .unwrap()
    );
    gateway.settled().await;
}

#[tokio::test]
async fn in_the_middle_of_a_stream() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    decode.hold_back();
    decode.let_pass(2);
    let mut pieces = gateway
        .post("/v1/completions", &completion(true))
        .await
        .bytes_stream();
    pieces.next().await.unwrap().unwrap();
    drop(pieces);
    eventually("the decode worker is told", async || {
        decode.cancelled() == 1
    })
    .await;
    gateway.settled().await;
    assert_eq!(gateway.booked("499").await, 1.0);
    assert!(prefill.released().is_empty(), "its blocks were taken");
}

#[tokio::test]
async fn right_after_the_end_of_a_stream() {
    let (prefill, decode) = (Peer::start("p").await, Peer::start("d").await);
    let gateway = Gateway::start(config(&[&prefill], &[&decode])).await;
    decode.script(Script::Linger);
    let mut pieces = gateway
        .post("/v1/completions", &completion(true))
        .await
        .bytes_stream();
    let mut text = String::new();
    while !text.ends_with("data: [DONE]\n\n") {
        let piece = pieces.next().await.unwrap().unwrap();
        text.push_str(std::str::from_utf8(&piece).unwrap());
    }
    drop(pieces);
    gateway.settled().await;
    let booked = (gateway.booked("200").await, gateway.booked("499").await);
    assert_eq!(booked, (1.0, 0.0));
    let tpot = gateway
        .metric("colocate_gateway_tpot_seconds_count", &[])
        .await;
    assert_eq!(tpot, 1.0);
}

#[tokio::test]
async fn many_at_once_leave_nothing_behind() {
    let (prefill, one, two) = (
        Peer::start("p").await,
        Peer::start("d1").await,
        Peer::start("d2").await,
    );
    let gateway = Gateway::start(config(&[&prefill], &[&one, &two])).await;
    let body = completion(true);
    let clients = (0..60u64).map(|client| {
        let (gateway, body) = (&gateway, &body);
        async move {
            let ask = async {
                gateway
                    .post("/v1/completions", body)
                    .await
                    .text()
                    .await
                    .unwrap();
            };
            // Some go at once, some in between, some stay.
            let _ = tokio::time::timeout(Duration::from_millis(client * 3), ask).await;
        }
    });
    futures::future::join_all(clients).await;
    gateway.settled().await;
    assert_eq!(
        gateway.metric("colocate_gateway_failures_total", &[]).await,
        0.0
    );
}
