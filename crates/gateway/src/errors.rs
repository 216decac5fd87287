//! Errors of the gateway as a whole, and the errors of its own that clients see.

use axum::body::Body as HttpBody;
use axum::response::Response;
use http::StatusCode;
use http::header::{HeaderValue, RETRY_AFTER};
use protocol::ApiError;

use crate::registry::Side;

/// Why a gateway does not start, or stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatewayError {
    /// A pool without workers.
    #[error("expected at least one {0} worker, got none")]
    NoWorkers(&'static str),
    /// One worker twice in a pool.
    #[error("{side} worker {url} is given twice")]
    Twice {
        /// The pool.
        side: &'static str,
        /// The worker.
        url: String,
    },
    /// A worker's address that cannot be one.
    #[error("expected the URL of a {side} worker to be http(s)://host:port, got {url}")]
    Url {
        /// The pool.
        side: &'static str,
        /// What was given.
        url: String,
    },
    /// Embedded workers and others together: their blocks cannot move from one kind to the other.
    #[error(
        "{embedded} is an embedded worker and {other} is not: KV blocks do not move between the two, so a pool must not mix them"
    )]
    MixedWorkers {
        /// An embedded worker.
        embedded: String,
        /// One of another kind.
        other: String,
    },
    /// The locality map cannot be refitted to the number of decode workers.
    #[error(
        "locality map has {clusters} clusters for {workers} decode workers and cannot be refitted: {reason}"
    )]
    Refit {
        /// Clusters in the map.
        clusters: usize,
        /// Decode workers.
        workers: usize,
        /// Why not.
        reason: String,
    },
    /// A policy cannot be made.
    #[error(transparent)]
    Policy(#[from] routing::PolicyError),
    /// The HTTP client cannot be made.
    #[error("http client: {0}")]
    Client(#[source] reqwest::Error),
    /// The listener failed.
    #[error("listener: {0}")]
    Listen(#[source] std::io::Error),
}

/// 503: no worker of this side is left; `last` is what the last one tried said.
pub(crate) fn no_worker(side: Side, last: Option<&str>) -> ApiError {
    let tried = last
        .map(|last| format!(" (last tried: {last})"))
        .unwrap_or_default();
    ApiError::unavailable(format!("no {side} worker is available{tried}"))
        .with_code(ApiError::NO_WORKER)
}

/// 413: the body is larger than this gateway takes.
pub(crate) fn too_large(limit: usize) -> ApiError {
    ApiError::invalid(format!("the request body is larger than {limit} bytes"))
        .with_status(StatusCode::PAYLOAD_TOO_LARGE)
        .with_code("request_too_large")
}

/// 408: the body did not arrive in time.
pub(crate) fn too_slow(limit: std::time::Duration) -> ApiError {
    ApiError::invalid(format!("the request did not arrive whole within {limit:?}"))
        .with_status(StatusCode::REQUEST_TIMEOUT)
        .with_code("request_timeout")
}

/// 503: as many requests are in flight as this gateway takes.
pub(crate) fn full(limit: usize) -> ApiError {
    ApiError::unavailable(format!(
        "{limit} requests are in flight, as many as this gateway takes: try again later"
    ))
    .with_code("too_many_requests_in_flight")
}

/// 405: the route is there, the method is not.
pub(crate) fn wrong_method(method: &http::Method, path: &str) -> ApiError {
    ApiError::invalid(format!("{path} does not answer {method}"))
        .with_status(StatusCode::METHOD_NOT_ALLOWED)
}

/// An error as a reply. A 503 asks to come back in a second.
pub(crate) fn respond(error: &ApiError) -> Response {
    let mut response = error.to_http().map(HttpBody::from);
    if error.status == StatusCode::SERVICE_UNAVAILABLE {
        response
            .headers_mut()
            .insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}
