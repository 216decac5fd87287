//! What worker and gateway need to know of a request, read from its [`Body`].

use serde_json::{Map, Value};

use crate::body::{token_ids, type_name};
use crate::{ApiError, Body};

/// One prompt of a completion request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Text, still to be tokenised.
    Text(String),
    /// Token ids, used as they are.
    Tokens(Vec<u32>),
}

/// What `stream_options` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamOptions {
    /// A last chunk without choices carries the usage.
    pub include_usage: bool,
    /// Every chunk carries the usage so far (vLLM's extension).
    pub continuous_usage_stats: bool,
}

impl Body {
    /// The model asked for.
    ///
    /// # Errors
    /// 400 where it is not a string.
    pub fn model(&self) -> Result<Option<&str>, ApiError> {
        self.str("model")
    }

    /// Whether the reply is to be streamed.
    ///
    /// # Errors
    /// 400 where it is not a boolean.
    pub fn stream(&self) -> Result<bool, ApiError> {
        Ok(self.bool("stream")?.unwrap_or(false))
    }

    /// How many completions of each prompt; 1 unless told.
    ///
    /// # Errors
    /// 400 where it is not a positive integer.
    pub fn n(&self) -> Result<u32, ApiError> {
        Ok(self.count("n", 1)?.unwrap_or(1))
    }

    /// The limit on generated tokens: `max_completion_tokens`, or else `max_tokens`.
    ///
    /// # Errors
    /// 400 where one of them is not a whole number of at least 0.
    pub fn max_tokens(&self) -> Result<Option<u32>, ApiError> {
        let older = self.count("max_tokens", 0)?;
        Ok(self.count("max_completion_tokens", 0)?.or(older))
    }

    /// `stream_options`, which OpenAI allows only together with `stream`.
    ///
    /// # Errors
    /// 400 on a wrong type, and where the request does not stream.
    pub fn stream_options(&self) -> Result<StreamOptions, ApiError> {
        let Some(options) = self.object("stream_options")? else {
            return Ok(StreamOptions::default());
        };
        if !self.stream()? {
            return Err(ApiError::invalid_param(
                "stream_options",
                "`stream_options` is only allowed when `stream` is true",
            ));
        }
        let flag = |key: &str| match options.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(ApiError::invalid_param(
                format!("stream_options.{key}"),
                format!(
                    "expected `stream_options.{key}` to be a boolean, got {}",
                    type_name(other)
                ),
            )),
        };
        Ok(StreamOptions {
            include_usage: flag("include_usage")?,
            continuous_usage_stats: flag("continuous_usage_stats")?,
        })
    }

    /// Asks for a last chunk with the usage. Whether every chunk carries it stays the client's choice.
    pub fn ask_for_usage(&mut self) {
        let mut options = match self.get("stream_options") {
            Some(Value::Object(options)) => options.clone(),
            _ => Map::new(),
        };
        if options.get("include_usage") != Some(&Value::Bool(true)) {
            // It means nothing without the other, and would now.
            options.shift_remove("continuous_usage_stats");
            options.insert("include_usage".to_owned(), true.into());
        }
        self.set("stream_options", options);
    }

    /// The prompts of a completion request: a string, token ids, or a list of either.
    ///
    /// # Errors
    /// 400 where `prompt` is absent, empty, or anything else.
    pub fn prompts(&self) -> Result<Vec<Prompt>, ApiError> {
        let wrong = |got: &Value| {
            ApiError::invalid_param(
                "prompt",
                format!(
                    "expected `prompt` to be a string, a list of token ids, or a list of either, got {}",
                    type_name(got)
                ),
            )
        };
        let empty = || {
            ApiError::invalid_param(
                "prompt",
                "expected `prompt` to hold at least one prompt, got an empty list",
            )
        };
        let value = self
            .get("prompt")
            .ok_or_else(|| ApiError::invalid_param("prompt", "the field `prompt` is required"))?;
        let items = match value {
            Value::String(text) => return Ok(vec![Prompt::Text(text.clone())]),
            Value::Array(items) => items,
            other => return Err(wrong(other)),
        };
        match items.first() {
            None => Err(empty()),
            Some(Value::Number(_)) => Ok(vec![Prompt::Tokens(
                token_ids(value).ok_or_else(|| wrong(value))?,
            )]),
            Some(_) => items
                .iter()
                .map(|item| match item {
                    Value::String(text) => Ok(Prompt::Text(text.clone())),
                    Value::Array(ids) if ids.is_empty() => Err(empty()),
                    Value::Array(_) => token_ids(item)
                        .map(Prompt::Tokens)
                        .ok_or_else(|| wrong(item)),
                    other => Err(wrong(other)),
                })
                .collect(),
        }
    }

    /// The messages of a chat request, as chat templates take them: a `content` of text parts becomes one string, its parts on lines of
    /// their own as in vLLM.
    ///
    /// # Errors
    /// 400 where they are absent, empty, not a list of objects with a `role`, or with a `content` that is not text.
    pub fn messages(&self) -> Result<Vec<Value>, ApiError> {
        let wrong = |message: String| ApiError::invalid_param("messages", message);
        let messages = self
            .list("messages")?
            .ok_or_else(|| wrong("the field `messages` is required".into()))?;
        if messages.is_empty() {
            return Err(wrong("expected at least one message, got none".into()));
        }
        let mut plain = Vec::with_capacity(messages.len());
        for (index, message) in messages.iter().enumerate() {
            if message.get("role").and_then(Value::as_str).is_none() {
                return Err(wrong(format!(
                    "expected messages[{index}] to be an object with a string `role`"
                )));
            }
            let mut message = message.clone();
            if let Some(content) = message.get_mut("content") {
                *content = text_content(content).ok_or_else(|| {
                    wrong(format!(
                        "expected messages[{index}].content to be a string, null or a list of text parts: only text is supported"
                    ))
                })?;
            }
            plain.push(message);
        }
        Ok(plain)
    }

    /// The stop strings: `stop` as a string or a list of strings.
    ///
    /// # Errors
    /// 400 on anything else, and on an empty string.
    pub fn stop_strings(&self) -> Result<Vec<String>, ApiError> {
        let wrong = || {
            ApiError::invalid_param(
                "stop",
                "expected `stop` to be a non-empty string or a list of such",
            )
        };
        let strings = match self.get("stop") {
            None => Vec::new(),
            Some(Value::String(text)) => vec![text.clone()],
            Some(Value::Array(items)) => items
                .iter()
                .map(|item| item.as_str().map(str::to_owned))
                .collect::<Option<_>>()
                .ok_or_else(wrong)?,
            Some(_) => return Err(wrong()),
        };
        if strings.iter().any(String::is_empty) {
            return Err(wrong());
        }
        Ok(strings)
    }

    /// At most the first `limit` bytes of what the request asks about, for routing by prefix: the text of the first prompt, its token ids
    /// as little-endian words, or the messages as JSON. Requests that share a beginning share it here. Empty where there is nothing usable.
    pub fn routing_prefix(&self, limit: usize) -> Vec<u8> {
        let mut prefix = match (self.get("prompt"), self.get("messages")) {
            (Some(_), _) => match self
                .prompts()
                .ok()
                .and_then(|prompts| prompts.into_iter().next())
            {
                Some(Prompt::Text(text)) => text.into_bytes(),
                Some(Prompt::Tokens(ids)) => ids
                    .iter()
                    .take(limit.div_ceil(4))
                    .flat_map(|id| id.to_le_bytes())
                    .collect(),
                None => Vec::new(),
            },
            (None, Some(messages)) => messages.to_string().into_bytes(),
            (None, None) => Vec::new(),
        };
        prefix.truncate(limit);
        prefix
    }
}

/// A message's content as a string or null; none where it holds anything but text.
fn text_content(content: &Value) -> Option<Value> {
    match content {
        Value::Null | Value::String(_) => Some(content.clone()),
        Value::Array(parts) => parts
            .iter()
            .map(|part| {
                let text = part.get("type").and_then(Value::as_str) == Some("text");
                part.get("text").and_then(Value::as_str).filter(|_| text)
            })
            .collect::<Option<Vec<_>>>()
            .map(|texts| texts.join("\n").into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn body(text: &str) -> Body {
        Body::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn prompts_come_in_four_forms() {
        let text = |text: &str| Prompt::Text(text.into());
        for (json, expected) in [
            (r#"{"prompt":"a"}"#, vec![text("a")]),
            (r#"{"prompt":[1,2]}"#, vec![Prompt::Tokens(vec![1, 2])]),
            (r#"{"prompt":["a","b"]}"#, vec![text("a"), text("b")]),
            (
                r#"{"prompt":[[1],[2,3]]}"#,
                vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])],
            ),
        ] {
            assert_eq!(body(json).prompts().unwrap(), expected, "{json}");
        }
        for json in [
            "{}",
            r#"{"prompt":null}"#,
            r#"{"prompt":[]}"#,
            r#"{"prompt":[[]]}"#,
            r#"{"prompt":[1,"a"]}"#,
            r#"{"prompt":[-1]}"#,
            r#"{"prompt":[5000000000]}"#,
            r#"{"prompt":{}}"#,
            r#"{"prompt":[[1.5]]}"#,
            r#"{"prompt":["a",null]}"#,
        ] {
            let error = body(json).prompts().unwrap_err();
            assert_eq!(error.param.as_deref(), Some("prompt"), "{json}");
        }
    }

    #[test]
    fn the_newer_token_limit_wins() {
        for (json, expected) in [
            ("{}", None),
            (r#"{"max_tokens":7}"#, Some(7)),
            (r#"{"max_completion_tokens":8}"#, Some(8)),
            (r#"{"max_tokens":7,"max_completion_tokens":8}"#, Some(8)),
            (r#"{"max_tokens":7,"max_completion_tokens":null}"#, Some(7)),
        ] {
            assert_eq!(body(json).max_tokens().unwrap(), expected, "{json}");
        }
        assert!(body(r#"{"max_tokens":-1}"#).max_tokens().is_err());
    }

    #[test]
    fn stream_options_need_a_stream() {
        let usage = body(r#"{"stream":true,"stream_options":{"include_usage":true}}"#);
        assert!(usage.stream_options().unwrap().include_usage);
        assert_eq!(
            body("{}").stream_options().unwrap(),
            StreamOptions::default()
        );
        assert!(
            body(r#"{"stream_options":{"include_usage":true}}"#)
                .stream_options()
                .is_err()
        );
        let wrong = body(r#"{"stream":true,"stream_options":{"include_usage":1}}"#);
        assert!(
            wrong
                .stream_options()
                .unwrap_err()
                .message
                .contains("include_usage")
        );
    }

    #[test]
    fn usage_is_asked_for_beside_the_clients_own_options() {
        for (json, expected) in [
            ("{}", r#"{"include_usage":true}"#),
            (r#"{"stream_options":null}"#, r#"{"include_usage":true}"#),
            (
                r#"{"stream_options":{"continuous_usage_stats":true,"x":1}}"#,
                r#"{"x":1,"include_usage":true}"#,
            ),
            (
                r#"{"stream_options":{"continuous_usage_stats":true,"include_usage":true}}"#,
                r#"{"continuous_usage_stats":true,"include_usage":true}"#,
            ),
        ] {
            let mut body = body(json);
            body.ask_for_usage();
            assert_eq!(body.as_map()["stream_options"].to_string(), expected);
        }
    }

    #[test]
    fn stop_is_a_string_or_a_list() {
        assert_eq!(body(r#"{"stop":"x"}"#).stop_strings().unwrap(), ["x"]);
        assert_eq!(
            body(r#"{"stop":["x","y"]}"#).stop_strings().unwrap(),
            ["x", "y"]
        );
        assert!(body("{}").stop_strings().unwrap().is_empty());
        for json in [r#"{"stop":""}"#, r#"{"stop":[1]}"#, r#"{"stop":3}"#] {
            assert!(body(json).stop_strings().is_err(), "{json}");
        }
    }

    #[test]
    fn routing_prefixes_share_beginnings() {
        assert_eq!(body(r#"{"prompt":"abcdef"}"#).routing_prefix(4), b"abcd");
        assert_eq!(
            body(r#"{"prompt":[1,2,3]}"#).routing_prefix(6),
            [1, 0, 0, 0, 2, 0]
        );
        assert_eq!(body(r#"{"prompt":["ab","cd"]}"#).routing_prefix(9), b"ab");
        let chat = body(r#"{"messages":[{"role":"user","content":"hello"}]}"#);
        assert_eq!(chat.routing_prefix(12), br#"[{"role":"us"#[..]);
        assert!(body("{}").routing_prefix(9).is_empty());
    }

    #[test]
    fn message_contents_are_text_or_refused() {
        let contents = |content: &str| {
            body(&format!(
                r#"{{"messages":[{{"role":"user","content":{content}}}]}}"#
            ))
            .messages()
            .map(|messages| messages[0]["content"].clone())
        };
        for (content, expected) in [
            (r#""hi""#, json!("hi")),
            ("null", Value::Null),
            (r#"[{"type":"text","text":"hi"}]"#, json!("hi")),
            (
                r#"[{"type":"text","text":"a"},{"type":"text","text":"b"}]"#,
                json!("a\nb"),
            ),
        ] {
            assert_eq!(contents(content).unwrap(), expected, "{content}");
        }
        for content in ["5", r#"{"a":1}"#, r#"[{"type":"image_url"}]"#, r#"["hi"]"#] {
            let error = contents(content).unwrap_err();
            assert!(error.message.contains("messages[0].content"), "{content}");
        }
    }
}
