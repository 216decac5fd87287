//! A request as it is admitted: what it asks for, what its routing needs, and what goes on to the workers with it.

use axum::body::Body as HttpBody;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use http::HeaderMap;
use http::header::{AUTHORIZATION, HeaderName, HeaderValue};
use protocol::handoff::KV_TRANSFER_PARAMS;
use protocol::{ApiError, Body, REQUEST_ID_HEADER};
use routing::PREFIX_BYTES;

use crate::config::{DOMAIN_FIELD, DOMAIN_HEADER, MAX_DOMAIN_BYTES};
use crate::errors::too_large;

/// Headers of the client that the workers get to see.
const PASSED_ON: [HeaderName; 3] = [
    AUTHORIZATION,
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
];

/// Which of the two inference routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    Completions,
    Chat,
}

impl Route {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// An admitted request.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) route: Route,
    pub(crate) request_id: String,
    /// The client's request without this gateway's own field.
    pub(crate) body: Body,
    pub(crate) stream: bool,
    /// Whether the client wants a usage chunk at the end of its stream.
    pub(crate) wants_usage: bool,
    pub(crate) domain: Option<String>,
    /// The first bytes of the prompt.
    pub(crate) prefix: Vec<u8>,
    /// What goes on to the workers, the request id included.
    pub(crate) headers: HeaderMap,
}

impl Call {
    /// Reads and checks a request.
    ///
    /// # Errors
    /// 400 where it is not one, or asks for what cannot be done in two parts.
    pub(crate) fn read(
        route: Route,
        request_id: &str,
        headers: &HeaderMap,
        bytes: &[u8],
    ) -> Result<Self, ApiError> {
        let mut body = Body::parse(bytes)?;
        refuse_undivided(route, &body)?;
        let domain = domain(headers, &mut body)?;
        Ok(Self {
            route,
            request_id: request_id.to_owned(),
            stream: body.stream()?,
            wants_usage: body.stream_options()?.include_usage,
            domain,
            prefix: body.routing_prefix(PREFIX_BYTES),
            headers: passed_on(headers, request_id),
            body,
        })
    }
}

/// The headers that go on to a worker.
pub(crate) fn passed_on(client: &HeaderMap, request_id: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for name in PASSED_ON {
        if let Some(value) = client.get(&name) {
            headers.insert(name, value.clone());
        }
    }
    if let Ok(value) = HeaderValue::from_str(request_id) {
        headers.insert(REQUEST_ID_HEADER, value);
    }
    headers
}

/// What cannot be served in two parts is refused with the reason, never answered wrongly.
fn refuse_undivided(route: Route, body: &Body) -> Result<(), ApiError> {
    if body.has(KV_TRANSFER_PARAMS) {
        return Err(ApiError::unsupported(
            KV_TRANSFER_PARAMS,
            "the handoff between workers is this gateway's to arrange",
        ));
    }
    if route == Route::Completions && body.prompts()?.len() > 1 {
        return Err(ApiError::unsupported(
            "prompt",
            "prefill and decode run on different workers, and only the first prompt of a list could be handed over: \
             send one request per prompt",
        ));
    }
    if body.has("prompt_logprobs") || (body.bool("echo")? == Some(true) && body.has("logprobs")) {
        return Err(ApiError::unsupported(
            if body.has("prompt_logprobs") {
                "prompt_logprobs"
            } else {
                "logprobs"
            },
            "the worker that answers has not computed the prompt, so it has no log-probabilities of it",
        ));
    }
    Ok(())
}

/// The domain that the client names: the header, or else the field, which is taken out. Labels are remembered, so a long
/// one is refused.
fn domain(headers: &HeaderMap, body: &mut Body) -> Result<Option<String>, ApiError> {
    let field = body.str(DOMAIN_FIELD)?.map(str::to_owned);
    body.remove(DOMAIN_FIELD);
    let header = headers
        .get(DOMAIN_HEADER)
        .and_then(|value| value.to_str().ok());
    let label = header.map(str::to_owned).or(field);
    if let Some(label) = label
        .as_deref()
        .filter(|label| label.len() > MAX_DOMAIN_BYTES)
    {
        return Err(ApiError::invalid_param(
            DOMAIN_FIELD,
            format!(
                "expected the domain in `{DOMAIN_HEADER}` or `{DOMAIN_FIELD}` to have at most {MAX_DOMAIN_BYTES} bytes, \
                 got {}",
                label.len()
            ),
        ));
    }
    Ok(label.filter(|label| !label.is_empty()))
}

/// Reads a request's body, up to `limit` bytes.
///
/// # Errors
/// 413 beyond; 400 where the client breaks off.
pub(crate) async fn read_body(body: HttpBody, limit: usize) -> Result<Bytes, ApiError> {
    let mut pieces = body.into_data_stream();
    let mut whole = BytesMut::new();
    while let Some(piece) = pieces.next().await {
        let piece = piece
            .map_err(|error| ApiError::invalid(format!("the request body broke off: {error}")))?;
        if whole.len() + piece.len() > limit {
            return Err(too_large(limit));
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole.freeze())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(route: Route, headers: &[(&'static str, &str)], body: &str) -> Result<Call, ApiError> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        Call::read(route, "id-1", &map, body.as_bytes())
    }

    #[test]
    fn the_domain_is_ours_and_does_not_go_on() {
        let check = |headers: &[(&'static str, &str)], body: &str, expected: Option<&str>| {
            let call = read(Route::Completions, headers, body).unwrap();
            assert_eq!(call.domain.as_deref(), expected);
            assert_eq!(
                call.body.to_string(),
                r#"{"prompt":"p","metadata":{"domain":"x"}}"#
            );
            assert!(!call.headers.contains_key(DOMAIN_HEADER));
        };
        check(&[], r#"{"prompt":"p","metadata":{"domain":"x"}}"#, None);
        check(
            &[],
            r#"{"colocate_domain":"law","prompt":"p","metadata":{"domain":"x"}}"#,
            Some("law"),
        );
        check(
            &[("x-colocate-domain", "code")],
            r#"{"prompt":"p","colocate_domain":"law","metadata":{"domain":"x"}}"#,
            Some("code"),
        );
        check(
            &[("x-colocate-domain", "")],
            r#"{"prompt":"p","metadata":{"domain":"x"}}"#,
            None,
        );
        assert!(
            read(
                Route::Completions,
                &[],
                r#"{"prompt":"p","colocate_domain":3}"#
            )
            .is_err()
        );
    }

    #[test]
    fn long_domains_are_refused() {
        let (longest, longer) = (
            "x".repeat(MAX_DOMAIN_BYTES),
            "x".repeat(MAX_DOMAIN_BYTES + 1),
        );
        let field = |label: &str| format!(r#"{{"prompt":"p","colocate_domain":"{label}"}}"#);
        let call = read(Route::Completions, &[], &field(&longest)).unwrap();
        assert_eq!(call.domain, Some(longest));
        let header: [(&str, &str); 1] = [("x-colocate-domain", &longer)];
        for error in [
            read(Route::Completions, &[], &field(&longer)).unwrap_err(),
            read(Route::Completions, &header, r#"{"prompt":"p"}"#).unwrap_err(),
        ] {
            assert_eq!(
                (error.status.as_u16(), error.param.as_deref()),
                (400, Some(DOMAIN_FIELD))
            );
            assert!(
                error.message.contains("at most 128 bytes, got 129"),
                "{error}"
            );
        }
    }

    #[test]
    fn few_headers_go_on() {
        let headers = [
            ("authorization", "Bearer k"),
            ("cookie", "c"),
            ("traceparent", "00-1-2-01"),
            ("host", "h"),
        ];
        let call = read(
            Route::Chat,
            &headers,
            r#"{"messages":[{"role":"user","content":"x"}]}"#,
        )
        .unwrap();
        let mut names: Vec<&str> = call.headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "traceparent", "x-request-id"]);
        assert_eq!(call.headers["x-request-id"], "id-1");
    }

    #[test]
    fn what_cannot_be_divided_is_refused() {
        for (body, param) in [
            (r#"{"prompt":["a","b"]}"#, "prompt"),
            (
                r#"{"prompt":"a","kv_transfer_params":{"remote_host":"evil"}}"#,
                "kv_transfer_params",
            ),
            (r#"{"prompt":"a","prompt_logprobs":1}"#, "prompt_logprobs"),
            (r#"{"prompt":"a","echo":true,"logprobs":1}"#, "logprobs"),
            (r#"{"max_tokens":3}"#, "prompt"),
            (
                r#"{"prompt":"a","stream":true,"stream_options":{"include_usage":"yes"}}"#,
                "stream_options.include_usage",
            ),
        ] {
            let error = read(Route::Completions, &[], body).unwrap_err();
            assert_eq!(
                (error.status.as_u16(), error.param.as_deref()),
                (400, Some(param)),
                "{body}"
            );
        }
        assert!(read(Route::Completions, &[], r#"{"prompt":["a"],"logprobs":2}"#).is_ok());
    }

    #[tokio::test]
    async fn bodies_are_bounded() {
        assert_eq!(
            read_body(HttpBody::from("12345"), 5).await.unwrap(),
            "12345"
        );
        let error = read_body(HttpBody::from("123456"), 5).await.unwrap_err();
        assert_eq!(error.status.as_u16(), 413);
    }
}
