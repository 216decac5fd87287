//! `/v1/completions`: the shape of its replies and chunks.

use std::sync::Arc;

use engine::TokenLogprobs;
use protocol::response::{Completion, CompletionChoice, CompletionLogprobs, Usage};
use serde_json::{Map, Value};

use super::generation::Piece;
use super::job::{Done, Input};
use super::params::Params;
use super::stream::{Chunk, Chunks};
use super::{App, Head};
use crate::text::Text;

const OBJECT: &str = "text_completion";

/// The whole reply.
pub(super) fn reply(app: &App, head: &Head, done: Done) -> Completion {
    let n = done.params.n as usize;
    let logprobs = done.params.sampling.logprobs.is_some();
    let with_ids = done.params.return_token_ids;
    let choices = done
        .finished
        .into_iter()
        .enumerate()
        .map(|(index, finished)| {
            let input = &done.inputs[index / n];
            let mut offset = input.echo.chars().count() as u32;
            CompletionChoice {
                index: index as u32,
                logprobs: logprobs.then(|| {
                    render_logprobs(&app.text, &finished.tokens, &finished.logprobs, &mut offset)
                }),
                text: format!("{}{}", input.echo, finished.text),
                finish_reason: Some(finished.end.finish),
                stop_reason: finished.end.stop_reason,
                token_ids: with_ids.then_some(finished.tokens),
                prompt_token_ids: with_ids.then(|| input.tokens.clone()),
            }
        });
    Completion {
        choices: choices.collect(),
        usage: Some(done.usage),
        kv_transfer_params: done.transfer,
        ..empty(app, head)
    }
}

fn empty(app: &App, head: &Head) -> Completion {
    Completion {
        id: format!("cmpl-{}", head.request_id),
        object: OBJECT.into(),
        created: head.created,
        model: app.model_name.clone(),
        choices: Vec::new(),
        usage: None,
        kv_transfer_params: None,
    }
}

/// The log-probabilities of some tokens; `offset` is where the first of them starts in the text, and moves on.
fn render_logprobs(
    text: &Text,
    tokens: &[u32],
    logprobs: &[TokenLogprobs],
    offset: &mut u32,
) -> CompletionLogprobs {
    let mut out = CompletionLogprobs::default();
    for (&token, logprobs) in tokens.iter().zip(logprobs) {
        let piece = text.piece(token).0;
        let mut top = Map::new();
        // OpenAI's list has the chosen token too, be it likely or not.
        for (id, logprob) in &logprobs.top {
            top.insert(text.piece(*id).0, plain(*logprob));
        }
        top.entry(piece.clone())
            .or_insert_with(|| plain(logprobs.chosen));
        out.text_offset.push(*offset);
        out.token_logprobs.push(Some(logprobs.chosen));
        out.top_logprobs.push(Some(top));
        *offset += piece.chars().count() as u32;
        out.tokens.push(piece);
    }
    out
}

/// A number as short as it is elsewhere in a reply: a JSON value would hold, and write out, all digits of its f64.
fn plain(number: f32) -> Value {
    let shortest = number.to_string().parse();
    shortest.unwrap_or_else(|_| f64::from(number)).into()
}

/// The chunks of a stream.
pub(super) struct Stream {
    app: Arc<App>,
    head: Head,
    params: Params,
    inputs: Vec<Input>,
    /// Where each choice's next token starts in its text, once it has begun.
    offsets: Vec<Option<u32>>,
}

impl Stream {
    pub(super) fn new(app: Arc<App>, head: Head, params: Params, inputs: Vec<Input>) -> Self {
        let choices = inputs.len() * params.n as usize;
        Self {
            app,
            head,
            params,
            inputs,
            offsets: vec![None; choices],
        }
    }
}

impl Chunks for Stream {
    fn open(&mut self) -> Vec<Chunk> {
        Vec::new()
    }

    fn piece(&mut self, index: usize, piece: Piece, usage: Option<Usage>) -> Chunk {
        let input = &self.inputs[index / self.params.n as usize];
        let begins = self.offsets[index].is_none();
        let offset = self.offsets[index].get_or_insert(input.echo.chars().count() as u32);
        let logprobs = piece
            .logprobs
            .map(|logprobs| render_logprobs(&self.app.text, &[piece.token], &[logprobs], offset));
        let with_ids = self.params.return_token_ids;
        let (finish_reason, stop_reason) = match piece.end {
            Some(end) => (Some(end.finish), end.stop_reason),
            None => (None, None),
        };
        let choice = CompletionChoice {
            index: index as u32,
            text: if begins {
                format!("{}{}", input.echo, piece.text)
            } else {
                piece.text
            },
            logprobs,
            finish_reason,
            stop_reason,
            token_ids: with_ids.then(|| vec![piece.token]),
            prompt_token_ids: (with_ids && begins).then(|| input.tokens.clone()),
        };
        Chunk::Completion(Completion {
            choices: vec![choice],
            usage,
            ..empty(&self.app, &self.head)
        })
    }

    fn usage(&mut self, usage: Usage) -> Chunk {
        Chunk::Completion(Completion {
            usage: Some(usage),
            ..empty(&self.app, &self.head)
        })
    }
}
