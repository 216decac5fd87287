//! Embedded workers in this process, and gateways in front of them.

use std::net::SocketAddr;
use std::time::Duration;

use engine::testing::{RandomModel, write_random_checkpoint};
use gateway::{Config, GatewayError};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use worker::{Bound, Role};

/// Longer than anything here takes: only a failing test waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// One embedded worker, on a runtime of its own so that stopping it breaks its connections.
pub(crate) struct Worker {
    pub(crate) addr: SocketAddr,
    client: reqwest::Client,
    runtime: Option<Runtime>,
    /// While it hangs; dropped, it wakes up.
    hanging: Option<std::sync::mpsc::Sender<()>>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.wake();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Worker {
    async fn start(dir: &TempDir, role: Role) -> Self {
        let mut config = worker::Config::new(dir.path());
        config.served_model_name = Some("random".to_owned());
        config.role = role;
        // No block is freed by the end of its lease here.
        config.lease = Duration::from_secs(3600);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (send, bound) = tokio::sync::oneshot::channel::<Bound>();
        runtime.spawn(async move {
            let served = worker::serve(
                config,
                |bound| send.send(bound).unwrap(),
                futures::future::pending(),
            )
            .await;
            served.unwrap();
        });
        Self {
            addr: bound.await.unwrap().http,
            client: client(),
            runtime: Some(runtime),
            hanging: None,
        }
    }

    pub(crate) fn url(&self) -> gateway::Url {
        format!("http://{}", self.addr).parse().unwrap()
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> String {
        let request = self
            .client
            .post(format!("http://{}{path}", self.addr))
            .body(body.to_string());
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 200);
        response.text().await.unwrap()
    }

    /// Stops answering, as a process does that is stopped by a signal: its one thread for HTTP blocks, and its port is open.
    pub(crate) fn hang(&mut self) {
        let (hanging, wakes) = std::sync::mpsc::channel::<()>();
        self.hanging = Some(hanging);
        let runtime = self.runtime.as_ref().unwrap();
        runtime.spawn(async move {
            let _ = wakes.recv();
        });
    }

    pub(crate) fn wake(&mut self) {
        self.hanging = None;
    }

    pub(crate) fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)))
                .join()
                .unwrap();
        }
    }

    async fn metric(&self, name: &str) -> f64 {
        let text = self
            .client
            .get(format!("http://{}/metrics", self.addr))
            .send()
            .await
            .unwrap()
            .text()
            .await
            .unwrap();
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or_else(|| panic!("no {name} in:\n{text}"))
    }
}

fn client() -> reqwest::Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().no_proxy().build().unwrap()
}

/// One prefill worker, some decode workers, and one that serves alone, all with the same weights.
pub(crate) struct Cluster {
    pub(crate) alone: Worker,
    pub(crate) prefill: Worker,
    pub(crate) decode: Vec<Worker>,
    _dir: TempDir,
}

impl Cluster {
    pub(crate) async fn start(decode_workers: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_random_checkpoint(dir.path(), &RandomModel::default(), 7).unwrap();
        let mut decode = Vec::new();
        for _ in 0..decode_workers {
            decode.push(Worker::start(&dir, Role::Decode).await);
        }
        Self {
            alone: Worker::start(&dir, Role::Both).await,
            prefill: Worker::start(&dir, Role::Prefill).await,
            decode,
            _dir: dir,
        }
    }

    pub(crate) async fn gateway(&self, change: impl FnOnce(&mut Config)) -> Gateway {
        let mut config = Config::new(
            vec![self.prefill.url()],
            self.decode.iter().map(Worker::url).collect(),
        );
        config.timeouts.probe_interval = Duration::from_millis(100);
        change(&mut config);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let task = tokio::spawn(gateway::serve(
            config,
            listener,
            || (),
            futures::future::pending(),
        ));
        let gateway = Gateway {
            addr,
            client: client(),
            task,
        };
        eventually("the gateway is up", async || {
            gateway.get("/health").await.0 == 200
        })
        .await;
        gateway
    }

    /// Waits until no worker runs, holds or references anything.
    pub(crate) async fn settled(&self) {
        for worker in self.decode.iter().chain([&self.prefill, &self.alone]) {
            for name in [
                "colocate_requests_running",
                "colocate_requests_waiting",
                "colocate_kv_blocks_used",
                "colocate_kv_pins",
                "colocate_handoffs_held_now",
            ] {
                eventually(name, async || worker.metric(name).await == 0.0).await;
            }
        }
    }
}

/// A gateway that runs until it is dropped.
pub(crate) struct Gateway {
    addr: SocketAddr,
    client: reqwest::Client,
    task: JoinHandle<Result<(), GatewayError>>,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Gateway {
    pub(crate) async fn post(&self, path: &str, body: &Value) -> reqwest::Response {
        self.client
            .post(format!("http://{}{path}", self.addr))
            .body(body.to_string())
            .send()
            .await
            .unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        let response = self
            .client
            .get(format!("http://{}{path}", self.addr))
            .send()
            .await
            .unwrap();
        let status = response.status().as_u16();
        (
            status,
            serde_json::from_slice(&response.bytes().await.unwrap()).unwrap_or_default(),
        )
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

/// What a reply says, whole or streamed.
pub(crate) fn text_of(reply: &str) -> String {
    let of = |value: &Value| {
        let choice = &value["choices"][0];
        let text = choice["text"]
            .as_str()
            .or(choice["delta"]["content"].as_str());
        text.or(choice["message"]["content"].as_str())
            .unwrap_or_default()
            .to_owned()
    };
    if let Ok(whole) = serde_json::from_str::<Value>(reply) {
        return of(&whole);
    }
    let data = reply
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "));
    data.filter_map(|data| serde_json::from_str::<Value>(data).ok())
        .map(|chunk| of(&chunk))
        .collect()
}
