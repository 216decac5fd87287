//! The doors: OpenAI's routes, and the operator's.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::body::Body as HttpBody;
use axum::extract::{Path, Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Router};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, StatusCode};
use protocol::{ApiError, REQUEST_ID_HEADER};
use serde::Serialize;
use serde_json::{Value, json};

use crate::account::Account;
use crate::call::{Call, Route, passed_on, read_body};
use crate::errors::{full, no_worker, respond, too_large, too_slow, wrong_method};
use crate::placement::Recent;
use crate::policies::MapNote;
use crate::registry::{Pool, Side};
use crate::server::App;
use crate::upstream::Reply;
use crate::{handoff, health};

/// The name that goes with a request from the client to both workers and back.
#[derive(Debug, Clone)]
struct RequestId(String);

/// All routes.
pub(crate) fn router(app: &Arc<App>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/models", get(models))
        // A model's name may hold slashes.
        .route("/v1/models/{*id}", get(model))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/colocate/workers", get(workers))
        .fallback(not_found)
        .method_not_allowed_fallback(not_allowed)
        .layer(middleware::from_fn(name_requests))
        .with_state(Arc::clone(app))
}

/// Takes the client's request id or makes one, and puts it on the reply.
async fn name_requests(mut request: Request, next: Next) -> Response {
    let id = match protocol::request_id(request.headers()) {
        Some(id) => id.to_owned(),
        None => uuid::Uuid::new_v4().to_string(),
    };
    let header = HeaderValue::from_str(&id);
    request.extensions_mut().insert(RequestId(id));
    let mut response = next.run(request).await;
    if let Ok(header) = header {
        response.headers_mut().insert(REQUEST_ID_HEADER, header);
    }
    response
}

async fn completions(app: State<Arc<App>>, id: Extension<RequestId>, request: Request) -> Response {
    infer(&app, Route::Completions, &id.0.0, request).await
}

async fn chat(app: State<Arc<App>>, id: Extension<RequestId>, request: Request) -> Response {
    infer(&app, Route::Chat, &id.0.0, request).await
}

async fn infer(app: &Arc<App>, route: Route, id: &str, request: Request) -> Response {
    let mut account = Account::open(&app.metrics, route.path());
    let Ok(permit) = Arc::clone(&app.permits).try_acquire_owned() else {
        let error = full(app.max_in_flight);
        account.close(error.status.as_u16());
        return respond(&error);
    };
    account.hold(permit);
    match admit(app, route, id, request).await {
        Ok(call) => handoff::serve(app, &call, account).await,
        Err(error) => {
            account.close(error.status.as_u16());
            respond(&error)
        }
    }
}

async fn admit(app: &App, route: Route, id: &str, request: Request) -> Result<Call, ApiError> {
    let (parts, body) = request.into_parts();
    let announced = parts
        .headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse().ok());
    if announced.is_some_and(|length: usize| length > app.max_body_bytes) {
        return Err(too_large(app.max_body_bytes));
    }
    let limit = app.timeouts.request;
    let bytes = tokio::time::timeout(limit, read_body(body, app.max_body_bytes))
        .await
        .unwrap_or_else(|_| Err(too_slow(limit)))?;
    Call::read(route, id, &parts.headers, &bytes)
}

async fn models(app: State<Arc<App>>, id: Extension<RequestId>, headers: HeaderMap) -> Response {
    let served = async {
        let data = served(&app, &passed_on(&headers, &id.0.0)).await?;
        Ok(json!({"object": "list", "data": data}))
    };
    about_models(&app, served).await
}

async fn model(
    app: State<Arc<App>>,
    id: Extension<RequestId>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Response {
    let named = async {
        let served = served(&app, &passed_on(&headers, &id.0.0)).await?;
        let mut named = served.into_iter();
        named
            .find(|model| model_id(model) == Some(&name))
            .ok_or_else(|| ApiError::model_not_found(&name))
    };
    about_models(&app, named).await
}

/// Answers a question about models, and books it.
async fn about_models(
    app: &App,
    answer: impl Future<Output = Result<Value, ApiError>>,
) -> Response {
    let mut account = Account::open(&app.metrics, "/v1/models");
    match answer.await {
        Ok(answer) => {
            account.close(200);
            json_response(StatusCode::OK, &answer)
        }
        Err(error) => {
            account.close(error.status.as_u16());
            respond(&error)
        }
    }
}

/// The models that a prefill and a decode worker both serve, as the decode workers describe them.
async fn served(app: &App, headers: &HeaderMap) -> Result<Vec<Value>, ApiError> {
    let prefill = models_of(app, Side::Prefill, headers).await?;
    let mut decode = models_of(app, Side::Decode, headers).await?;
    let served: BTreeSet<&str> = prefill.iter().filter_map(model_id).collect();
    let mut named = BTreeSet::new();
    decode.retain(|model| {
        model_id(model).is_some_and(|id| served.contains(id) && named.insert(id.to_owned()))
    });
    Ok(decode)
}

fn model_id(model: &Value) -> Option<&str> {
    model.get("id")?.as_str()
}

/// What the healthy workers of one side list.
async fn models_of(app: &App, side: Side, headers: &HeaderMap) -> Result<Vec<Value>, ApiError> {
    let healthy: Vec<_> = app
        .pool(side)
        .iter()
        .filter(|worker| worker.healthy())
        .collect();
    let asked = healthy.iter().map(|worker| {
        app.upstream
            .get(worker, "/v1/models", headers, app.timeouts.probe)
    });
    let mut models = Vec::new();
    let mut refused = no_worker(side, None);
    let mut answered = false;
    for (worker, reply) in healthy.iter().zip(futures::future::join_all(asked).await) {
        match reply {
            Ok(Reply { status, body, .. }) if status.is_success() => {
                let list: Value = serde_json::from_slice(&body).unwrap_or_default();
                models.extend(
                    list.get("data")
                        .and_then(Value::as_array)
                        .into_iter()
                        .flatten()
                        .cloned(),
                );
                answered = true;
            }
            Ok(reply) => refused = ApiError::from_reply(reply.status, &reply.body),
            Err(failure) => {
                health::doubt(app, worker, &failure);
                refused = failure.to_api_error(worker);
            }
        }
    }
    if answered { Ok(models) } else { Err(refused) }
}

/// What `/health` says. Written as it is, not by way of a JSON value, in which an f32 gets the digits of an f64.
#[derive(Serialize)]
struct Health<'a> {
    status: &'static str,
    prefill_policy: &'static str,
    decode_policy: &'static str,
    locality_map: Option<&'a MapNote>,
    prefill: Vec<Value>,
    decode: Vec<Value>,
}

/// What `/colocate/workers` says.
#[derive(Serialize)]
struct Workers {
    prefill: Vec<Value>,
    decode: Vec<Value>,
    recent_decisions: Vec<Recent>,
}

/// 200 while a request could be served: at least one worker of each side is up.
async fn health(app: State<Arc<App>>) -> Response {
    let able = app.placement.prefill.any_healthy() && app.placement.decode.any_healthy();
    let (code, status) = if able {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "unavailable")
    };
    let (prefill_policy, decode_policy) = app.placement.policy_names();
    let body = Health {
        status,
        prefill_policy,
        decode_policy,
        locality_map: app.map.as_ref(),
        prefill: list(&app.placement.prefill),
        decode: list(&app.placement.decode),
    };
    json_response(code, &body)
}

fn list(pool: &Pool) -> Vec<Value> {
    pool.iter()
        .map(|worker| {
            let state = worker.state();
            json!({
                "index": worker.index,
                "url": worker.base(),
                "healthy": state.healthy,
                "reason": state.reason,
                "for_s": state.since.elapsed().as_secs(),
                "kind": state.kind.map(crate::registry::Kind::as_str),
                "in_flight": worker.in_flight(),
                "placed": worker.placed(),
                "failures": worker.failures(),
            })
        })
        .collect()
}

/// Loads, health and the last decode decisions, for an operator.
async fn workers(app: State<Arc<App>>) -> Response {
    let body = Workers {
        prefill: list(&app.placement.prefill),
        decode: list(&app.placement.decode),
        recent_decisions: app.placement.recent(),
    };
    json_response(StatusCode::OK, &body)
}

async fn metrics(app: State<Arc<App>>) -> Response {
    match app.metrics.encode(app.workers().map(AsRef::as_ref)) {
        Ok(text) => {
            let mut response = Response::new(HttpBody::from(text));
            response.headers_mut().insert(
                CONTENT_TYPE,
                HeaderValue::from_static(
                    "application/openmetrics-text; version=1.0.0; charset=utf-8",
                ),
            );
            response
        }
        Err(error) => respond(&ApiError::internal(error.to_string())),
    }
}

async fn not_found(app: State<Arc<App>>, request: Request) -> Response {
    Account::open(&app.metrics, "other").close(404);
    respond(&ApiError::route_not_found(
        request.method().as_str(),
        request.uri().path(),
    ))
}

async fn not_allowed(app: State<Arc<App>>, request: Request) -> Response {
    Account::open(&app.metrics, "other").close(405);
    respond(&wrong_method(request.method(), request.uri().path()))
}

fn json_response(status: StatusCode, body: &impl Serialize) -> Response {
    let text = match serde_json::to_string(body) {
        Ok(text) => text,
        Err(error) => {
            return respond(&ApiError::internal(format!(
                "cannot write a reply: {error}"
            )));
        }
    };
    let mut response = Response::new(HttpBody::from(text));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
