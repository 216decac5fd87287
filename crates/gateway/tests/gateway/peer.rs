//! A scripted peer: a worker's dialect without an engine. Its answers are what the script says.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use futures::StreamExt;
use gateway::Url;
use http::HeaderMap;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::{Notify, Semaphore};

/// How a peer answers an inference request.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) enum Script {
    /// As a worker should.
    #[default]
    Serve,
    /// With this status and error code.
    Refuse(u16, &'static str),
    /// Never.
    Hang,
    /// Breaks the connection instead.
    Break,
    /// With an error as the stream's first event.
    ErrorEvent(&'static str),
    /// With an error after this many chunks, and no proper end.
    ErrorAfter(usize, &'static str),
    /// Breaks the connection after this many chunks.
    BreakAfter(usize),
    /// Breaks the connection after this many chunks and half of another.
    BreakInside(usize),
    /// Ends the stream after this many chunks, without its proper end.
    EndAfter(usize),
    /// A prefill that finished with its first token.
    Finished,
    /// A prefill with parameters that ended for this reason.
    EndedBy(&'static str),
    /// A prefill without transfer parameters.
    NoParams,
    /// As it should, but having counted this many prompt tokens.
    Miscounts(u64),
    /// As it should, but the connection stays open after the stream's proper end.
    Linger,
    /// Like [`Script::Miscounts`], with all that follows the first chunk of a stream in one piece.
    MiscountsAtOnce(u64),
    /// With something that is no JSON.
    Garbage,
    /// A prefill whose parameters speak of this many tokens.
    Claims(u64),
    /// A prefill with the head of its reply at once and the rest at its pace.
    Halting,
    /// With a body that never ends, of this content type.
    Endless(&'static str),
}

/// A request that a peer was sent.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
}

/// What the test and the peer share.
pub(crate) struct Inner {
    pub(crate) name: String,
    pub(crate) owner: &'static str,
    pub(crate) transport: Option<&'static str>,
    pub(crate) script: Mutex<Script>,
    pub(crate) well: Mutex<bool>,
    /// Whether its health probes go unanswered.
    pub(crate) silent: AtomicBool,
    /// Whether it lists its models.
    pub(crate) lists: Mutex<bool>,
    pub(crate) seen: Mutex<Vec<Seen>>,
    /// Told at every request that comes.
    pub(crate) arrived: Notify,
    /// Requests whose connection went before their answer was complete.
    pub(crate) cancelled: AtomicUsize,
    /// One permit per streamed chunk; plenty unless a test takes them away.
    pub(crate) pace: Semaphore,
    /// The value of our key in a prefill's parameters.
    pub(crate) extras: Mutex<Option<Value>>,
}

/// A peer that runs until it is dropped or stopped.
pub(crate) struct Peer {
    pub(crate) inner: Arc<Inner>,
    pub(crate) addr: SocketAddr,
    /// Its own, so that stopping it breaks every connection, as the end of a process does.
    runtime: Option<Runtime>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Peer {
    pub(crate) async fn start(name: &str) -> Self {
        Self::custom(name, "colocate", Some("colocate")).await
    }

    pub(crate) async fn custom(
        name: &str,
        owner: &'static str,
        transport: Option<&'static str>,
    ) -> Self {
        let inner = Arc::new(Inner {
            name: name.to_owned(),
            owner,
            transport,
            script: Mutex::default(),
            well: Mutex::new(true),
            silent: AtomicBool::new(false),
            lists: Mutex::new(true),
            seen: Mutex::default(),
            arrived: Notify::new(),
            cancelled: AtomicUsize::new(0),
            pace: Semaphore::new(100_000),
            extras: Mutex::default(),
        });
        Self::on(inner, "127.0.0.1:0".parse().unwrap()).await
    }

    async fn on(inner: Arc<Inner>, addr: SocketAddr) -> Self {
        let router = Router::new()
            .route("/health", get(health))
            .route("/v1/models", get(models))
            .route("/v1/completions", post(infer))
            .route("/v1/chat/completions", post(infer))
            .route("/colocate/release", post(release))
            .with_state(Arc::clone(&inner));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (bound, is_bound) = tokio::sync::oneshot::channel();
        runtime.spawn(async move {
            let listener = TcpListener::bind(addr).await.unwrap();
            bound.send(listener.local_addr().unwrap()).unwrap();
            axum::serve(listener, router).await.unwrap();
        });
        Self {
            inner,
            addr: is_bound.await.unwrap(),
            runtime: Some(runtime),
        }
    }

    pub(crate) fn url(&self) -> Url {
        format!("http://{}", self.addr).parse().unwrap()
    }

    pub(crate) fn base(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub(crate) fn script(&self, script: Script) {
        *self.inner.script.lock().unwrap() = script;
    }

    /// Inference requests so far.
    pub(crate) fn served(&self) -> Vec<Seen> {
        let seen = self.inner.seen.lock().unwrap();
        seen.iter()
            .filter(|seen| seen.path.starts_with("/v1/"))
            .cloned()
            .collect()
    }

    pub(crate) fn released(&self) -> Vec<Seen> {
        let seen = self.inner.seen.lock().unwrap();
        seen.iter()
            .filter(|seen| seen.path == "/colocate/release")
            .cloned()
            .collect()
    }

    /// Leaves its health probes without an answer.
    pub(crate) fn fall_silent(&self) {
        self.inner.silent.store(true, Ordering::SeqCst);
    }

    pub(crate) fn cancelled(&self) -> usize {
        self.inner.cancelled.load(Ordering::SeqCst)
    }

    /// Takes the pace into the test's hands: no chunk without [`Peer::let_pass`].
    pub(crate) fn hold_back(&self) {
        self.inner.pace.forget_permits(100_000);
    }

    pub(crate) fn let_pass(&self, chunks: usize) {
        self.inner.pace.add_permits(chunks);
    }

    /// Breaks all connections and closes the port, and returns when that is done.
    pub(crate) fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Not from a thread that runs tasks itself.
            std::thread::spawn(move || runtime.shutdown_timeout(std::time::Duration::from_secs(5)))
                .join()
                .unwrap();
        }
    }

    /// The same peer again, on the same port.
    pub(crate) async fn start_again(&mut self) {
        *self = Self::on(Arc::clone(&self.inner), self.addr).await;
    }
}

/// Counts an answer that was given up by the other side.
struct Watch {
    inner: Arc<Inner>,
    complete: bool,
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.complete {
            self.inner.cancelled.fetch_add(1, Ordering::SeqCst);
        }
    }
}

async fn health(peer: State<Arc<Inner>>) -> Response {
    if peer.silent.load(Ordering::SeqCst) {
        futures::future::pending::<()>().await;
    }
    let well = *peer.well.lock().unwrap();
    reply(if well { 200 } else { 503 }, &json!({}))
}

async fn models(peer: State<Arc<Inner>>) -> Response {
    if !*peer.lists.lock().unwrap() {
        return error(500, "oops");
    }
    let card =
        |id: &str| json!({"id": id, "object": "model", "created": 1, "owned_by": peer.owner});
    reply(
        200,
        &json!({"object": "list", "data": [card("m"), card(&format!("only-{}", peer.name))]}),
    )
}

async fn release(peer: State<Arc<Inner>>, request: Request) -> Response {
    note(&peer, request).await;
    reply(200, &json!({}))
}

async fn note(peer: &Inner, request: Request) -> Seen {
    let (parts, body) = request.into_parts();
    let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let seen = Seen {
        path: parts.uri.path().to_owned(),
        headers: parts.headers,
        body: serde_json::from_slice(&bytes).unwrap(),
    };
    peer.seen.lock().unwrap().push(seen.clone());
    peer.arrived.notify_one();
    seen
}

fn reply(status: u16, body: &Value) -> Response {
    Response::builder()
        .status(status)
        .header("content-type", "application/json")
        .body(Body::from(body.to_string()))
        .unwrap()
}

fn error(status: u16, code: &str) -> Response {
    reply(
        status,
        &json!({"error": {"message": "scripted", "type": "server_error", "param": null, "code": code}}),
    )
}

/// A body of comments without end.
fn endless(content_type: &str) -> Response {
    let pieces = futures::stream::repeat_with(|| Ok::<_, Infallible>(": x\n\n".repeat(100)));
    Response::builder()
        .header("content-type", content_type)
        .body(Body::from_stream(pieces))
        .unwrap()
}

/// A body that breaks the connection where it would go on.
fn broken(start: Vec<String>) -> Response {
    let breaks = futures::stream::once(async {
        // Lets the server write out what it has.
        tokio::task::yield_now().await;
        Err(std::io::Error::other("scripted"))
    });
    let pieces = futures::stream::iter(start.into_iter().map(Ok)).chain(breaks);
    Response::builder()
        .header("content-type", "text/event-stream")
        .body(Body::from_stream(pieces))
        .unwrap()
}

async fn infer(State(peer): State<Arc<Inner>>, request: Request) -> Response {
    let mut watch = Watch {
        inner: Arc::clone(&peer),
        complete: false,
    };
    let seen = note(&peer, request).await;
    let script = peer.script.lock().unwrap().clone();
    let params = seen
        .body
        .get("kv_transfer_params")
        .cloned()
        .unwrap_or_default();
    let is_prefill = params["do_remote_decode"] == json!(true);
    if script == Script::Hang {
        futures::future::pending::<()>().await;
    }
    watch.complete = true;
    match script {
        Script::Refuse(status, code) => return error(status, code),
        Script::Break => return broken(Vec::new()),
        Script::Garbage => return Response::new(Body::from("<html>")),
        Script::Endless(content_type) => return endless(content_type),
        _ => {}
    }
    if is_prefill {
        prefill(&peer, &seen, &script)
    } else {
        decode(&peer, &seen, &script)
    }
}

/// A word is a token.
fn words(body: &Value) -> u64 {
    let text = body["prompt"]
        .as_str()
        .map_or_else(|| body["messages"].to_string(), str::to_owned);
    text.split_whitespace().count() as u64
}

fn is_chat(seen: &Seen) -> bool {
    seen.path.ends_with("chat/completions")
}

fn whole(seen: &Seen, text: &str, finish: &str, prompt_tokens: u64, tokens: usize) -> Value {
    let (object, choice) = if is_chat(seen) {
        (
            "chat.completion",
            json!({"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}),
        )
    } else {
        (
            "text_completion",
            json!({"index": 0, "text": text, "finish_reason": finish}),
        )
    };
    json!({
        "id": "cmpl-1", "object": object, "created": 1, "model": "m", "choices": [choice],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens as u64},
        "kv_transfer_params": null,
    })
}

fn prefill(peer: &Arc<Inner>, seen: &Seen, script: &Script) -> Response {
    let prompt_tokens = if let Script::Miscounts(tokens) = script {
        *tokens
    } else {
        words(&seen.body)
    };
    let finish = match script {
        Script::Finished => "stop",
        Script::EndedBy(reason) => reason,
        _ => "length",
    };
    let mut value = whole(seen, "w0 ", finish, prompt_tokens, 1);
    if !matches!(script, Script::Finished | Script::NoParams) {
        let mut params = json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2]],
            "remote_engine_id": peer.name, "remote_request_id": seen.headers["x-request-id"].to_str().unwrap(),
            "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1, "transfer_mode": "pull", "unknown": {"kept": [1.5]},
        });
        if let Some(transport) = peer.transport {
            params["transport"] = json!(transport);
        }
        if let Script::Claims(tokens) = script {
            params["remote_num_tokens"] = json!(tokens);
        }
        if let Some(extras) = peer.extras.lock().unwrap().clone() {
            params["colocate"] = extras;
        }
        value["kv_transfer_params"] = params;
    }
    if *script == Script::Halting {
        let (peer, text) = (Arc::clone(peer), value.to_string());
        let rest = futures::stream::once(async move {
            peer.pace.acquire().await.unwrap().forget();
            Ok::<_, Infallible>(text)
        });
        // Blanks may stand before JSON.
        let start = futures::stream::iter([Ok(" ".to_owned())]);
        return Response::new(Body::from_stream(start.chain(rest)));
    }
    reply(200, &value)
}

fn error_event(code: &str) -> String {
    let error = json!({"message": "scripted", "type": "server_error", "param": null, "code": code});
    format!("data: {}\n\n", json!({"error": error}))
}

fn decode(peer: &Arc<Inner>, seen: &Seen, script: &Script) -> Response {
    let tokens = seen.body["max_tokens"].as_u64().unwrap_or(4) as usize;
    let prompt_tokens = match script {
        Script::Miscounts(tokens) | Script::MiscountsAtOnce(tokens) => *tokens,
        _ => words(&seen.body),
    };
    let texts: Vec<String> = (0..tokens).map(|token| format!("w{token} ")).collect();
    if seen.body["stream"] != json!(true) {
        return reply(
            200,
            &whole(seen, &texts.concat(), "length", prompt_tokens, tokens),
        );
    }
    let chunk = |choices: Value| json!({"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": choices});
    let mut events: Vec<String> = texts
        .iter()
        .map(|text| {
            let choice = if is_chat(seen) {
                json!({"index": 0, "delta": {"content": text}})
            } else {
                json!({"index": 0, "text": text})
            };
            format!("data: {}\n\n", chunk(json!([choice])))
        })
        .collect();
    if seen.body["stream_options"]["include_usage"] == json!(true) {
        let mut last = chunk(json!([]));
        last["usage"] = json!({"prompt_tokens": prompt_tokens, "completion_tokens": tokens});
        events.push(format!("data: {last}\n\n"));
    }
    events.push("data: [DONE]\n\n".to_owned());
    match script {
        Script::ErrorEvent(code) => events = vec![error_event(code)],
        Script::ErrorAfter(chunks, code) => {
            events.truncate(*chunks);
            events.push(error_event(code));
        }
        Script::BreakInside(chunks) => {
            events.truncate(*chunks + 1);
            let half = events[*chunks].len() / 2;
            events[*chunks].truncate(half);
            return broken(events);
        }
        Script::BreakAfter(chunks) => return broken(events.into_iter().take(*chunks).collect()),
        Script::MiscountsAtOnce(_) => events = vec![events[0].clone(), events[1..].concat()],
        Script::EndAfter(chunks) => events.truncate(*chunks),
        _ => {}
    }
    let state = (
        Watch {
            inner: Arc::clone(peer),
            complete: false,
        },
        events.into_iter(),
    );
    let pieces = futures::stream::unfold(state, |(mut watch, mut events)| async move {
        let event = events.next()?;
        let inner = Arc::clone(&watch.inner);
        inner.pace.acquire().await.unwrap().forget();
        watch.complete = events.len() == 0;
        Some((Ok::<_, Infallible>(event), (watch, events)))
    });
    let body = if *script == Script::Linger {
        Body::from_stream(pieces.chain(futures::stream::pending()))
    } else {
        Body::from_stream(pieces)
    };
    Response::builder()
        .header("content-type", "text/event-stream")
        .body(body)
        .unwrap()
}
