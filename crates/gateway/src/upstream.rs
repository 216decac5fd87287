//! One request to one worker, and what can become of it.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt};
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use protocol::ApiError;

use crate::config::Timeouts;
use crate::errors::GatewayError;
use crate::registry::Worker;

/// A worker's whole reply.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) content_type: Option<HeaderValue>,
    pub(crate) body: Bytes,
}

/// Why a worker could not serve a request.
#[derive(Debug)]
pub(crate) enum Failure {
    /// No connection: the request never got there.
    Connect {
        why: String,
        /// Nobody refused it either.
        timed_out: bool,
    },
    /// No answer in time.
    Timeout(Duration),
    /// The worker fell silent while it had the request.
    Silent(String),
    /// The connection broke.
    Transport(String),
    /// A status that blames the worker, or an error in place of a stream's first event.
    Status(ApiError),
    /// An answer that cannot be understood.
    BadReply(String),
    /// A prefill reply whose parts speak of different prompts.
    Contradiction(String),
    /// Prefill and decode worker counted different prompts.
    TokensDiffer { prefill: u64, decode: u64 },
}

impl Failure {
    /// The kind as metrics call it.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Connect { .. } => "connect",
            Self::Timeout(_) => "timeout",
            Self::Silent(_) => "silent",
            Self::Transport(_) => "transport",
            Self::Status(error) if error.is_transfer_failure() => "kv_transfer",
            Self::Status(_) => "status",
            Self::BadReply(_) => "bad_reply",
            Self::Contradiction(_) => "contradiction",
            Self::TokensDiffer { .. } => "tokens_differ",
        }
    }

    /// What the client is told if nobody else can serve the request.
    pub(crate) fn to_api_error(&self, worker: &Worker) -> ApiError {
        let who = format!("{} worker {}", worker.side, worker.name);
        match self {
            Self::Connect { why, .. } => {
                ApiError::unavailable(format!("{who} cannot be reached: {why}"))
                    .with_code(ApiError::WORKER_DOWN)
            }
            Self::Silent(why) => ApiError::unavailable(format!("{who} went down: {why}"))
                .with_code(ApiError::WORKER_DOWN),
            Self::Timeout(after) => {
                ApiError::timeout(format!("{who} did not answer within {after:?}"))
            }
            Self::Transport(why) => {
                ApiError::bad_upstream(format!("the connection to {who} broke: {why}"))
            }
            Self::Status(error) => error.clone(),
            Self::BadReply(why) => {
                ApiError::bad_upstream(format!("{who} answered what cannot be passed on: {why}"))
            }
            Self::Contradiction(what) => {
                ApiError::bad_upstream(format!("{who} contradicts itself: {what}"))
                    .with_code(ApiError::TOKENS_DIFFER)
            }
            Self::TokensDiffer { prefill, decode } => ApiError::bad_upstream(format!(
                "the prefill worker counted {prefill} prompt tokens and {who} {decode}: they do not serve the same model"
            ))
            .with_code(ApiError::TOKENS_DIFFER),
        }
    }
}

/// The HTTP client of all workers.
#[derive(Debug, Clone)]
pub(crate) struct Upstream {
    client: reqwest::Client,
    max_reply_bytes: usize,
}

/// The largest reply to a question that needs no inference, in bytes.
const SMALL_REPLY: usize = 1 << 20;

/// How long a connection without traffic lasts before it is checked: a worker's machine may be gone without a word.
const KEEPALIVE: Duration = Duration::from_secs(15);

impl Upstream {
    pub(crate) fn new(timeouts: &Timeouts, max_reply_bytes: usize) -> Result<Self, GatewayError> {
        // Another part of the process may have chosen a provider already; either will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder()
            .connect_timeout(timeouts.connect)
            .tcp_nodelay(true)
            .tcp_keepalive(KEEPALIVE)
            // Under uvicorn's five seconds, so that a connection is not closed in our hand.
            .pool_idle_timeout(Duration::from_secs(4))
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(GatewayError::Client)?;
        Ok(Self {
            client,
            max_reply_bytes,
        })
    }

    /// Sends a JSON body and waits for the reply's head.
    pub(crate) async fn post(
        &self,
        worker: &Worker,
        path: &str,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Result<reqwest::Response, Failure> {
        self.client
            .post(worker.url(path))
            .headers(headers.clone())
            .header(CONTENT_TYPE, HeaderValue::from_static("application/json"))
            .body(body)
            .send()
            .await
            .map_err(|error| sort(&error))
    }

    /// Sends a JSON body and waits for the whole reply.
    pub(crate) async fn post_whole(
        &self,
        worker: &Worker,
        path: &str,
        headers: &HeaderMap,
        body: Bytes,
        limit: Duration,
    ) -> Result<Reply, Failure> {
        within(limit, async {
            self.whole(self.post(worker, path, headers, body).await?)
                .await
        })
        .await
    }

    /// The rest of a reply.
    pub(crate) async fn whole(&self, response: reqwest::Response) -> Result<Reply, Failure> {
        whole(response, self.max_reply_bytes).await
    }

    /// Asks for one of a worker's routes.
    pub(crate) async fn get(
        &self,
        worker: &Worker,
        path: &str,
        headers: &HeaderMap,
        limit: Duration,
    ) -> Result<Reply, Failure> {
        let ask = async {
            let request = self.client.get(worker.url(path)).headers(headers.clone());
            let response = request.send().await.map_err(|error| sort(&error))?;
            whole(response, SMALL_REPLY).await
        };
        within(limit, ask).await
    }
}

/// The rest of a reply of at most `limit` bytes.
async fn whole(response: reqwest::Response, limit: usize) -> Result<Reply, Failure> {
    let (status, content_type) = (
        response.status(),
        response.headers().get(CONTENT_TYPE).cloned(),
    );
    let mut pieces = std::pin::pin!(pieces(response));
    let mut body = BytesMut::new();
    while let Some(piece) = pieces.next().await.transpose()? {
        if body.len() + piece.len() > limit {
            return Err(too_long(limit));
        }
        body.extend_from_slice(&piece);
    }
    Ok(Reply {
        status,
        content_type,
        body: body.freeze(),
    })
}

/// A reply beyond all bounds.
pub(crate) fn too_long(limit: usize) -> Failure {
    Failure::BadReply(format!("its reply is longer than {limit} bytes"))
}

/// A reply's body in the pieces in which it comes.
pub(crate) fn pieces(
    response: reqwest::Response,
) -> impl Stream<Item = Result<Bytes, Failure>> + Send {
    response
        .bytes_stream()
        .map(|piece| piece.map_err(|error| sort(&error)))
}

/// Whether a reply is a stream of server-sent events.
pub(crate) fn is_event_stream(response: &reqwest::Response) -> bool {
    let content_type = response
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    content_type.is_some_and(|text| {
        text.trim_start()
            .to_ascii_lowercase()
            .starts_with("text/event-stream")
    })
}

/// Bounds how long something takes.
pub(crate) async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::time::timeout(limit, work)
        .await
        .unwrap_or(Err(Failure::Timeout(limit)))
}

/// The same for what a worker does, which is given up also when the worker falls silent.
pub(crate) async fn within_life<T>(
    worker: &Worker,
    limit: Duration,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::select! {
        biased;
        done = within(limit, work) => done,
        why = worker.falls_silent() => Err(Failure::Silent(why)),
    }
}

fn sort(error: &reqwest::Error) -> Failure {
    if error.is_connect() {
        Failure::Connect {
            why: innermost(error),
            timed_out: error.is_timeout(),
        }
    } else {
        Failure::Transport(innermost(error))
    }
}

/// The last cause: the others only say that something failed.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
