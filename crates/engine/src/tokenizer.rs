//! Between text and token ids: encoding, streaming decoding, chat templates.

mod stream;
mod template;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use tokenizers::DecoderWrapper;

pub use stream::Detokenizer;
pub use template::ChatOptions;

use crate::checkpoint::LoadError;
use template::ChatTemplate;

/// Why text could not be encoded, ids decoded, or a chat rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The tokenizer refuses the text.
    #[error("cannot encode the text: {0}")]
    Encode(String),
    /// The tokenizer refuses the ids.
    #[error("cannot decode the tokens: {0}")]
    Decode(String),
    /// An id that no token has.
    #[error("token id {id} is out of range, expected less than {limit}")]
    UnknownId {
        /// The id.
        id: u32,
        /// One more than the largest id.
        limit: usize,
    },
    /// The model comes without a chat template.
    #[error("the model has no chat template")]
    NoChatTemplate,
    /// The chat template refuses the messages, or is broken.
    #[error("chat template: {0}")]
    ChatTemplate(String),
}

/// A model's tokenizer and chat template.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Bytes of every token, where tokens are bytes.
    bytes: Option<TokenBytes>,
    special: HashSet<u32>,
    vocab_size: usize,
    template: Option<ChatTemplate>,
    eos_token_id: Option<u32>,
}

/// The bytes that each token stands for, of a tokenizer with a byte-level decoder.
#[derive(Debug)]
struct TokenBytes {
    bytes: Vec<u8>,
    /// Token `i` is `bytes[starts[i]..starts[i + 1]]`.
    starts: Vec<u32>,
}

impl TokenBytes {
    fn get(&self, id: u32) -> Option<&[u8]> {
        let start = *self.starts.get(id as usize)?;
        let end = *self.starts.get(id as usize + 1)?;
        Some(&self.bytes[start as usize..end as usize])
    }
}

/// A special token in tokenizer_config.json: its text, or an object that has it.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum TokenText {
    Text(String),
    Added { content: String },
}

impl TokenText {
    fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Added { content: text } => text,
        }
    }
}

/// The keys of tokenizer_config.json that matter.
#[derive(Debug, Default, Deserialize)]
struct RawConfig {
    bos_token: Option<TokenText>,
    eos_token: Option<TokenText>,
    pad_token: Option<TokenText>,
    unk_token: Option<TokenText>,
    chat_template: Option<Value>,
}

impl Tokenizer {
    /// Reads tokenizer.json and, where they are, tokenizer_config.json and chat_template.jinja in `dir`.
    ///
    /// A model without a chat template is fine until a chat is rendered.
    ///
    /// # Errors
    /// Names the file that is missing or damaged, and the line of a chat template that does not parse.
    pub fn load(dir: &Path) -> Result<Self, LoadError> {
        let path = dir.join("tokenizer.json");
        let text = read(&path)?;
        let mut inner =
            tokenizers::Tokenizer::from_bytes(&text).map_err(|error| LoadError::Tokenizer {
                path,
                reason: error.to_string(),
            })?;
        // What a file says about cutting and filling batches for training has no place in serving.
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|error| LoadError::Tokenizer {
                path: dir.to_path_buf(),
                reason: error.to_string(),
            })?;
        let config_path = dir.join("tokenizer_config.json");
        let config: RawConfig = if config_path.exists() {
            serde_json::from_slice(&read(&config_path)?).map_err(|source| LoadError::Json {
                path: config_path.clone(),
                source,
            })?
        } else {
            RawConfig::default()
        };

        let special = inner
            .get_added_tokens_decoder()
            .into_iter()
            .filter_map(|(id, token)| token.special.then_some(id))
            .collect();
        let vocab_size = inner
            .get_vocab(true)
            .values()
            .max()
            .map_or(0, |&id| id as usize + 1);
        let bytes = matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_)))
            .then(|| token_bytes(&inner, vocab_size));
        let id_of = |token: &Option<TokenText>| match token {
            Some(TokenText::Text(text) | TokenText::Added { content: text }) => {
                inner.token_to_id(text)
            }
            None => None,
        };
        let eos_token_id = id_of(&config.eos_token);
        let template = match template_source(dir, &config_path, config.chat_template)? {
            Some((path, source)) => {
                let tokens = [
                    ("bos_token", config.bos_token),
                    ("eos_token", config.eos_token),
                    ("pad_token", config.pad_token),
                    ("unk_token", config.unk_token),
                ];
                let tokens = tokens
                    .into_iter()
                    .filter_map(|(name, token)| Some((name, token?.into_text())))
                    .collect();
                let template = ChatTemplate::new(source, tokens);
                Some(template.map_err(|reason| LoadError::Tokenizer { path, reason })?)
            }
            None => None,
        };
        Ok(Self {
            inner,
            bytes,
            special,
            vocab_size,
            template,
            eos_token_id,
        })
    }

    /// One more than the largest token id.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The end-of-sequence token that tokenizer_config.json names, for models whose generation_config.json names none.
    #[must_use]
    pub fn eos_token_id(&self) -> Option<u32> {
        self.eos_token_id
    }

    /// Whether the token is special: left out of the text unless asked for.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The id of the token with exactly this text in the vocabulary.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Text to ids. Special tokens that are written out in the text become themselves; with `add_special_tokens` the
    /// tokenizer also adds those that it puts around every text (for a rendered chat, which has its own, do not).
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        match self.inner.encode_fast(text, add_special_tokens) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(TokenizerError::Encode(error.to_string())),
        }
    }

    /// Ids to text; bytes that are no UTF-8 become U+FFFD. Ids that no token has (a vocabulary padded to a round number) are nothing.
    ///
    /// # Errors
    /// When the tokenizer refuses the ids.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TokenizerError> {
        self.inner
            .decode(ids, skip_special_tokens)
            .map_err(|error| TokenizerError::Decode(error.to_string()))
    }

    /// One token alone: its bytes, which need not be whole characters (log-probabilities show them).
    ///
    /// # Errors
    /// When there is no such token.
    pub fn token_bytes(&self, id: u32) -> Result<Vec<u8>, TokenizerError> {
        if let Some(bytes) = &self.bytes {
            return bytes
                .get(id)
                .map(<[u8]>::to_vec)
                .ok_or(TokenizerError::UnknownId {
                    id,
                    limit: self.vocab_size,
                });
        }
        Ok(self.decode(&[id], false)?.into_bytes())
    }

    /// Whether the model comes with a chat template.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// Renders `messages` (a JSON array of objects with `role` and `content`) to the text that [`Self::encode`] turns into the
    /// prompt, without adding special tokens.
    ///
    /// # Errors
    /// When the model has no template, or the template refuses the messages.
    pub fn render_chat(
        &self,
        messages: &Value,
        options: &ChatOptions,
    ) -> Result<String, TokenizerError> {
        self.template
            .as_ref()
            .ok_or(TokenizerError::NoChatTemplate)?
            .render(messages, options)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, LoadError> {
    std::fs::read(path).map_err(|source| LoadError::Io {
        path: path.to_path_buf(),
        source,
    })
}

/// chat_template.jinja, or the template in tokenizer_config.json: a string, or a list of named ones.
fn template_source(
    dir: &Path,
    config_path: &Path,
    inline: Option<Value>,
) -> Result<Option<(PathBuf, String)>, LoadError> {
    let path = dir.join("chat_template.jinja");
    if path.exists() {
        let source = String::from_utf8(read(&path)?).map_err(|error| LoadError::Tokenizer {
            path: path.clone(),
            reason: error.to_string(),
        })?;
        return Ok(Some((path, source)));
    }
    let source = match inline {
        None => return Ok(None),
        Some(Value::String(source)) => Some(source),
        Some(named) => named.as_array().and_then(|named| {
            let default = named.iter().find(|entry| entry["name"] == "default");
            default?["template"].as_str().map(str::to_owned)
        }),
    };
    match source {
        Some(source) => Ok(Some((config_path.to_path_buf(), source))),
        None => Err(LoadError::Tokenizer {
            path: config_path.to_path_buf(),
            reason: "chat_template is neither a string nor a list with one named \"default\""
                .to_owned(),
        }),
    }
}

fn token_bytes(inner: &tokenizers::Tokenizer, vocab_size: usize) -> TokenBytes {
    let byte_of = byte_level_alphabet();
    let (mut bytes, mut starts) = (Vec::new(), vec![0]);
    for id in 0..vocab_size as u32 {
        if let Some(token) = inner.id_to_token(id) {
            // As the decoder does: a token with a character outside the alphabet is an added one, and stands for itself.
            let start = bytes.len();
            for char in token.chars() {
                match byte_of.get(char as usize).copied().flatten() {
                    Some(byte) => bytes.push(byte),
                    None => {
                        bytes.truncate(start);
                        bytes.extend_from_slice(token.as_bytes());
                        break;
                    }
                }
            }
        }
        starts.push(bytes.len() as u32);
    }
    TokenBytes { bytes, starts }
}

/// GPT-2's alphabet, by code point: printable bytes stand for themselves, the others for the characters from U+0100 on, in order.
pub(crate) fn byte_level_alphabet() -> Vec<Option<u8>> {
    let mut byte_of = vec![None; 0x180];
    let mut next = 0x100;
    for byte in 0..=255_u8 {
        let char = match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => usize::from(byte),
            _ => {
                next += 1;
                next - 1
            }
        };
        byte_of[char] = Some(byte);
    }
    byte_of
}
