//! The shapes of OpenAI's replies, with vLLM's extensions (`token_ids`, `prompt_token_ids`, `kv_transfer_params`).

use serde::{Deserialize, Serialize};

use crate::TransferParams;

/// Tokens of a request as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens in the prompt, those found in the cache included.
    pub prompt_tokens: u32,
    /// Tokens in prompt and output.
    #[serde(default)]
    pub total_tokens: u32,
    /// Tokens generated.
    #[serde(default)]
    pub completion_tokens: u32,
    /// What is known of the prompt's tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}

/// Details of [`Usage::prompt_tokens`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PromptTokensDetails {
    /// Prompt tokens whose KV came from the prefix cache.
    #[serde(default)]
    pub cached_tokens: u32,
}

impl Usage {
    /// The usage of one request.
    pub fn new(prompt_tokens: u32, completion_tokens: u32, cached_tokens: u32) -> Self {
        Self {
            prompt_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
            completion_tokens,
            prompt_tokens_details: Some(PromptTokensDetails { cached_tokens }),
        }
    }

    /// Prompt tokens that came from the prefix cache; 0 where the server does not say.
    pub fn cached_tokens(&self) -> u32 {
        self.prompt_tokens_details
            .map_or(0, |details| details.cached_tokens)
    }
}

/// Why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// An end-of-sequence token, a stop token or a stop string.
    Stop,
    /// The limit on tokens.
    Length,
    /// The request was cancelled.
    Abort,
}

/// Reply of `/v1/completions`, and each chunk of its stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// Id of the reply, `cmpl-...`.
    pub id: String,
    /// `text_completion`.
    pub object: String,
    /// Seconds since the epoch.
    pub created: u64,
    /// Name of the model that answered.
    pub model: String,
    /// The completions; empty in the chunk that carries the usage.
    pub choices: Vec<CompletionChoice>,
    /// Tokens used, where the reply or the chunk carries them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// What a decode worker needs to take over, in the reply of a prefill worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_transfer_params: Option<TransferParams>,
}

/// One completion, or a piece of one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompletionChoice {
    /// Its place among the completions of the request.
    pub index: u32,
    /// Its text, or the piece's.
    pub text: String,
    /// Log-probabilities, where they were asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// Why it ended; none while it runs.
    pub finish_reason: Option<Finish>,
    /// The stop string or stop token that ended it.
    #[serde(default)]
    pub stop_reason: Option<serde_json::Value>,
    /// The ids of the generated tokens, with `return_token_ids`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// The ids of the prompt's tokens, with `return_token_ids`; in a stream only in the first piece.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// Log-probabilities in the form of `/v1/completions`: four lists of the same length, one entry per token.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct CompletionLogprobs {
    /// Where each token starts, in characters of the choice's text.
    pub text_offset: Vec<u32>,
    /// Natural log-probability of each token; none for the first of an echoed prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// Each token as text.
    pub tokens: Vec<String>,
    /// The most likely tokens at each place and their log-probabilities.
    pub top_logprobs: Vec<Option<serde_json::Map<String, serde_json::Value>>>,
}

/// Reply of `/v1/chat/completions`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatCompletion {
    /// Id of the reply, `chatcmpl-...`.
    pub id: String,
    /// `chat.completion`.
    pub object: String,
    /// Seconds since the epoch.
    pub created: u64,
    /// Name of the model that answered.
    pub model: String,
    /// The answers.
    pub choices: Vec<ChatChoice>,
    /// Tokens used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// The ids of the prompt's tokens, with `return_token_ids`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// What a decode worker needs to take over, in the reply of a prefill worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_transfer_params: Option<TransferParams>,
}

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatChoice {
    /// Its place among the answers of the request.
    pub index: u32,
    /// The answer.
    pub message: ChatMessage,
    /// Log-probabilities, where they were asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
    pub finish_reason: Option<Finish>,
    /// The stop string or stop token that ended it.
    #[serde(default)]
    pub stop_reason: Option<serde_json::Value>,
    /// The ids of the generated tokens, with `return_token_ids`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// The message of an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `assistant`.
    pub role: String,
    /// What it says.
    pub content: Option<String>,
}

/// One chunk of a streamed chat answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatCompletionChunk {
    /// Id of the reply, the same in all chunks.
    pub id: String,
    /// `chat.completion.chunk`.
    pub object: String,
    /// Seconds since the epoch.
    pub created: u64,
    /// Name of the model that answered.
    pub model: String,
    /// The pieces; empty in the chunk that carries the usage.
    pub choices: Vec<ChatChunkChoice>,
    /// Tokens used, where the chunk carries them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// The ids of the prompt's tokens, with `return_token_ids`, in the first chunk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// A piece of one answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatChunkChoice {
    /// The answer's place among those of the request.
    pub index: u32,
    /// What comes on.
    pub delta: ChatDelta,
    /// Log-probabilities of the piece's tokens, where they were asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why the answer ended; none while it runs.
    pub finish_reason: Option<Finish>,
    /// The stop string or stop token that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<serde_json::Value>,
    /// The ids of the piece's tokens, with `return_token_ids`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// What a chunk adds to a message.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ChatDelta {
    /// `assistant`, in the first chunk of an answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// More of its text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}

/// Log-probabilities in the form of `/v1/chat/completions`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ChatLogprobs {
    /// One entry per token.
    pub content: Vec<TokenLogprob>,
}

/// A token and its log-probability.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token as text.
    pub token: String,
    /// Its natural log-probability.
    pub logprob: f32,
    /// The token's bytes, which need not be whole characters.
    pub bytes: Option<Vec<u8>>,
    /// The most likely tokens at this place; absent in the entries of such a list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_logprobs: Option<Vec<TokenLogprob>>,
}

/// Reply of `/v1/models`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelList {
    /// `list`.
    pub object: String,
    /// The models.
    pub data: Vec<ModelCard>,
}

impl ModelList {
    /// A list of these models.
    pub fn new(data: Vec<ModelCard>) -> Self {
        Self {
            object: "list".into(),
            data,
        }
    }
}

/// One model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelCard {
    /// The name to use as `model` in requests.
    pub id: String,
    /// `model`.
    pub object: String,
    /// Seconds since the epoch.
    pub created: u64,
    /// Who serves it.
    pub owned_by: String,
    /// The most tokens of prompt and output together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u32>,
}

impl ModelCard {
    /// A model served here.
    pub fn new(id: impl Into<String>, created: u64, max_model_len: u32) -> Self {
        Self {
            id: id.into(),
            object: "model".into(),
            created,
            owned_by: "colocate".into(),
            max_model_len: Some(max_model_len),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_completion_on_the_wire() {
        let completion = Completion {
            id: "cmpl-1".into(),
            object: "text_completion".into(),
            created: 7,
            model: "m".into(),
            choices: vec![CompletionChoice {
                index: 0,
                text: "hi".into(),
                logprobs: None,
                finish_reason: Some(Finish::Length),
                stop_reason: None,
                token_ids: Some(vec![1]),
                prompt_token_ids: None,
            }],
            usage: Some(Usage::new(3, 1, 2)),
            kv_transfer_params: None,
        };
        let text = serde_json::to_string(&completion).unwrap();
        assert_eq!(
            text,
            concat!(
                r#"{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":"hi","logprobs":null,"#,
                r#""finish_reason":"length","stop_reason":null,"token_ids":[1]}],"usage":{"prompt_tokens":3,"total_tokens":4,"#,
                r#""completion_tokens":1,"prompt_tokens_details":{"cached_tokens":2}}}"#
            )
        );
        assert_eq!(
            serde_json::from_str::<Completion>(&text).unwrap(),
            completion
        );
    }

    #[test]
    fn the_first_chat_chunk_has_a_role_and_no_more() {
        let delta = ChatDelta {
            role: Some("assistant".into()),
            content: Some(String::new()),
        };
        assert_eq!(
            serde_json::to_string(&delta).unwrap(),
            r#"{"role":"assistant","content":""}"#
        );
        assert_eq!(serde_json::to_string(&ChatDelta::default()).unwrap(), "{}");
    }

    #[test]
    fn vllms_usage_without_details_is_read() {
        let usage: Usage = serde_json::from_str(
            r#"{"prompt_tokens":5,"total_tokens":6,"completion_tokens":1,"prompt_tokens_details":null}"#,
        )
        .unwrap();
        assert_eq!((usage.prompt_tokens, usage.cached_tokens()), (5, 0));
    }
}
