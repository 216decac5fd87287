//! Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with an HTTP status.

use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};

/// The `type` of an OpenAI error object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request itself is wrong (`invalid_request_error`).
    InvalidRequest,
    /// Something named in the request is not here (`not_found_error`).
    NotFound,
    /// Nobody can serve the request now; it may be sent again (`service_unavailable_error`).
    Unavailable,
    /// A fault on the serving side (`server_error`).
    Server,
    /// Any other type, as an upstream worker gave it.
    Other(String),
}

impl ErrorKind {
    /// The word that goes on the wire.
    pub fn as_str(&self) -> &str {
        match self {
            Self::InvalidRequest => "invalid_request_error",
            Self::NotFound => "not_found_error",
            Self::Unavailable => "service_unavailable_error",
            Self::Server => "server_error",
            Self::Other(word) => word,
        }
    }

    fn from_word(word: &str) -> Self {
        match word {
            "invalid_request_error" => Self::InvalidRequest,
            "not_found_error" => Self::NotFound,
            "service_unavailable_error" => Self::Unavailable,
            "server_error" => Self::Server,
            other => Self::Other(other.to_owned()),
        }
    }
}

/// The longest message, in bytes: what it quotes came from elsewhere.
const MAX_MESSAGE: usize = 4000;

/// The longest type, code or field name of a worker's error that is taken over, in bytes.
const MAX_WORD: usize = 200;

/// At most the first `longest` bytes of a text.
fn cut(mut text: String, longest: usize) -> String {
    text.truncate(text.floor_char_boundary(longest));
    text
}

/// An error that a client gets to see.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status of the reply.
    pub status: StatusCode,
    /// What went wrong, for a human.
    pub message: String,
    /// The error's `type`.
    pub kind: ErrorKind,
    /// The request field at fault, where there is one.
    pub param: Option<String>,
    /// A stable word for programs, such as [`ApiError::CONTEXT_LENGTH_EXCEEDED`].
    pub code: Option<String>,
}

impl ApiError {
    /// Code: prompt and output together do not fit the model's context.
    pub const CONTEXT_LENGTH_EXCEEDED: &str = "context_length_exceeded";
    /// Code: no such model here.
    pub const MODEL_NOT_FOUND: &str = "model_not_found";
    /// Code: the prompt's KV blocks could not be brought over. Prefilling the request again may help.
    pub const KV_TRANSFER_FAILED: &str = "kv_transfer_failed";
    /// Code: the transfer parameters are not of the kind that this worker can use.
    pub const KV_TRANSFER_INCOMPATIBLE: &str = "kv_transfer_incompatible";
    /// Code: a field has a meaning that this server cannot give it.
    pub const UNSUPPORTED: &str = "unsupported_parameter";
    /// Code: no worker is able to take the request now.
    pub const NO_WORKER: &str = "no_worker_available";
    /// Code: the worker that had the request went down.
    pub const WORKER_DOWN: &str = "worker_down";
    /// Code: a worker behind this server answered in a way that cannot be passed on.
    pub const BAD_UPSTREAM: &str = "bad_upstream";
    /// Code: a worker behind this server did not answer in time.
    pub const UPSTREAM_TIMEOUT: &str = "upstream_timeout";
    /// Code: the workers of a handoff counted different prompts.
    pub const TOKENS_DIFFER: &str = "token_counts_differ";
    /// Code: a fault of the server.
    pub const INTERNAL: &str = "internal_error";
    /// Code: the server is going down and takes no new requests.
    pub const SHUTTING_DOWN: &str = "shutting_down";

    fn new(status: StatusCode, kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            status,
            message: cut(message.into(), MAX_MESSAGE),
            kind,
            param: None,
            code: None,
        }
    }

    /// 400: the request is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, ErrorKind::InvalidRequest, message)
    }

    /// 400: the field `param` is wrong.
    pub fn invalid_param(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid(message).with_param(param)
    }

    /// 400: the field `param` is understood, and what it asks for is not done here. `why` completes "`param` is not supported: ...".
    pub fn unsupported(param: &str, why: &str) -> Self {
        Self::invalid(format!("`{param}` is not supported: {why}"))
            .with_param(param)
            .with_code(Self::UNSUPPORTED)
    }

    /// 400: `needed` tokens (prompt and output) exceed the context of `limit` tokens.
    pub fn context_length_exceeded(
        limit: usize,
        prompt_tokens: usize,
        output_tokens: usize,
    ) -> Self {
        let message = format!(
            "this model's context is {limit} tokens, and the request asks for {} ({prompt_tokens} in the prompt, {output_tokens} in the output)",
            prompt_tokens.saturating_add(output_tokens)
        );
        Self::invalid(message)
            .with_param("prompt")
            .with_code(Self::CONTEXT_LENGTH_EXCEEDED)
    }

    /// 404: the model is not served here.
    pub fn model_not_found(model: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            ErrorKind::NotFound,
            format!("the model `{model}` does not exist"),
        )
        .with_param("model")
        .with_code(Self::MODEL_NOT_FOUND)
    }

    /// 404: no such route.
    pub fn route_not_found(method: &str, path: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            ErrorKind::NotFound,
            format!("there is nothing at {method} {path}"),
        )
    }

    /// 502: the prompt's KV blocks could not be brought over; the request may be prefilled again.
    pub fn kv_transfer_failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, ErrorKind::Server, message)
            .with_param("kv_transfer_params")
            .with_code(Self::KV_TRANSFER_FAILED)
    }

    /// 400: these transfer parameters can never work here.
    pub fn kv_transfer_incompatible(message: impl Into<String>) -> Self {
        Self::invalid_param("kv_transfer_params", message).with_code(Self::KV_TRANSFER_INCOMPATIBLE)
    }

    /// 503: nobody can serve the request now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Unavailable,
            message,
        )
    }

    /// 502: a worker behind this server answered in a way that cannot be passed on.
    pub fn bad_upstream(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, ErrorKind::Server, message).with_code(Self::BAD_UPSTREAM)
    }

    /// 504: a worker behind this server did not answer in time.
    pub fn timeout(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, ErrorKind::Server, message)
            .with_code(Self::UPSTREAM_TIMEOUT)
    }

    /// 500: a fault of this server.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            ErrorKind::Server,
            message,
        )
        .with_code(Self::INTERNAL)
    }

    /// The same error with another HTTP status.
    #[must_use]
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// The same error, naming the request field at fault.
    #[must_use]
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// The same error with a code for programs.
    #[must_use]
    pub fn with_code(mut self, code: impl Into<String>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// Whether `code` is this error's code.
    pub fn has_code(&self, code: &str) -> bool {
        self.code.as_deref() == Some(code)
    }

    /// Whether sending the request through prefill again may succeed.
    pub fn is_transfer_failure(&self) -> bool {
        self.has_code(Self::KV_TRANSFER_FAILED)
    }

    /// The body: `{"error": {"message", "type", "param", "code"}}`.
    pub fn to_json(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind.as_str(),
            "param": self.param,
            "code": self.code,
        }})
    }

    /// A whole HTTP reply.
    pub fn to_http(&self) -> http::Response<Bytes> {
        let mut reply = http::Response::new(Bytes::from(self.to_json().to_string()));
        *reply.status_mut() = self.status;
        reply.headers_mut().insert(
            http::header::CONTENT_TYPE,
            http::HeaderValue::from_static("application/json"),
        );
        reply
    }

    /// Reads the reply of a worker that answered `status`. OpenAI's shape and vLLM's (whose `code` is the status as a number) are
    /// understood; of anything else the first 300 characters become the message. A worker's words are cut where they are far too long.
    pub fn from_reply(status: StatusCode, body: &[u8]) -> Self {
        let parsed: Option<Value> = serde_json::from_slice(body).ok();
        let object = parsed
            .as_ref()
            .map(|value| value.get("error").unwrap_or(value))
            .filter(|value| value.get("message").is_some());
        let Some(object) = object else {
            let text: String = String::from_utf8_lossy(body).chars().take(300).collect();
            let kind = if status.is_client_error() {
                ErrorKind::InvalidRequest
            } else {
                ErrorKind::Server
            };
            return Self::new(status, kind, format!("worker answered {status}: {text}"));
        };
        let text = |key: &str, longest: usize| {
            let text = object.get(key).and_then(Value::as_str)?;
            Some(cut(text.to_owned(), longest))
        };
        Self {
            status,
            message: text("message", MAX_MESSAGE).unwrap_or_default(),
            kind: ErrorKind::from_word(&text("type", MAX_WORD).unwrap_or_default()),
            param: text("param", MAX_WORD),
            code: text("code", MAX_WORD),
        }
    }

    /// Reads the error that a worker sent in place of a stream's chunk: `error` is the object under that key. Its status is what its
    /// code says, a number as vLLM has it or a word of this crate's, or else 502.
    pub fn from_event(error: &Value) -> Self {
        let number = error.get("code").and_then(Value::as_u64);
        let status = number
            .and_then(|code| StatusCode::from_u16(u16::try_from(code).ok()?).ok())
            .filter(|status| status.is_client_error() || status.is_server_error());
        let word = error.get("code").and_then(Value::as_str);
        let status = status.unwrap_or(match word {
            Some(Self::KV_TRANSFER_INCOMPATIBLE | Self::CONTEXT_LENGTH_EXCEEDED) => {
                StatusCode::BAD_REQUEST
            }
            Some(Self::SHUTTING_DOWN | Self::NO_WORKER | Self::WORKER_DOWN) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Some(Self::INTERNAL) => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::BAD_GATEWAY,
        });
        Self::from_reply(status, json!({ "error": error }).to_string().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_wire_form_is_openais() {
        let error = ApiError::model_not_found("m");
        assert_eq!(
            error.to_json().to_string(),
            r#"{"error":{"message":"the model `m` does not exist","type":"not_found_error","param":"model","code":"model_not_found"}}"#
        );
        let reply = error.to_http();
        assert_eq!(reply.status(), StatusCode::NOT_FOUND);
        assert_eq!(
            reply.headers()[http::header::CONTENT_TYPE],
            "application/json"
        );
    }

    #[test]
    fn own_errors_survive_the_wire() {
        for error in [
            ApiError::model_not_found("m"),
            ApiError::context_length_exceeded(10, 9, 8),
            ApiError::unsupported("suffix", "no infilling"),
            ApiError::kv_transfer_failed("peer gone"),
            ApiError::unavailable("none left").with_code(ApiError::NO_WORKER),
            ApiError::internal("fault"),
        ] {
            let reply = error.to_http();
            assert_eq!(ApiError::from_reply(reply.status(), reply.body()), error);
        }
    }

    #[test]
    fn errors_in_streams_have_the_status_that_their_code_says() {
        for (code, status) in [
            (json!(404), 404),
            (json!(500), 500),
            (json!(200), 502),
            (json!(70_000), 502),
            (json!(null), 502),
            (json!("kv_transfer_failed"), 502),
            (json!("kv_transfer_incompatible"), 400),
            (json!("shutting_down"), 503),
            (json!("unheard_of"), 502),
        ] {
            let error = ApiError::from_event(&json!({"message": "m", "code": code}));
            assert_eq!(
                (error.status.as_u16(), error.message.as_str()),
                (status, "m")
            );
            assert_eq!(error.code.as_deref(), code.as_str());
        }
    }

    #[test]
    fn what_an_error_quotes_is_bounded() {
        let long = "é".repeat(1 << 20);
        for error in [ApiError::model_not_found(&long), ApiError::invalid(&long)] {
            assert!(error.message.len() <= MAX_MESSAGE);
        }
        let body = json!({"error": {"message": long, "type": long, "param": long, "code": long}});
        let error = ApiError::from_reply(StatusCode::BAD_GATEWAY, body.to_string().as_bytes());
        assert!(error.to_json().to_string().len() < 5000);
    }

    #[test]
    fn foreign_errors_are_understood() {
        let check = |status: u16, body: &str, message: &str, kind: &str| {
            let error =
                ApiError::from_reply(StatusCode::from_u16(status).unwrap(), body.as_bytes());
            assert_eq!(
                (error.message.as_str(), error.kind.as_str()),
                (message, kind),
                "{body}"
            );
            assert_eq!(error.status.as_u16(), status);
        };
        check(
            400,
            r#"{"error":{"message":"bad","type":"BadRequestError","param":null,"code":400}}"#,
            "bad",
            "BadRequestError",
        );
        check(
            400,
            r#"{"object":"error","message":"old","type":"BadRequestError","code":400}"#,
            "old",
            "BadRequestError",
        );
        check(
            500,
            "Internal Server Error",
            "worker answered 500 Internal Server Error: Internal Server Error",
            "server_error",
        );
        check(
            422,
            "",
            "worker answered 422 Unprocessable Entity: ",
            "invalid_request_error",
        );
    }
}
