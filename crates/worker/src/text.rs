//! Between text and tokens.

use std::path::Path;
use std::sync::Arc;

use engine::{ChatOptions, LoadError, Tokenizer, TokenizerError};
use protocol::{ApiError, Body};
use serde_json::{Map, Value};

/// The model's tokenizer and chat template. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Text(Arc<Tokenizer>);

impl Text {
    /// Reads them from a model's directory.
    ///
    /// # Errors
    /// A file is missing or damaged.
    pub(crate) fn load(dir: &Path) -> Result<Self, LoadError> {
        Ok(Self(Arc::new(Tokenizer::load(dir)?)))
    }

    /// The tokens of a completion's prompt.
    ///
    /// # Errors
    /// 400 where the tokenizer refuses the text.
    pub(crate) fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, ApiError> {
        self.0
            .encode(text, add_special_tokens)
            .map_err(|error| ApiError::invalid_param("prompt", error.to_string()))
    }

    /// The text of a prompt that came as token ids.
    ///
    /// # Errors
    /// 400 where the tokenizer refuses the ids.
    pub(crate) fn decode(&self, ids: &[u32]) -> Result<String, ApiError> {
        self.0
            .decode(ids, false)
            .map_err(|error| ApiError::invalid_param("prompt", error.to_string()))
    }

    /// One token by itself, as text and as bytes.
    pub(crate) fn piece(&self, id: u32) -> (String, Vec<u8>) {
        // A model's vocabulary may be padded with ids that no token has: they stand for no bytes.
        let bytes = self.0.token_bytes(id).unwrap_or_default();
        (String::from_utf8_lossy(&bytes).into_owned(), bytes)
    }

    /// The tokens of a chat, as the model's template renders it.
    ///
    /// # Errors
    /// 400 where the model has no template, or the template refuses the messages.
    pub(crate) fn chat(&self, body: &Body) -> Result<Vec<u32>, ApiError> {
        let options = ChatOptions {
            add_generation_prompt: body.bool("add_generation_prompt")?.unwrap_or(true),
            tools: Value::Null,
            variables: body
                .object("chat_template_kwargs")?
                .map_or_else(Map::new, Clone::clone),
        };
        let messages = Value::from(body.messages()?);
        self.0
            .render_chat(&messages, &options)
            .and_then(|text| self.0.encode(&text, false))
            .map_err(|error| ApiError::invalid_param("messages", error.to_string()))
    }

    /// For the text of one completion.
    pub(crate) fn detokenizer(&self, skip_special_tokens: bool) -> Detokenizer {
        Detokenizer {
            text: self.clone(),
            state: engine::Detokenizer::new(skip_special_tokens),
        }
    }
}

/// Turns the tokens of one completion into text.
pub(crate) struct Detokenizer {
    text: Text,
    state: engine::Detokenizer,
}

impl Detokenizer {
    /// The text that a token completes.
    ///
    /// # Errors
    /// The tokenizer refuses the token.
    pub(crate) fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.state.push(&self.text.0, id)
    }

    /// What is left after the last token.
    ///
    /// # Errors
    /// The tokenizer refuses the tokens.
    pub(crate) fn finish(&mut self) -> Result<String, TokenizerError> {
        self.state.finish(&self.text.0)
    }
}
