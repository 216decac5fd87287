//! What goes over the wire: OpenAI shapes, the handoff dialect, server-sent events, errors.
//!
//! Worker and gateway speak through these types alone, and neither a socket nor a runtime lives here. Three habits run through the crate:
//!
//! - A request stays the JSON object that the client sent ([`Body`]): fields nobody here knows pass through untouched and in their order.
//! - Whatever can be wrong with a request is an [`ApiError`], which knows its HTTP status and its body in OpenAI's shape.
//! - What belongs to vLLM in `kv_transfer_params` is opaque ([`handoff::TransferParams`]); only the key of this project is ever taken out.

pub mod body;
pub mod error;
pub mod handoff;
pub mod request;
pub mod response;
pub mod sse;

pub use body::Body;
pub use error::{ApiError, ErrorKind};
pub use handoff::TransferParams;
pub use request::{Prompt, StreamOptions};

/// Name of the header that carries one request id through gateway, prefill and decode worker.
pub const REQUEST_ID_HEADER: http::HeaderName = http::HeaderName::from_static("x-request-id");

/// The most bytes of a request id that are taken from a client; a longer one is replaced.
pub const MAX_REQUEST_ID_BYTES: usize = 256;

/// The request id in `headers`, where there is a usable one: visible ASCII, 1 to [`MAX_REQUEST_ID_BYTES`] bytes.
pub fn request_id(headers: &http::HeaderMap) -> Option<&str> {
    id(headers, &REQUEST_ID_HEADER)
}

/// The name of a handoff in `headers`, see [`handoff::HANDOFF_HEADER`], where there is a usable one: as for [`request_id`].
pub fn handoff_id(headers: &http::HeaderMap) -> Option<&str> {
    id(headers, &handoff::HANDOFF_HEADER)
}

fn id<'a>(headers: &'a http::HeaderMap, name: &http::HeaderName) -> Option<&'a str> {
    let text = headers.get(name)?.to_str().ok()?;
    let usable = (1..=MAX_REQUEST_ID_BYTES).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_graphic());
    usable.then_some(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn request_ids_are_taken_only_when_usable() {
        let check = |value: &str, expected: Option<&str>| {
            let mut headers = http::HeaderMap::new();
            headers.insert(REQUEST_ID_HEADER, value.parse().unwrap());
            assert_eq!(request_id(&headers), expected, "{value:?}");
        };
        check("abc-123", Some("abc-123"));
        check("", None);
        check("two words", None);
        check(
            &"x".repeat(MAX_REQUEST_ID_BYTES),
            Some(&"x".repeat(MAX_REQUEST_ID_BYTES)),
        );
        check(&"x".repeat(MAX_REQUEST_ID_BYTES + 1), None);
        assert_eq!(request_id(&http::HeaderMap::new()), None);
    }
}
