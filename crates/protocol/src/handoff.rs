//! The handoff between a prefill and a decode worker, in vLLM's own dialect.
//!
//! 1. [`prefill_body`] turns the client's request into the one for the prefill worker: one token, no streaming, `do_remote_decode`.
//! 2. The prefill worker's reply carries [`TransferParams`] under [`KV_TRANSFER_PARAMS`]. They are vLLM's affair, and opaque here, apart from this
//!    project's one key, [`experts::wire::KEY`], which [`TransferParams::take_extras`] takes out.
//! 3. [`decode_body`] puts the rest beside the client's own request, for the decode worker, which pulls the prompt's KV blocks.
//!
//! Embedded workers speak the same JSON, and move blocks by their own transfer. Their parameters say so (`"transport": "colocate"`), so that a pool
//! that mixes them with vLLM can be refused: [`TransferParams::transport`].

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::body::type_name;
use crate::{ApiError, Body};

mod extras;
pub use extras::{Extras, ExtrasError, Want};

/// The field of requests and replies that carries the parameters.
pub const KV_TRANSFER_PARAMS: &str = "kv_transfer_params";

/// Name of the request header that gives a prefill a name of its sender's choice, unique among all. With it, in the field [`HANDOFF`] of a
/// body for `/colocate/release`, an embedded worker is told to forget a prefill whose reply has not come, and which it may have answered already.
pub const HANDOFF_HEADER: http::HeaderName = http::HeaderName::from_static("x-colocate-handoff");

/// See [`HANDOFF_HEADER`].
pub const HANDOFF: &str = "handoff";

/// The longest name of an engine, a request or a host in the parameters of embedded workers, in bytes.
pub const MAX_NAME_BYTES: usize = 256;

/// The value of `transport` in the parameters of embedded workers.
pub const TRANSPORT: &str = "colocate";

/// The request for the prefill worker, made of the client's: everything it says, with one token to generate, not streamed.
///
/// `min_tokens` 1 keeps an end-of-sequence token from ending the request early: an immediate end is the decode worker's to emit.
pub fn prefill_body(client: &Body) -> Body {
    let mut body = client.clone();
    body.set("max_tokens", 1);
    if body.has("max_completion_tokens") {
        body.set("max_completion_tokens", 1);
    }
    body.set("min_tokens", 1);
    body.set("stream", false);
    body.remove("stream_options");
    body.set(
        KV_TRANSFER_PARAMS,
        json!({"do_remote_decode": true, "do_remote_prefill": false}),
    );
    body
}

/// The request for the decode worker: the client's own, and the parameters that the prefill worker gave, without this project's key.
pub fn decode_body(client: &Body, params: &TransferParams) -> Body {
    let mut params = params.clone();
    params.take_extras();
    let mut body = client.clone();
    body.set(KV_TRANSFER_PARAMS, params.0);
    body
}

/// How a prompt's KV blocks move from the worker that gave the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// By the transfer of the embedded workers.
    Embedded,
    /// By a KV connector of vLLM.
    Vllm,
}

/// The parameters of a handoff: an object that only the workers at its ends understand.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TransferParams(Map<String, Value>);

impl TransferParams {
    /// Those of a request.
    ///
    /// # Errors
    /// 400 where the field is there and not an object.
    pub fn of_request(body: &Body) -> Result<Option<Self>, ApiError> {
        Ok(body.object(KV_TRANSFER_PARAMS)?.cloned().map(Self))
    }

    /// Those of a reply's JSON object, where it has any.
    pub fn of_reply(reply: &Value) -> Option<Self> {
        reply
            .get(KV_TRANSFER_PARAMS)?
            .as_object()
            .cloned()
            .map(Self)
    }

    /// The object itself.
    pub fn as_map(&self) -> &Map<String, Value> {
        &self.0
    }

    /// How blocks move from the worker that gave these.
    pub fn transport(&self) -> Transport {
        match self.0.get("transport").and_then(Value::as_str) {
            Some(TRANSPORT) => Transport::Embedded,
            _ => Transport::Vllm,
        }
    }

    /// Whether a prefill worker is asked to keep the prompt's blocks for another worker.
    ///
    /// # Errors
    /// 400 where the field is not a boolean.
    pub fn do_remote_decode(&self) -> Result<bool, ApiError> {
        self.flag("do_remote_decode")
    }

    /// Whether a decode worker is asked to take the prompt's blocks from another worker.
    ///
    /// # Errors
    /// 400 where the field is not a boolean.
    pub fn do_remote_prefill(&self) -> Result<bool, ApiError> {
        self.flag("do_remote_prefill")
    }

    /// Tokens whose KV the prefill worker holds, where it says.
    pub fn remote_num_tokens(&self) -> Option<u64> {
        self.0.get("remote_num_tokens")?.as_u64()
    }

    /// Takes this project's key out.
    pub fn take_extras(&mut self) -> Option<Value> {
        self.0.shift_remove(experts::wire::KEY)
    }

    fn flag(&self, key: &str) -> Result<bool, ApiError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(ApiError::invalid_param(
                format!("{KV_TRANSFER_PARAMS}.{key}"),
                format!(
                    "expected `{KV_TRANSFER_PARAMS}.{key}` to be a boolean, got {}",
                    type_name(other)
                ),
            )),
        }
    }
}

impl From<Map<String, Value>> for TransferParams {
    fn from(map: Map<String, Value>) -> Self {
        Self(map)
    }
}

impl From<TransferParams> for Value {
    fn from(params: TransferParams) -> Self {
        Self::Object(params.0)
    }
}

/// What an embedded prefill worker tells the decode worker, by vLLM's names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddedParams {
    /// True: the prompt was computed elsewhere.
    pub do_remote_prefill: bool,
    /// False: and is not to be handed on.
    pub do_remote_decode: bool,
    /// The blocks on the prefill worker, one list per KV group. Informative: blocks are asked for by their place in the prompt.
    pub remote_block_ids: Vec<Vec<u32>>,
    /// Names one run of one prefill worker: after a restart it is another.
    pub remote_engine_id: String,
    /// The request's name on the prefill worker.
    pub remote_request_id: String,
    /// Where to pull from.
    pub remote_host: String,
    /// Where to pull from.
    pub remote_port: u16,
    /// Always 1.
    pub tp_size: u32,
    /// Tokens whose KV is held: the whole prompt.
    pub remote_num_tokens: u32,
    /// Of these, tokens that the prefill worker found in its cache.
    pub remote_prefill_cached_tokens: u32,
    /// `pull`.
    pub transfer_mode: String,
    /// [`TRANSPORT`].
    pub transport: String,
}

impl EmbeddedParams {
    /// Reads the parameters that a decode worker was given.
    ///
    /// # Errors
    /// 400 where they are not an embedded worker's, or damaged.
    pub fn read(params: &TransferParams) -> Result<Self, ApiError> {
        if params.transport() != Transport::Embedded {
            return Err(ApiError::kv_transfer_incompatible(format!(
                "expected `{KV_TRANSFER_PARAMS}` of an embedded worker (`transport`: `{TRANSPORT}`), got those of another engine: \
                 embedded and vLLM workers do not share KV blocks"
            )));
        }
        let read: Self =
            serde_json::from_value(Value::Object(params.0.clone())).map_err(|error| {
                ApiError::kv_transfer_incompatible(format!(
                    "`{KV_TRANSFER_PARAMS}` cannot be read: {error}"
                ))
            })?;
        for (key, name) in [
            ("remote_engine_id", &read.remote_engine_id),
            ("remote_request_id", &read.remote_request_id),
            ("remote_host", &read.remote_host),
        ] {
            if name.len() > MAX_NAME_BYTES {
                return Err(ApiError::kv_transfer_incompatible(format!(
                    "expected `{key}` of at most {MAX_NAME_BYTES} bytes, got {}",
                    name.len()
                )));
            }
        }
        if read.transfer_mode != "pull" || read.tp_size != 1 {
            return Err(ApiError::kv_transfer_incompatible(format!(
                "expected transfer_mode `pull` and tp_size 1, got `{}` and {}",
                read.transfer_mode, read.tp_size
            )));
        }
        Ok(read)
    }

    /// The parameters as they go into a reply, with `extras` under this project's key.
    ///
    /// # Errors
    /// Never in practice: the fields are all plain JSON values.
    pub fn into_params(self, extras: Option<&Extras>) -> Result<TransferParams, serde_json::Error> {
        let mut map = match serde_json::to_value(self)? {
            Value::Object(map) => map,
            _ => Map::new(),
        };
        if let Some(extras) = extras {
            map.insert(experts::wire::KEY.to_owned(), extras.to_value());
        }
        Ok(TransferParams(map))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn body(text: &str) -> Body {
        Body::parse(text.as_bytes()).unwrap()
    }

    fn params(value: &Value) -> TransferParams {
        TransferParams::of_reply(&json!({ "kv_transfer_params": value })).unwrap()
    }

    #[test]
    fn prefill_bodies() {
        let check = |client: &str, expected: &str| {
            assert_eq!(prefill_body(&body(client)).to_string(), expected)
        };
        check(
            r#"{"model":"m","prompt":"p","max_tokens":50,"stream":true,"stream_options":{"include_usage":true},"x":1}"#,
            r#"{"model":"m","prompt":"p","max_tokens":1,"stream":false,"x":1,"min_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}"#,
        );
        check(
            r#"{"max_completion_tokens":9,"messages":[]}"#,
            r#"{"max_completion_tokens":1,"messages":[],"max_tokens":1,"min_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}"#,
        );
    }

    #[test]
    fn decode_bodies_carry_what_came_but_our_key() {
        let client = body(r#"{"prompt":"p","stream":true,"kv_transfer_params":{"mine":1},"x":2}"#);
        let came = params(
            &json!({"remote_host": "h", "colocate": {"prompt_counts": "x"}, "unknown": [1]}),
        );
        assert_eq!(
            decode_body(&client, &came).to_string(),
            r#"{"prompt":"p","stream":true,"kv_transfer_params":{"remote_host":"h","unknown":[1]},"x":2}"#
        );
    }

    fn embedded() -> EmbeddedParams {
        EmbeddedParams {
            do_remote_prefill: true,
            do_remote_decode: false,
            remote_block_ids: vec![vec![3, 4]],
            remote_engine_id: "e".into(),
            remote_request_id: "7".into(),
            remote_host: "127.0.0.1".into(),
            remote_port: 9,
            tp_size: 1,
            remote_num_tokens: 20,
            remote_prefill_cached_tokens: 16,
            transfer_mode: "pull".into(),
            transport: TRANSPORT.into(),
        }
    }

    #[test]
    fn embedded_parameters_go_round() {
        let sent = embedded().into_params(None).unwrap();
        assert_eq!(sent.transport(), Transport::Embedded);
        assert_eq!(sent.remote_num_tokens(), Some(20));
        assert!(sent.do_remote_prefill().unwrap() && !sent.do_remote_decode().unwrap());
        assert_eq!(EmbeddedParams::read(&sent).unwrap(), embedded());
    }

    #[test]
    fn foreign_or_damaged_parameters_are_refused() {
        let vllm = params(
            &json!({"do_remote_prefill": true, "remote_host": "h", "transfer_mode": "pull"}),
        );
        assert_eq!(vllm.transport(), Transport::Vllm);
        let error = EmbeddedParams::read(&vllm).unwrap_err();
        assert!(error.has_code(ApiError::KV_TRANSFER_INCOMPATIBLE) && error.status.as_u16() == 400);
        for (key, value) in [
            ("remote_port", json!(70_000)),
            ("remote_port", json!("9")),
            ("transfer_mode", json!("push")),
            ("tp_size", json!(2)),
            ("remote_request_id", json!(null)),
            ("remote_num_tokens", json!(-1)),
            ("remote_engine_id", json!("x".repeat(MAX_NAME_BYTES + 1))),
            ("remote_request_id", json!("x".repeat(1 << 20))),
            ("remote_host", json!("x".repeat(1 << 20))),
        ] {
            let mut map = embedded().into_params(None).unwrap().as_map().clone();
            map.insert(key.into(), value.clone());
            let error = EmbeddedParams::read(&map.into()).unwrap_err();
            assert_eq!(error.status.as_u16(), 400, "{key}: {value}");
        }
    }

    #[test]
    fn flags_must_be_booleans() {
        assert!(!TransferParams::default().do_remote_decode().unwrap());
        let error = params(&json!({"do_remote_decode": 1}))
            .do_remote_decode()
            .unwrap_err();
        assert_eq!(
            error.param.as_deref(),
            Some("kv_transfer_params.do_remote_decode")
        );
        assert!(TransferParams::of_request(&body(r#"{"kv_transfer_params":3}"#)).is_err());
        assert_eq!(TransferParams::of_request(&body("{}")).unwrap(), None);
    }
}
