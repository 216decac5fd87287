//! `/v1/chat/completions`: the shape of its replies and chunks.

use std::sync::Arc;

use engine::TokenLogprobs;
use protocol::response::{
    ChatChoice, ChatChunkChoice, ChatCompletion, ChatCompletionChunk, ChatDelta, ChatLogprobs,
    ChatMessage, TokenLogprob, Usage,
};

use super::generation::Piece;
use super::job::{Done, Input};
use super::params::Params;
use super::stream::{Chunk, Chunks};
use super::{App, Head};
use crate::text::Text;

const ASSISTANT: &str = "assistant";

/// The whole reply.
pub(super) fn reply(app: &App, head: &Head, done: Done) -> ChatCompletion {
    let logprobs = done.params.sampling.logprobs.is_some();
    let with_ids = done.params.return_token_ids;
    let choices = done
        .finished
        .into_iter()
        .enumerate()
        .map(|(index, finished)| ChatChoice {
            index: index as u32,
            logprobs: logprobs
                .then(|| render_logprobs(&app.text, &finished.tokens, &finished.logprobs)),
            message: ChatMessage {
                role: ASSISTANT.into(),
                content: Some(finished.text),
            },
            finish_reason: Some(finished.end.finish),
            stop_reason: finished.end.stop_reason,
            token_ids: with_ids.then_some(finished.tokens),
        });
    ChatCompletion {
        id: id(head),
        object: "chat.completion".into(),
        created: head.created,
        model: app.model_name.clone(),
        choices: choices.collect(),
        usage: Some(done.usage),
        prompt_token_ids: with_ids
            .then(|| done.inputs.into_iter().next().map(|input| input.tokens))
            .flatten(),
        kv_transfer_params: done.transfer,
    }
}

fn id(head: &Head) -> String {
    format!("chatcmpl-{}", head.request_id)
}

fn render_logprobs(text: &Text, tokens: &[u32], logprobs: &[TokenLogprobs]) -> ChatLogprobs {
    let entry = |id: u32, logprob: f32, top_logprobs: Option<Vec<TokenLogprob>>| {
        let (token, bytes) = text.piece(id);
        TokenLogprob {
            token,
            logprob,
            bytes: Some(bytes),
            top_logprobs,
        }
    };
    let content = tokens.iter().zip(logprobs).map(|(&token, logprobs)| {
        let top = logprobs
            .top
            .iter()
            .map(|&(id, logprob)| entry(id, logprob, None));
        entry(token, logprobs.chosen, Some(top.collect()))
    });
    ChatLogprobs {
        content: content.collect(),
    }
}

/// The chunks of a stream.
pub(super) struct Stream {
    app: Arc<App>,
    head: Head,
    params: Params,
    inputs: Vec<Input>,
}

impl Stream {
    pub(super) fn new(app: Arc<App>, head: Head, params: Params, inputs: Vec<Input>) -> Self {
        Self {
            app,
            head,
            params,
            inputs,
        }
    }

    fn chunk(&self, choices: Vec<ChatChunkChoice>, usage: Option<Usage>) -> ChatCompletionChunk {
        ChatCompletionChunk {
            id: id(&self.head),
            object: "chat.completion.chunk".into(),
            created: self.head.created,
            model: self.app.model_name.clone(),
            choices,
            usage,
            prompt_token_ids: None,
        }
    }
}

impl Chunks for Stream {
    /// Every answer begins with its role.
    fn open(&mut self) -> Vec<Chunk> {
        let chunks = (0..self.params.n).map(|index| {
            let choice = ChatChunkChoice {
                index,
                delta: ChatDelta {
                    role: Some(ASSISTANT.into()),
                    content: Some(String::new()),
                },
                logprobs: None,
                finish_reason: None,
                stop_reason: None,
                token_ids: None,
            };
            let mut chunk = self.chunk(vec![choice], None);
            if self.params.return_token_ids {
                chunk.prompt_token_ids = self.inputs.first().map(|input| input.tokens.clone());
            }
            Chunk::Chat(chunk)
        });
        chunks.collect()
    }

    fn piece(&mut self, index: usize, piece: Piece, usage: Option<Usage>) -> Chunk {
        let logprobs = piece
            .logprobs
            .map(|logprobs| render_logprobs(&self.app.text, &[piece.token], &[logprobs]));
        let (finish_reason, stop_reason) = match piece.end {
            Some(end) => (Some(end.finish), end.stop_reason),
            None => (None, None),
        };
        let choice = ChatChunkChoice {
            index: index as u32,
            delta: ChatDelta {
                role: None,
                content: Some(piece.text),
            },
            logprobs,
            finish_reason,
            stop_reason,
            token_ids: self.params.return_token_ids.then(|| vec![piece.token]),
        };
        Chunk::Chat(self.chunk(vec![choice], usage))
    }

    fn usage(&mut self, usage: Usage) -> Chunk {
        Chunk::Chat(self.chunk(Vec::new(), Some(usage)))
    }
}
