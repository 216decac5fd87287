//! Workers on loopback with a tiny random checkpoint, and clients that ask them.

#![allow(clippy::unwrap_used, dead_code, unreachable_pub)]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use protocol::sse::Parser;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use worker::{Bound, Config, Role};

/// The longest that anything here is waited for. Nothing is asserted about how long it takes.
pub const PATIENCE: Duration = Duration::from_secs(60);

static CHECKPOINT: LazyLock<tempfile::TempDir> = LazyLock::new(|| checkpoint(7));
static OTHER_CHECKPOINT: LazyLock<tempfile::TempDir> = LazyLock::new(|| checkpoint(8));

fn checkpoint(seed: u64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let shape = engine::testing::RandomModel::default();
    engine::testing::write_random_checkpoint(dir.path(), &shape, seed).unwrap();
    dir
}

/// The checkpoint that all workers serve unless told.
pub fn model_dir() -> &'static Path {
    CHECKPOINT.path()
}

/// A checkpoint of the same shape with other weights.
pub fn other_model_dir() -> &'static Path {
    OTHER_CHECKPOINT.path()
}

/// A worker that serves in this process.
pub struct Worker {
    pub bound: Bound,
    client: reqwest::Client,
    stop: Option<oneshot::Sender<()>>,
    served: tokio::task::JoinHandle<Result<(), worker::ServeError>>,
}

/// An HTTP client. It wants a TLS provider even where it speaks plain HTTP.
pub fn client() -> reqwest::Client {
    // Every test of the process wants one; the first installs it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::new()
}

/// The settings of a worker in these tests.
pub fn config(role: Role) -> Config {
    let mut config = Config::new(model_dir());
    config.served_model_name = Some("m".into());
    config.role = role;
    config.engine.num_blocks = 600;
    config.transfer_timeout = Duration::from_secs(5);
    config
}

impl Worker {
    pub async fn start(role: Role) -> Self {
        Self::with(config(role)).await
    }

    pub async fn with(config: Config) -> Self {
        let (stop, stopped) = oneshot::channel();
        let (bound, is_bound) = oneshot::channel();
        let served = tokio::spawn(worker::serve(config, |at| bound.send(at).unwrap(), async {
            let _ = stopped.await;
        }));
        let bound = match is_bound.await {
            Ok(bound) => bound,
            Err(_) => panic!("the worker ended: {:?}", served.await.unwrap()),
        };
        Self {
            bound,
            client: client(),
            stop: Some(stop),
            served,
        }
    }

    /// Asks it to go down, and waits.
    pub async fn shutdown(mut self) {
        self.stop.take().unwrap().send(()).unwrap();
        self.served.await.unwrap().unwrap();
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.bound.http)
    }

    pub fn request(&self, path: &str, body: &Value) -> reqwest::RequestBuilder {
        self.client.post(self.url(path)).body(body.to_string())
    }

    /// Status and JSON of a reply.
    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let reply = self.request(path, body).send().await.unwrap();
        let status = reply.status().as_u16();
        let text = reply.text().await.unwrap();
        (status, serde_json::from_str(&text).unwrap())
    }

    /// A completion that must succeed.
    pub async fn complete(&self, body: &Value) -> Value {
        let (status, reply) = self.post("/v1/completions", body).await;
        assert_eq!(status, 200, "{reply}");
        reply
    }

    /// A completion that must fail: status and error object.
    pub async fn refused(&self, body: &Value) -> (u16, Value) {
        let (status, reply) = self.post("/v1/completions", body).await;
        assert!(status >= 400, "{reply}");
        (status, reply["error"].clone())
    }

    /// The chunks of a stream, which must end as it should.
    pub async fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let reply = self.request(path, body).send().await.unwrap();
        assert_eq!(reply.status().as_u16(), 200);
        let bytes = reply.bytes().await.unwrap();
        let mut events = Parser::default().push(&bytes).unwrap();
        assert!(events.pop().unwrap().is_done());
        events
            .iter()
            .map(|event| serde_json::from_str(&event.data).unwrap())
            .collect()
    }

    pub async fn get(&self, path: &str) -> (u16, String) {
        let reply = self.client.get(self.url(path)).send().await.unwrap();
        (reply.status().as_u16(), reply.text().await.unwrap())
    }

    /// The value of a metric, by its whole name with labels; 0 where it is absent.
    pub async fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.get("/metrics").await;
        let line = text.lines().find(|line| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with(' '))
        });
        line.map_or(0.0, |line| {
            line.rsplit(' ').next().unwrap().parse().unwrap()
        })
    }

    /// Waits until a counter has reached a value.
    pub async fn until_at_least(&self, name: &str, wanted: f64) {
        let begin = Instant::now();
        while self.metric(name).await < wanted {
            assert!(begin.elapsed() < PATIENCE, "{name} never reached {wanted}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until a metric has a value.
    pub async fn until(&self, name: &str, wanted: f64) {
        let begin = Instant::now();
        loop {
            let value = self.metric(name).await;
            if value == wanted {
                return;
            }
            assert!(
                begin.elapsed() < PATIENCE,
                "{name} is {value}, and never became {wanted}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until nothing runs and nobody references a block: nothing is stranded.
    pub async fn until_idle(&self) {
        for name in [
            "colocate_requests_running",
            "colocate_requests_waiting",
            "colocate_handoffs_held_now",
            "colocate_kv_pins",
            "colocate_kv_blocks_used",
        ] {
            self.until(name, 0.0).await;
        }
        let count = |name: &'static str| async move {
            self.metric(&format!("colocate_handoffs_{name}_total"))
                .await
        };
        let ended = count("released").await + count("expired").await + count("aborted").await;
        assert_eq!(count("held").await, ended, "every held handoff ends once");
    }
}

/// A prompt of `tokens` pseudo-random token ids that begins like every other one of the same seed.
pub fn prompt(seed: u64, tokens: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let ids = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % 200) as u32 + 3
    });
    ids.take(tokens).collect()
}

/// A greedy request for `max_tokens` tokens that an end of sequence does not cut short.
pub fn greedy(prompt: &[u32], max_tokens: u32) -> Value {
    json!({
        "model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "return_token_ids": true,
    })
}

/// The same, sampled.
pub fn sampled(prompt: &[u32], max_tokens: u32, seed: i64) -> Value {
    let mut body = greedy(prompt, max_tokens);
    body["temperature"] = json!(0.9);
    body["top_p"] = json!(0.95);
    body["seed"] = json!(seed);
    body
}

pub fn with(mut body: Value, key: &str, value: Value) -> Value {
    body[key] = value;
    body
}

pub fn token_ids(reply: &Value) -> Vec<u64> {
    reply["choices"][0]["token_ids"]
        .as_array()
        .unwrap_or_else(|| panic!("no token ids in {reply}"))
        .iter()
        .map(|id| id.as_u64().unwrap())
        .collect()
}

pub fn as_body(value: &Value) -> protocol::Body {
    protocol::Body::parse(value.to_string().as_bytes()).unwrap()
}

pub fn as_value(body: &protocol::Body) -> Value {
    Value::Object(body.as_map().clone())
}

/// Sends the prefill half of a request: the whole reply.
pub async fn prefill(worker: &Worker, request: &Value) -> Value {
    worker
        .complete(&as_value(&protocol::handoff::prefill_body(&as_body(
            request,
        ))))
        .await
}

/// The request for the decode worker, given the prefill worker's reply.
pub fn decode_request(request: &Value, prefilled: &Value) -> Value {
    let params = protocol::TransferParams::of_reply(prefilled)
        .unwrap_or_else(|| panic!("no transfer parameters in {prefilled}"));
    as_value(&protocol::handoff::decode_body(&as_body(request), &params))
}

/// The prompt's expert counts in a reply.
pub fn prompt_counts(reply: &Value) -> experts::PromptCounts {
    let mut params = protocol::TransferParams::of_reply(reply).unwrap();
    let extras = params.take_extras().unwrap();
    let extras = protocol::handoff::Extras::read(&extras).unwrap();
    extras.prompt_counts.unwrap()
}

/// An address where nobody listens.
pub async fn dead_address() -> SocketAddr {
    tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
}
