//! What this project adds to the parameters of a handoff, under its one key.

use experts::{ModelShape, PromptCounts, WireError, wire};
use serde_json::{Map, Value};

use super::{KV_TRANSFER_PARAMS, TransferParams};
use crate::{ApiError, Body};

const PROMPT_COUNTS: &str = "prompt_counts";
const OUTPUT_COUNTS: &str = "output_counts";
const GATE_PROBABILITIES: &str = "gate_probabilities";
const GATE_LOGITS: &str = "gate_logits";

/// The value under the key, in a reply: counts and gate sums in the text form of [`experts::wire`].
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Extras {
    /// Expert counts over the prompt.
    pub prompt_counts: Option<PromptCounts>,
    /// Expert counts over the generated tokens that were fed back.
    pub output_counts: Option<PromptCounts>,
    /// Sums of gate probabilities over the prompt, `layers x experts`.
    pub gate_probabilities: Option<Vec<f32>>,
    /// Sums of gate logits over the prompt, `layers x experts`.
    pub gate_logits: Option<Vec<f32>>,
}

/// A value under this project's key that is not one of ours.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExtrasError {
    /// It is not an object, or a member is not a string.
    #[error("expected `{at}` in the KV transfer parameters to be {expected}")]
    Type {
        /// Where.
        at: &'static str,
        /// What was expected.
        expected: &'static str,
    },
    /// A member cannot be decoded.
    #[error("`{at}` in the KV transfer parameters: {source}")]
    Wire {
        /// Where.
        at: &'static str,
        /// Why.
        source: WireError,
    },
    /// Gate sums without the counts that say their shape.
    #[error("gate sums in the KV transfer parameters come without prompt counts")]
    NoShape,
}

impl Extras {
    /// The value that goes under the key.
    pub fn to_value(&self) -> Value {
        let counts = |counts: &Option<PromptCounts>| counts.as_ref().map(PromptCounts::encode);
        let sums = |sums: &Option<Vec<f32>>| sums.as_deref().map(wire::encode_values);
        let members = [
            (PROMPT_COUNTS, counts(&self.prompt_counts)),
            (OUTPUT_COUNTS, counts(&self.output_counts)),
            (GATE_PROBABILITIES, sums(&self.gate_probabilities)),
            (GATE_LOGITS, sums(&self.gate_logits)),
        ];
        let present = members
            .into_iter()
            .filter_map(|(key, text)| Some((key.to_owned(), text?.into())));
        Value::Object(present.collect())
    }

    /// Reads the value under the key.
    ///
    /// # Errors
    /// Where it is not what [`Extras::to_value`] writes; members nobody knows are ignored.
    pub fn read(value: &Value) -> Result<Self, ExtrasError> {
        let map = value.as_object().ok_or(ExtrasError::Type {
            at: wire::KEY,
            expected: "an object",
        })?;
        let prompt_counts = counts(map, PROMPT_COUNTS)?;
        let shape = prompt_counts.as_ref().map(PromptCounts::shape);
        Ok(Self {
            output_counts: counts(map, OUTPUT_COUNTS)?,
            gate_probabilities: sums(map, GATE_PROBABILITIES, shape)?,
            gate_logits: sums(map, GATE_LOGITS, shape)?,
            prompt_counts,
        })
    }
}

fn text<'a>(map: &'a Map<String, Value>, at: &'static str) -> Result<Option<&'a str>, ExtrasError> {
    match map.get(at) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(ExtrasError::Type {
            at,
            expected: "a string",
        }),
    }
}

fn counts(map: &Map<String, Value>, at: &'static str) -> Result<Option<PromptCounts>, ExtrasError> {
    let decode =
        |text| PromptCounts::decode(text).map_err(|source| ExtrasError::Wire { at, source });
    text(map, at)?.map(decode).transpose()
}

fn sums(
    map: &Map<String, Value>,
    at: &'static str,
    shape: Option<ModelShape>,
) -> Result<Option<Vec<f32>>, ExtrasError> {
    let Some(text) = text(map, at)? else {
        return Ok(None);
    };
    let shape = shape.ok_or(ExtrasError::NoShape)?;
    let values =
        wire::decode_values(text, shape).map_err(|source| ExtrasError::Wire { at, source })?;
    Ok(Some(values))
}

/// What a request asks to be told beside its tokens: `"kv_transfer_params": {"colocate": {"want": [...]}}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Want {
    /// Expert counts over the output. Prompt counts come with whatever is wanted.
    pub output_counts: bool,
    /// Sums of gate probabilities over the prompt.
    pub gate_probabilities: bool,
    /// Sums of gate logits over the prompt.
    pub gate_logits: bool,
}

impl Want {
    /// All there is.
    pub const ALL: Self = Self {
        output_counts: true,
        gate_probabilities: true,
        gate_logits: true,
    };

    /// What `body` asks for; none where it does not ask at all, or only passes on what a prefill worker's reply carried, as a router that
    /// knows nothing of our key does.
    ///
    /// # Errors
    /// 400 where the key is there and does not hold a list of known words under `want`.
    pub fn of_request(body: &Body) -> Result<Option<Self>, ApiError> {
        let Some(params) = body.object(KV_TRANSFER_PARAMS)? else {
            return Ok(None);
        };
        let Some(ours) = params.get(wire::KEY) else {
            return Ok(None);
        };
        if ours.get(PROMPT_COUNTS).is_some() {
            return Ok(None);
        }
        let wrong = || {
            ApiError::invalid_param(
                format!("{KV_TRANSFER_PARAMS}.{}", wire::KEY),
                format!(
                    "expected an object with a list `want` of `{OUTPUT_COUNTS}`, `{GATE_PROBABILITIES}`, `{GATE_LOGITS}`, got {ours}"
                ),
            )
        };
        let mut want = Self::default();
        for word in ours
            .get("want")
            .and_then(Value::as_array)
            .ok_or_else(wrong)?
        {
            match word.as_str() {
                Some(PROMPT_COUNTS) => {}
                Some(OUTPUT_COUNTS) => want.output_counts = true,
                Some(GATE_PROBABILITIES) => want.gate_probabilities = true,
                Some(GATE_LOGITS) => want.gate_logits = true,
                _ => return Err(wrong()),
            }
        }
        Ok(Some(want))
    }

    /// Asks for this in `body`, beside what else its parameters say.
    pub fn ask(self, body: &mut Body) {
        let words = [
            (self.output_counts, OUTPUT_COUNTS),
            (self.gate_probabilities, GATE_PROBABILITIES),
            (self.gate_logits, GATE_LOGITS),
        ];
        let want: Vec<Value> = words
            .into_iter()
            .filter(|(asked, _)| *asked)
            .map(|(_, word)| word.into())
            .collect();
        let mut params = match body.get(KV_TRANSFER_PARAMS) {
            Some(Value::Object(map)) => map.clone(),
            _ => Map::new(),
        };
        params.insert(wire::KEY.to_owned(), serde_json::json!({ "want": want }));
        body.set(KV_TRANSFER_PARAMS, params);
    }
}

impl TransferParams {
    /// Parameters that hand nothing over and only tell `extras`.
    pub fn of_extras(extras: &Extras) -> Self {
        Self(Map::from_iter([(wire::KEY.to_owned(), extras.to_value())]))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use experts::ExpertCounts;
    use serde_json::json;

    fn some_counts(tokens: u32) -> PromptCounts {
        let shape = ModelShape {
            layers: 2,
            experts: 4,
            top_k: 1,
        };
        let cells = vec![tokens, 0, 0, 0, 0, tokens, 0, 0];
        PromptCounts::new(ExpertCounts::from_vec(shape, cells).unwrap(), tokens).unwrap()
    }

    fn all() -> Extras {
        Extras {
            prompt_counts: Some(some_counts(3)),
            output_counts: Some(some_counts(2)),
            gate_probabilities: Some(vec![0.5; 8]),
            gate_logits: Some(vec![-1.0; 8]),
        }
    }

    #[test]
    fn extras_go_round() {
        for extras in [
            all(),
            Extras::default(),
            Extras {
                gate_logits: None,
                ..all()
            },
        ] {
            assert_eq!(Extras::read(&extras.to_value()).unwrap(), extras);
        }
    }

    #[test]
    fn extras_are_taken_out() {
        let mut params = TransferParams::from(
            json!({"a": 1, "colocate": all().to_value(), "b": 2})
                .as_object()
                .unwrap()
                .clone(),
        );
        let taken = params.take_extras().unwrap();
        assert_eq!(Extras::read(&taken).unwrap(), all());
        assert_eq!(Value::from(params.clone()).to_string(), r#"{"a":1,"b":2}"#);
        assert_eq!(params.take_extras(), None);
    }

    #[test]
    fn foreign_values_are_errors() {
        for value in [
            json!(3),
            json!({"prompt_counts": 3}),
            json!({"prompt_counts": "AAAA"}),
            json!({"gate_logits": "AAAA"}),
            json!({"prompt_counts": some_counts(3).encode(), "gate_logits": "AAAA"}),
        ] {
            assert!(Extras::read(&value).is_err(), "{value}");
        }
    }

    #[test]
    fn wants_are_asked_and_read() {
        let mut body = Body::parse(br#"{"prompt":"p"}"#).unwrap();
        assert_eq!(Want::of_request(&body).unwrap(), None);
        Want::ALL.ask(&mut body);
        assert_eq!(
            body.to_string(),
            r#"{"prompt":"p","kv_transfer_params":{"colocate":{"want":["output_counts","gate_probabilities","gate_logits"]}}}"#
        );
        assert_eq!(Want::of_request(&body).unwrap(), Some(Want::ALL));
        let wrong =
            Body::parse(br#"{"kv_transfer_params":{"colocate":{"want":["everything"]}}}"#).unwrap();
        let passed_on =
            Body::parse(br#"{"kv_transfer_params":{"colocate":{"prompt_counts":"AQ"}}}"#).unwrap();
        assert_eq!(Want::of_request(&passed_on).unwrap(), None);
        assert!(Want::of_request(&wrong).is_err());
    }
}
