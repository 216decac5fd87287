//! A gateway under test, and how to talk to it.

use std::net::SocketAddr;
use std::time::Duration;

use gateway::{Config, DecodePolicyName, GatewayError, PrefillPolicyName};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::peer::Peer;

/// Longer than anything here takes: only a failing test waits for it.
const PATIENCE: Duration = Duration::from_secs(20);

/// A gateway that runs until it is dropped.
pub(crate) struct Gateway {
    pub(crate) addr: SocketAddr,
    pub(crate) client: reqwest::Client,
    task: JoinHandle<Result<(), GatewayError>>,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// In front of these peers, round-robin, with a health probe every 50 ms.
pub(crate) fn config(prefill: &[&Peer], decode: &[&Peer]) -> Config {
    let urls = |peers: &[&Peer]| peers.iter().map(|peer| peer.url()).collect();
    let mut config = Config::new(urls(prefill), urls(decode));
    config.decode_policy = Some(DecodePolicyName::RoundRobin);
    config.timeouts.probe_interval = Duration::from_millis(50);
    config
}

/// The same, with little patience for health probes.
pub(crate) fn alert(prefill: &[&Peer], decode: &[&Peer]) -> Config {
    let mut config = config(prefill, decode);
    config.prefill_policy = PrefillPolicyName::RoundRobin;
    config.timeouts.probe = Duration::from_millis(200);
    config
}

/// The same, but nobody looks at the workers' health after the start: only requests find out.
pub(crate) fn blind(prefill: &[&Peer], decode: &[&Peer]) -> Config {
    let mut config = config(prefill, decode);
    config.timeouts.probe_interval = Duration::from_secs(3600);
    config
}

impl Gateway {
    pub(crate) async fn start(config: Config) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let task = tokio::spawn(gateway::serve(
            config,
            listener,
            || (),
            futures::future::pending(),
        ));
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        Self { addr, client, task }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> reqwest::Response {
        self.client
            .post(self.url(path))
            .header("content-type", "application/json")
            .body(body.to_string())
            .send()
            .await
            .unwrap()
    }

    /// The whole text of a streamed completion.
    pub(crate) async fn stream(&self) -> String {
        let response = self.post("/v1/completions", &completion(true)).await;
        response.text().await.unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        let response = self.client.get(self.url(path)).send().await.unwrap();
        let status = response.status().as_u16();
        (
            status,
            serde_json::from_slice(&response.bytes().await.unwrap()).unwrap_or_default(),
        )
    }

    pub(crate) async fn metrics(&self) -> String {
        self.client
            .get(self.url("/metrics"))
            .send()
            .await
            .unwrap()
            .text()
            .await
            .unwrap()
    }

    /// The value of the first sample whose line begins like this and holds all of these.
    pub(crate) async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let text = self.metrics().await;
        let sample = text
            .lines()
            .filter(|line| line.starts_with(name))
            .find(|line| labels.iter().all(|label| line.contains(label)));
        sample.map_or(0.0, |line| {
            line.rsplit(' ').next().unwrap().parse().unwrap()
        })
    }

    /// How many requests ended with `status`.
    pub(crate) async fn booked(&self, status: &str) -> f64 {
        self.metric(
            "colocate_gateway_requests_total",
            &[&format!("\"{status}\"")],
        )
        .await
    }

    /// Waits until nothing is in flight any more.
    pub(crate) async fn settled(&self) {
        eventually("all in-flight counts are zero", async || {
            let (_, workers) = self.get("/colocate/workers").await;
            let all = ["prefill", "decode"]
                .into_iter()
                .flat_map(|side| workers[side].as_array().unwrap().clone());
            all.into_iter()
                .all(|worker| worker["in_flight"] == json!(0))
        })
        .await;
    }

    /// Whether a worker counts as up.
    pub(crate) async fn is_up(&self, peer: &Peer) -> bool {
        let (_, health) = self.get("/health").await;
        let all = ["prefill", "decode"]
            .into_iter()
            .flat_map(|side| health[side].as_array().unwrap().clone());
        all.into_iter()
            .any(|worker| worker["url"] == json!(peer.base()) && worker["healthy"] == json!(true))
    }
}

/// Waits until something holds.
pub(crate) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(
        tokio::time::timeout(PATIENCE, wait).await.is_ok(),
        "still not so: {what}"
    );
}

/// The code of the error that a stream ends with.
pub(crate) fn last_code(text: &str) -> String {
    let last: Value = serde_json::from_str(events(text).last().unwrap()).unwrap();
    for key in ["message", "type", "param", "code"] {
        assert!(last["error"].get(key).is_some(), "{last}");
    }
    last["error"]["code"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

pub(crate) fn completion(stream: bool) -> Value {
    json!({"model": "m", "prompt": "one two three", "max_tokens": 4, "stream": stream})
}

/// The data of every event of a stream.
pub(crate) fn events(text: &str) -> Vec<String> {
    text.split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "))
        .map(str::to_owned)
        .collect()
}

/// What all chunks of a stream say together.
pub(crate) fn said(text: &str) -> String {
    let chunks = events(text)
        .into_iter()
        .filter_map(|data| serde_json::from_str::<Value>(&data).ok());
    chunks
        .filter_map(|chunk| {
            let choice = &chunk["choices"][0];
            choice["text"]
                .as_str()
                .or(choice["delta"]["content"].as_str())
                .map(str::to_owned)
        })
        .collect()
}
