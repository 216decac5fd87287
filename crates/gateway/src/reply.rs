//! What the client gets: replies passed on, and a prefill worker's own answer where the request ended there.

use std::sync::Arc;

use axum::body::Body as HttpBody;
use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use protocol::handoff::KV_TRANSFER_PARAMS;
use protocol::sse::Event;
use serde_json::{Map, Value, json};

use crate::account::Account;
use crate::call::Route;
use crate::relay::Relay;
use crate::server::App;
use crate::upstream::Reply;

/// Response header: the prefill worker.
const PREFILL: HeaderName = HeaderName::from_static("x-colocate-prefill");
/// Response header: the decode worker.
const DECODE: HeaderName = HeaderName::from_static("x-colocate-decode");
/// Response header: why that decode worker.
const REASON: HeaderName = HeaderName::from_static("x-colocate-reason");

/// Who served a request, and why they did.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trail {
    pub(crate) prefill: Option<String>,
    pub(crate) decode: Option<String>,
    pub(crate) reason: Option<&'static str>,
}

impl Trail {
    fn write(&self, app: &Arc<App>, response: &mut Response) {
        if !app.decision_headers {
            return;
        }
        let entries = [
            (PREFILL, self.prefill.as_deref()),
            (DECODE, self.decode.as_deref()),
            (REASON, self.reason),
        ];
        for (name, value) in entries {
            if let Some(value) = value.and_then(|value| HeaderValue::from_str(value).ok()) {
                response.headers_mut().insert(name, value);
            }
        }
    }
}

/// A whole reply as it came.
pub(crate) fn whole(app: &Arc<App>, trail: &Trail, reply: Reply, mut account: Account) -> Response {
    let json = HeaderValue::from_static("application/json");
    account.close(reply.status.as_u16());
    let mut response = Response::new(HttpBody::from(reply.body));
    *response.status_mut() = reply.status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, reply.content_type.unwrap_or(json));
    trail.write(app, &mut response);
    response
}

/// A stream as it comes.
pub(crate) fn stream(app: &Arc<App>, trail: &Trail, relay: Relay) -> Response {
    let mut response = Response::new(HttpBody::from_stream(relay.into_stream()));
    event_stream_headers(&mut response);
    trail.write(app, &mut response);
    response
}

/// The answer of a prefill worker to a request that ended there, in the form that the client asked for.
pub(crate) fn from_prefill(
    app: &Arc<App>,
    trail: &Trail,
    route: Route,
    stream: Option<bool>,
    mut reply: Value,
    mut account: Account,
) -> Response {
    if let Some(object) = reply.as_object_mut() {
        object.shift_remove(KV_TRANSFER_PARAMS);
    }
    let Some(with_usage) = stream else {
        let body = Bytes::from(reply.to_string());
        return whole(
            app,
            trail,
            Reply {
                status: StatusCode::OK,
                content_type: None,
                body,
            },
            account,
        );
    };
    account.first_token();
    account.close(200);
    let mut response = Response::new(HttpBody::from(as_stream(route, &reply, with_usage)));
    event_stream_headers(&mut response);
    trail.write(app, &mut response);
    response
}

fn event_stream_headers(response: &mut Response) {
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
}

/// A whole reply as the stream that would have carried it.
fn as_stream(route: Route, reply: &Value, with_usage: bool) -> String {
    let chunk = |choices: Value| {
        let mut chunk = Map::new();
        for key in ["id", "object", "created", "model", "system_fingerprint"] {
            if let Some(value) = reply.get(key) {
                chunk.insert(key.to_owned(), value.clone());
            }
        }
        if route == Route::Chat {
            chunk.insert("object".to_owned(), json!("chat.completion.chunk"));
        }
        chunk.insert("choices".to_owned(), choices);
        chunk
    };
    let choices = reply
        .get("choices")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    let pieces = choices.into_iter().map(|mut choice| {
        if let (Route::Chat, Some(object)) = (route, choice.as_object_mut())
            && let Some(message) = object.shift_remove("message")
        {
            object.insert("delta".to_owned(), message);
        }
        chunk(Value::Array(vec![choice]))
    });
    let mut events: Vec<Map<String, Value>> = pieces.collect();
    if with_usage {
        let mut last = chunk(Value::Array(Vec::new()));
        last.insert(
            "usage".to_owned(),
            reply.get("usage").cloned().unwrap_or_default(),
        );
        events.push(last);
    }
    let mut text = String::new();
    for event in events
        .into_iter()
        .map(|event| Event::new(Value::Object(event).to_string()))
        .chain([Event::done()])
    {
        text.push_str(&String::from_utf8_lossy(&event.encode()));
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_whole_completion_as_a_stream() {
        let reply = json!({"id": "cmpl-1", "object": "text_completion", "created": 3, "model": "m",
            "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}], "usage": {"prompt_tokens": 4}});
        assert_eq!(
            as_stream(Route::Completions, &reply, true),
            concat!(
                r#"data: {"id":"cmpl-1","object":"text_completion","created":3,"model":"m","#,
                r#""choices":[{"index":0,"text":"x","finish_reason":"stop"}]}"#,
                "\n\n",
                r#"data: {"id":"cmpl-1","object":"text_completion","created":3,"model":"m","choices":[],"usage":{"prompt_tokens":4}}"#,
                "\n\ndata: [DONE]\n\n"
            )
        );
    }

    #[test]
    fn a_whole_chat_answer_as_a_stream() {
        let reply = json!({"id": "chatcmpl-1", "object": "chat.completion",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]});
        assert_eq!(
            as_stream(Route::Chat, &reply, false),
            concat!(
                r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","#,
                r#""choices":[{"index":0,"finish_reason":"stop","delta":{"role":"assistant","content":"x"}}]}"#,
                "\n\ndata: [DONE]\n\n"
            )
        );
    }
}
