//! The worker's HTTP: OpenAI's routes, health and metrics.

mod chat;
mod completions;
mod generation;
mod handoff;
mod job;
mod params;
mod stream;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::{Body as HttpBody, Bytes};
use axum::extract::{DefaultBodyLimit, FromRequest as _, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use engine::KvGeometry;
use protocol::response::{ModelCard, ModelList};
use protocol::{ApiError, Body, REQUEST_ID_HEADER};
use serde::Serialize;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::engine_thread::EngineHandle;
use crate::metrics::Metrics;
use crate::text::Text;
use generation::Generation;
use job::Job;
use params::Api;
use stream::Tally;

/// The longest request that is read, in bytes.
const MAX_BODY: usize = 32 << 20;

/// How long the metrics wait for an engine that is busy with a long step.
const USAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// What the handlers share.
pub(crate) struct App {
    pub(crate) config: Config,
    pub(crate) engine: EngineHandle,
    pub(crate) text: Text,
    pub(crate) metrics: Metrics,
    pub(crate) geometry: KvGeometry,
    pub(crate) geometry_digest: u64,
    /// The longest sequence, prompt and output together, in tokens.
    pub(crate) max_sequence: usize,
    pub(crate) model_name: String,
    pub(crate) started: u64,
    pub(crate) engine_id: Arc<str>,
    pub(crate) transfer_host: String,
    pub(crate) transfer_port: u16,
    /// Releases that run in the background.
    pub(crate) tasks: TaskTracker,
    /// Set when no new requests are taken.
    pub(crate) closing: AtomicBool,
}

impl App {
    fn check_model(&self, body: &Body) -> Result<(), ApiError> {
        match body.model()? {
            Some(model) if model != self.model_name => Err(ApiError::model_not_found(model)),
            _ => Ok(()),
        }
    }

    fn model_card(&self) -> ModelCard {
        let context = u32::try_from(self.max_sequence).unwrap_or(u32::MAX);
        ModelCard::new(self.model_name.clone(), self.started, context)
    }

    fn is_healthy(&self) -> bool {
        self.engine.is_alive() && !self.closing.load(Ordering::Acquire)
    }
}

/// What a reply says of itself.
#[derive(Debug, Clone)]
struct Head {
    request_id: String,
    /// Seconds since the epoch.
    created: u64,
}

/// Seconds since the epoch.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// The routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/models", get(models))
        // A model's name may hold slashes.
        .route("/v1/models/{*id}", get(model))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/colocate/release", post(release))
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(app)
}

async fn completions(State(app): State<Arc<App>>, request: Request) -> Response {
    serve(app, request, Api::Completions).await
}

async fn chat_completions(State(app): State<Arc<App>>, request: Request) -> Response {
    serve(app, request, Api::Chat).await
}

async fn serve(app: Arc<App>, request: Request, api: Api) -> Response {
    let arrival = Instant::now();
    let head = Head {
        request_id: request_id(request.headers()),
        created: unix_time(),
    };
    let mut response = match answer(&app, &head, request, api, arrival).await {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(request_id = head.request_id, %error, status = error.status.as_u16(), "request refused or failed");
            error_response(&error)
        }
    };
    if let Ok(value) = HeaderValue::from_str(&head.request_id) {
        response.headers_mut().insert(REQUEST_ID_HEADER, value);
    }
    response
}

/// Reads a request's body.
async fn read(request: Request) -> Result<Body, ApiError> {
    let bytes = Bytes::from_request(request, &()).await.map_err(|error| {
        // Too long, or broken off.
        ApiError::invalid(format!(
            "cannot read the request's body, of at most {MAX_BODY} bytes: {error}"
        ))
        .with_status(error.status())
    })?;
    Body::parse(&bytes)
}

async fn answer(
    app: &Arc<App>,
    head: &Head,
    request: Request,
    api: Api,
    arrival: Instant,
) -> Result<Response, ApiError> {
    let name = protocol::handoff_id(request.headers()).map(Arc::from);
    let body = read(request).await?;
    let job = Job::start(app, &body, api, name, arrival).await?;
    if !job.params.stream {
        let mut done = job.finish(app).await?;
        let held = done.held.take();
        let text = match api {
            Api::Completions => json_text(&completions::reply(app, head, done)),
            Api::Chat => json_text(&chat::reply(app, head, done)),
        }?;
        return Ok(match held {
            Some(held) => handing_over(text, held),
            None => json_response(text),
        });
    }
    let prompt_tokens = job
        .inputs
        .iter()
        .map(|input| input.tokens.len())
        .sum::<usize>();
    let (app, head, params) = (app.clone(), head.clone(), job.params);
    let tally = Tally::new(
        prompt_tokens as u32,
        params.n as usize,
        job.handed_over_cached,
        params.stream_options,
    );
    let events = match api {
        Api::Completions => {
            let chunks = completions::Stream::new(app, head, params, job.inputs);
            stream::body(job.generations, chunks, tally)
        }
        Api::Chat => {
            let chunks = chat::Stream::new(app, head, params, job.inputs);
            stream::body(job.generations, chunks, tally)
        }
    };
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    Ok((headers, events).into_response())
}

/// A reply that names held blocks. They are the peer's from when its body is taken to be sent; a reply that nobody takes any more, because its
/// client has gone, frees them.
fn handing_over(text: String, held: Generation) -> Response {
    let headers = [
        (
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        ),
        (header::CONTENT_LENGTH, HeaderValue::from(text.len())),
    ];
    let body = futures::stream::once(async move {
        held.handed_over();
        Ok::<_, std::convert::Infallible>(Bytes::from(text))
    });
    (headers, HttpBody::from_stream(body)).into_response()
}

async fn models(State(app): State<Arc<App>>) -> Response {
    json(&ModelList::new(vec![app.model_card()])).unwrap_or_else(|error| error_response(&error))
}

async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response {
    let card = if id == app.model_name {
        json(&app.model_card())
    } else {
        Err(ApiError::model_not_found(&id))
    };
    card.unwrap_or_else(|error| error_response(&error))
}

async fn health(State(app): State<Arc<App>>) -> Response {
    if app.is_healthy() {
        StatusCode::OK.into_response()
    } else {
        error_response(
            &ApiError::unavailable("this worker is going down").with_code(ApiError::SHUTTING_DOWN),
        )
    }
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let usage = tokio::time::timeout(USAGE_TIMEOUT, app.engine.usage()).await;
    let text = match usage {
        Ok(Ok(usage)) => app
            .metrics
            .render(&usage)
            .map_err(|error| ApiError::internal(error.to_string())),
        Ok(Err(error)) => Err(generation::gone(error)),
        Err(_) => Err(ApiError::unavailable("the engine is busy with a step")),
    };
    match text {
        Ok(text) => {
            let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, content_type)], text).into_response()
        }
        Err(error) => error_response(&error),
    }
}

/// Frees the blocks of a handoff that will not happen, named by the parameters that this worker gave for it, or by its sender's name for it where
/// no parameters have come. What this worker does not hold (any more) is no error: the caller need not know who was faster.
async fn release(State(app): State<Arc<App>>, request: Request) -> Response {
    match handoff::release(&app, request).await {
        Ok(()) => json(&serde_json::json!({})).unwrap_or_else(|error| error_response(&error)),
        Err(error) => error_response(&error),
    }
}

async fn no_route(method: Method, uri: Uri) -> Response {
    error_response(&ApiError::route_not_found(method.as_str(), uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> Response {
    error_response(
        &ApiError::invalid(format!(
            "expected another method than {method} at {}",
            uri.path()
        ))
        .with_status(StatusCode::METHOD_NOT_ALLOWED),
    )
}

fn request_id(headers: &HeaderMap) -> String {
    protocol::request_id(headers)
        .map_or_else(|| uuid::Uuid::new_v4().simple().to_string(), str::to_owned)
}

fn json(reply: &impl Serialize) -> Result<Response, ApiError> {
    json_text(reply).map(json_response)
}

fn json_text(reply: &impl Serialize) -> Result<String, ApiError> {
    serde_json::to_string(reply)
        .map_err(|error| ApiError::internal(format!("cannot write a reply: {error}")))
}

fn json_response(text: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}

fn error_response(error: &ApiError) -> Response {
    error.to_http().map(HttpBody::from)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::serve::{Bound, load};

    #[tokio::test]
    async fn blocks_are_handed_over_by_a_reply_that_is_sent() {
        let dir = tempfile::tempdir().unwrap();
        let shape = engine::testing::RandomModel::default();
        engine::testing::write_random_checkpoint(dir.path(), &shape, 7).unwrap();
        let nowhere = ([127, 0, 0, 1], 1).into();
        let bound = Bound {
            http: nowhere,
            transfer: nowhere,
        };
        let app = Arc::new(load(Config::new(dir.path()), bound).await.unwrap());
        let client = Body::parse(br#"{"prompt":"hello","max_tokens":5}"#).unwrap();
        let body = protocol::handoff::prefill_body(&client).to_bytes();
        let held = async || app.engine.usage().await.unwrap().held;
        for sent in [false, true] {
            let request = Request::new(HttpBody::from(body.clone()));
            let reply = serve(app.clone(), request, Api::Completions).await;
            assert_eq!(reply.status(), StatusCode::OK);
            assert_eq!(held().await, 1);
            if sent {
                let text = axum::body::to_bytes(reply.into_body(), MAX_BODY).await;
                assert!(text.unwrap().starts_with(b"{\"id\""));
            } else {
                drop(reply);
            }
            assert_eq!(held().await, usize::from(sent), "sent: {sent}");
        }
        app.engine.stop();
    }
}
