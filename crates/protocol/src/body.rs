//! A request body, kept as the JSON object that the client sent.

use bytes::Bytes;
use serde_json::{Map, Value};

use crate::ApiError;

/// An OpenAI request: a JSON object with its unknown fields intact and its keys in the client's order.
///
/// The typed accessors treat `null` like an absent field, as OpenAI's server does, and answer a wrong type with a 400 that names the field.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Body(Map<String, Value>);

impl Body {
    /// Reads a request.
    ///
    /// # Errors
    /// 400 where `bytes` are not JSON, or not an object.
    pub fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(map)) => Ok(Self(map)),
            Ok(other) => Err(ApiError::invalid(format!(
                "expected the request body to be a JSON object, got {}",
                type_name(&other)
            ))),
            Err(error) => Err(ApiError::invalid(format!(
                "the request body is not JSON: {error}"
            ))),
        }
    }

    /// The object itself.
    pub fn as_map(&self) -> &Map<String, Value> {
        &self.0
    }

    /// The request as JSON text.
    pub fn to_bytes(&self) -> Bytes {
        Bytes::from(self.to_string())
    }

    /// The field `key`, unless it is absent or null.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// Whether the field is there and not null.
    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// Sets a field, in its old place where it had one.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.0.insert(key.to_owned(), value.into());
    }

    /// Takes a field out; the order of the others stays.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        self.0.shift_remove(key)
    }

    /// A field that must be a string.
    ///
    /// # Errors
    /// 400 where it is anything else.
    pub fn str(&self, key: &str) -> Result<Option<&str>, ApiError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A field that must be a boolean.
    ///
    /// # Errors
    /// 400 where it is anything else.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, ApiError> {
        self.typed(key, "a boolean", Value::as_bool)
    }

    /// A field that must be a number.
    ///
    /// # Errors
    /// 400 where it is anything else.
    pub fn f64(&self, key: &str) -> Result<Option<f64>, ApiError> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// A field that must be a whole number, which may be negative. `2.0` is a whole number too.
    ///
    /// # Errors
    /// 400 where it is anything else.
    pub fn i64(&self, key: &str) -> Result<Option<i64>, ApiError> {
        self.typed(key, "an integer", whole)
    }

    /// A field that must be a whole number of at least `least`.
    ///
    /// # Errors
    /// 400 where it is anything else.
    pub fn count(&self, key: &str, least: u32) -> Result<Option<u32>, ApiError> {
        let Some(number) = self.i64(key)? else {
            return Ok(None);
        };
        match u32::try_from(number) {
            Ok(number) if number >= least => Ok(Some(number)),
            _ => Err(ApiError::invalid_param(
                key,
                format!("expected `{key}` to be an integer of at least {least}, got {number}"),
            )),
        }
    }

    /// A field that must be an object.
    ///
    /// # Errors
    /// 400 where it is anything else.
    pub fn object(&self, key: &str) -> Result<Option<&Map<String, Value>>, ApiError> {
        self.typed(key, "an object", Value::as_object)
    }

    /// A field that must be a list.
    ///
    /// # Errors
    /// 400 where it is anything else.
    pub fn list(&self, key: &str) -> Result<Option<&[Value]>, ApiError> {
        self.typed(key, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// A field that must be a list of token ids.
    ///
    /// # Errors
    /// 400 where it is anything else.
    pub fn token_ids(&self, key: &str) -> Result<Option<Vec<u32>>, ApiError> {
        self.typed(key, "a list of token ids", token_ids)
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(ApiError::invalid_param(
                key,
                format!(
                    "expected `{key}` to be {expected}, got {}",
                    type_name(value)
                ),
            )),
        }
    }
}

impl From<Map<String, Value>> for Body {
    fn from(map: Map<String, Value>) -> Self {
        Self(map)
    }
}

impl std::fmt::Display for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match serde_json::to_string(&self.0) {
            Ok(text) => f.write_str(&text),
            Err(_) => Err(std::fmt::Error),
        }
    }
}

/// `value` as token ids, where it is a list of nothing else.
pub(crate) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let ids = value.as_array()?.iter();
    ids.map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
        .collect()
}

/// `value` as a whole number, also where it is written as `2.0`.
fn whole(value: &Value) -> Option<i64> {
    // Every whole f64 below 2^53 is exact as i64.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && number.abs() <= EXACT).then_some(number as i64)
    })
}

/// What a JSON value is, for a message.
pub(crate) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number that does not fit",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn body(text: &str) -> Body {
        Body::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn unknown_fields_and_their_order_survive() {
        let text = r#"{"zeta":1,"model":"m","x_unknown":{"b":[1,null],"a":0.5},"alpha":"é"}"#;
        let mut kept = body(text);
        assert_eq!(kept.to_string(), text);
        kept.set("model", "other");
        assert_eq!(kept.to_string(), text.replace("\"m\"", "\"other\""));
        kept.remove("zeta");
        assert!(
            kept.to_string()
                .starts_with(r#"{"model":"other","x_unknown""#)
        );
    }

    #[test]
    fn only_objects_are_requests() {
        for (text, part) in [
            ("[]", "a list"),
            ("3", "a number"),
            ("{", "not JSON"),
            ("", "not JSON"),
            ("null", "null"),
        ] {
            let error = Body::parse(text.as_bytes()).unwrap_err();
            assert!(error.message.contains(part), "{text:?}: {error}");
            assert_eq!(error.status, http::StatusCode::BAD_REQUEST);
        }
    }

    #[test]
    fn typed_accessors_name_the_field_at_fault() {
        let kept = body(
            r#"{"s":"x","b":true,"f":0.5,"i":-3,"w":2.0,"o":{},"l":[1,2],"n":null,"big":1e300}"#,
        );
        assert_eq!(kept.str("s").unwrap(), Some("x"));
        assert_eq!(kept.bool("b").unwrap(), Some(true));
        assert_eq!(kept.f64("f").unwrap(), Some(0.5));
        assert_eq!(kept.i64("i").unwrap(), Some(-3));
        assert_eq!(kept.count("w", 2).unwrap(), Some(2));
        assert!(kept.object("o").unwrap().unwrap().is_empty());
        assert_eq!(kept.token_ids("l").unwrap(), Some(vec![1, 2]));
        for key in ["n", "absent"] {
            assert!(!kept.has(key));
            assert_eq!(kept.str(key).unwrap(), None);
            assert_eq!(kept.count(key, 1).unwrap(), None);
        }
        let errors = [
            kept.str("i").unwrap_err(),
            kept.bool("s").unwrap_err(),
            kept.f64("l").unwrap_err(),
            kept.i64("f").unwrap_err(),
            kept.i64("big").unwrap_err(),
            kept.count("i", 0).unwrap_err(),
            kept.count("w", 3).unwrap_err(),
            kept.object("l").unwrap_err(),
            kept.list("o").unwrap_err(),
            kept.token_ids("s").unwrap_err(),
        ];
        let at_fault: Vec<_> = errors
            .iter()
            .map(|error| error.param.clone().unwrap())
            .collect();
        assert_eq!(
            at_fault,
            ["i", "s", "l", "f", "big", "i", "w", "l", "o", "s"]
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_request_or_a_clear_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Err(error) = Body::parse(&bytes) {
                prop_assert_eq!(error.status.as_u16(), 400);
            }
        }
    }
}
