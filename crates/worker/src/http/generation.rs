//! One completion as it comes: tokens from the engine, text to the client.

use std::sync::Arc;
use std::time::Instant;

use engine::stop::StopMatcher;
use engine::{
    AdmissionError, FinishReason, FirstToken, HandoffError, Recorded, TokenLogprobs, TokenizerError,
};
use futures::Stream;
use protocol::ApiError;
use protocol::response::Finish;
use serde_json::Value;

use super::App;
use super::params::Params;
use crate::engine_thread::{EngineGone, Event, Running};
use crate::metrics::Outcome;
use crate::text::Detokenizer;

/// One token and the text that it made certain.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) token: u32,
    /// May be empty: a token may be part of a character, and text that may become a stop string is held back.
    pub(super) text: String,
    pub(super) logprobs: Option<TokenLogprobs>,
    /// With the first piece.
    pub(super) first: Option<FirstToken>,
    /// With the last piece.
    pub(super) end: Option<End>,
    pub(super) recorded: Option<Recorded>,
}

/// How a completion ended.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct End {
    pub(super) finish: Finish,
    /// The stop string, or the id of the stop token, that ended it.
    pub(super) stop_reason: Option<Value>,
}

/// A completion that runs. Dropped before its end, it ends in the engine too.
pub(super) struct Generation {
    app: Arc<App>,
    running: Running,
    /// Its blocks are held for a peer once it has ended, until [`Generation::handed_over`] or its drop.
    holds: bool,
    detokenizer: Detokenizer,
    stop: Stop,
    clock: Clock,
    outcome: Outcome,
    over: bool,
}

/// When a completion's text ends.
struct Stop {
    strings: Vec<String>,
    matcher: StopMatcher,
    token_ids: Vec<u32>,
    /// Tokens whose text is not looked at for stop strings.
    min_tokens: usize,
}

struct Clock {
    arrival: Instant,
    first: Option<Instant>,
    tokens: usize,
}

impl Generation {
    /// Waits until the engine has taken the request in.
    ///
    /// # Errors
    /// The engine refuses it, or is gone.
    pub(super) async fn admitted(
        app: Arc<App>,
        mut running: Running,
        holds: bool,
        params: &Params,
        arrival: Instant,
    ) -> Result<Self, ApiError> {
        match running.event().await.map_err(gone)? {
            Event::Admitted => {}
            Event::Refused(error) => {
                running.finished();
                app.metrics.ended(Outcome::Failed);
                return Err(admission_error(&error));
            }
            Event::Token(_) => {
                return Err(ApiError::internal(
                    "a token came before its request was admitted",
                ));
            }
        }
        Ok(Self {
            detokenizer: app.text.detokenizer(params.skip_special),
            running,
            holds,
            stop: Stop {
                strings: params.stop.clone(),
                matcher: StopMatcher::new(params.stop.clone(), params.include_stop),
                token_ids: params.sampling.stop_token_ids.clone(),
                min_tokens: params.sampling.min_tokens,
            },
            clock: Clock {
                arrival,
                first: None,
                tokens: 0,
            },
            app,
            outcome: Outcome::Cancelled,
            over: false,
        })
    }

    /// The request's name in the engine.
    pub(super) fn id(&self) -> engine::RequestId {
        self.running.id()
    }

    /// Whether blocks are held for a peer when it has ended.
    pub(super) fn holds(&self) -> bool {
        self.holds
    }

    /// Leaves held blocks to the peer and to their lease.
    pub(super) fn handed_over(mut self) {
        self.running.finished();
    }

    /// The next token; none after the last.
    ///
    /// # Errors
    /// The engine is gone.
    pub(super) async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        if self.over {
            return None;
        }
        let token = match self.running.event().await {
            Ok(Event::Token(token)) => *token,
            Ok(event) => {
                return Some(Err(self.failed(ApiError::internal(format!(
                    "expected a token, got {event:?}"
                )))));
            }
            Err(error) => return Some(Err(self.failed(gone(error)))),
        };
        self.tick();
        let (text, end) = match self.text_of(token.token, token.finish) {
            Ok(read) => read,
            Err(error) => {
                let error = ApiError::internal(format!("cannot turn tokens into text: {error}"));
                return Some(Err(self.failed(error)));
            }
        };
        if end.is_some() {
            self.end();
        }
        Some(Ok(Piece {
            token: token.token,
            text,
            logprobs: token.logprobs,
            first: token.first,
            end,
            recorded: token.recorded,
        }))
    }

    /// The text that a token makes certain, and whether the completion ends with it.
    fn text_of(
        &mut self,
        token: u32,
        finish: Option<FinishReason>,
    ) -> Result<(String, Option<End>), TokenizerError> {
        let (mut text, mut end) = (String::new(), None);
        // The token that ended a request is not part of its text.
        if finish != Some(FinishReason::Stop) {
            let more = self.detokenizer.push(token)?;
            end = self.show(&more, &mut text);
        }
        if let Some(finish) = finish {
            // Held blocks are freed with this unless a reply says where they are.
            if !self.holds {
                self.running.finished();
            }
            if end.is_none() {
                let rest = self.detokenizer.finish()?;
                end = self.show(&rest, &mut text);
            }
            if end.is_none() {
                text.push_str(&self.stop.matcher.finish());
            }
            end = end.or_else(|| Some(self.engine_end(finish, token)));
        }
        Ok((text, end))
    }

    /// The rest of the completion as a stream.
    pub(super) fn pieces(self) -> impl Stream<Item = Result<Piece, ApiError>> + Send {
        futures::stream::unfold(self, |mut generation| async move {
            let piece = generation.next().await?;
            Some((piece, generation))
        })
    }

    /// Passes text on, as far as no stop string forbids it.
    fn show(&mut self, more: &str, text: &mut String) -> Option<End> {
        if self.clock.tokens <= self.stop.min_tokens {
            text.push_str(more);
            return None;
        }
        let out = self.stop.matcher.push(more);
        text.push_str(&out.text);
        out.matched.map(|index| End {
            finish: Finish::Stop,
            stop_reason: self.stop.strings.get(index).cloned().map(Value::String),
        })
    }

    fn engine_end(&self, finish: FinishReason, token: u32) -> End {
        match finish {
            FinishReason::Length => End {
                finish: Finish::Length,
                stop_reason: None,
            },
            FinishReason::Stop => End {
                finish: Finish::Stop,
                stop_reason: self.stop.token_ids.contains(&token).then(|| token.into()),
            },
        }
    }

    fn tick(&mut self) {
        self.clock.tokens += 1;
        if self.clock.first.is_none() {
            let now = Instant::now();
            self.clock.first = Some(now);
            self.app.metrics.first_token(now - self.clock.arrival);
        }
    }

    fn end(&mut self) {
        self.over = true;
        self.outcome = Outcome::Finished;
        if let Some(first) = self.clock.first {
            self.app
                .metrics
                .last_token(self.clock.tokens.saturating_sub(1), first.elapsed());
        }
    }

    fn failed(&mut self, error: ApiError) -> ApiError {
        self.over = true;
        self.outcome = Outcome::Failed;
        error
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.app.metrics.ended(self.outcome);
    }
}

/// What a client is told when the engine's thread has ended.
pub(super) fn gone(error: EngineGone) -> ApiError {
    ApiError::unavailable(error.to_string()).with_code(ApiError::SHUTTING_DOWN)
}

/// What a client is told when the engine refuses its request.
fn admission_error(error: &AdmissionError) -> ApiError {
    let message = error.to_string();
    match error {
        AdmissionError::ContextLength {
            limit,
            prompt_tokens,
            max_tokens,
        } => ApiError::context_length_exceeded(*limit, *prompt_tokens, *max_tokens),
        AdmissionError::Blocks { .. } => {
            ApiError::invalid_param("prompt", message).with_code(ApiError::CONTEXT_LENGTH_EXCEEDED)
        }
        AdmissionError::EmptyPrompt | AdmissionError::Token { .. } => {
            ApiError::invalid_param("prompt", message)
        }
        AdmissionError::Sampling { field, .. } => ApiError::invalid_param(*field, message),
        AdmissionError::HoldLength { .. } => ApiError::invalid_param("max_tokens", message),
        AdmissionError::GatesWithHandoff => ApiError::invalid_param("kv_transfer_params", message),
        AdmissionError::Handoff(HandoffError::Geometry { .. } | HandoffError::Prompt) => {
            ApiError::kv_transfer_incompatible(message)
        }
        AdmissionError::Full { .. } => {
            ApiError::unavailable(format!("this worker is overloaded: {message}"))
        }
        AdmissionError::Handoff(_) => ApiError::kv_transfer_failed(message),
        _ => ApiError::internal(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admission_errors_have_openais_shape() {
        let context = admission_error(&AdmissionError::ContextLength {
            limit: 10,
            prompt_tokens: 8,
            max_tokens: 3,
        });
        assert!(context.has_code(ApiError::CONTEXT_LENGTH_EXCEEDED));
        assert_eq!(context.status.as_u16(), 400);
        let full = admission_error(&AdmissionError::Full { limit: 9 });
        assert_eq!(full.status.as_u16(), 503);
        let prompt = admission_error(&AdmissionError::Handoff(HandoffError::Prompt));
        assert_eq!(prompt.status.as_u16(), 400);
        let length = admission_error(&AdmissionError::Handoff(HandoffError::Length {
            expected: 3,
            got: 2,
        }));
        assert!(length.is_transfer_failure());
    }
}
