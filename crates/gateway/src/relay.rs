//! Bytes as they come: a stream is passed on piece by piece, unchanged and unbuffered, while its events are read aside.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use protocol::ApiError;
use protocol::sse::{Event, Parser};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::account::Account;
use crate::health;
use crate::registry::InFlight;
use crate::server::App;
use crate::upstream::{Failure, within};

/// A worker's stream in the pieces in which it comes.
pub(crate) type Pieces = Pin<Box<dyn Stream<Item = Result<Bytes, Failure>> + Send>>;

/// What the events of a stream say.
#[derive(Debug, Default)]
pub(crate) struct Observer {
    parser: Parser,
    /// Events with choices.
    pub(crate) tokens: u64,
    /// Any event at all.
    pub(crate) events: u64,
    /// The stream came to its proper end.
    pub(crate) done: bool,
    /// An error in place of a chunk.
    pub(crate) error: Option<Value>,
    /// From the last usage seen.
    pub(crate) prompt_tokens: Option<u64>,
    pub(crate) completion_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Option<Vec<IgnoredAny>>,
    #[serde(default)]
    usage: Option<ChunkUsage>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct ChunkUsage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
}

impl Observer {
    /// Reads on. True if the piece completes a chunk with choices.
    ///
    /// # Errors
    /// An event beyond all bounds.
    pub(crate) fn push(&mut self, piece: &[u8]) -> Result<bool, Failure> {
        let before = self.tokens;
        for event in self
            .parser
            .push(piece)
            .map_err(|error| Failure::BadReply(error.to_string()))?
        {
            self.events += 1;
            if event.is_done() {
                self.done = true;
                continue;
            }
            // What is no chunk is not ours to judge.
            let Ok(chunk) = serde_json::from_str::<Chunk>(&event.data) else {
                continue;
            };
            if chunk.choices.is_some_and(|choices| !choices.is_empty()) {
                self.tokens += 1;
            }
            if let Some(usage) = chunk.usage {
                self.prompt_tokens = usage.prompt_tokens.or(self.prompt_tokens);
                self.completion_tokens = usage.completion_tokens.or(self.completion_tokens);
            }
            if let Some(error) = chunk.error.filter(|error| !error.is_null()) {
                self.error = Some(error);
            }
        }
        Ok(self.tokens > before)
    }
}

/// A stream on its way from a decode worker to a client. Dropping it drops the upstream request and the load it counts for.
pub(crate) struct Relay {
    app: Arc<App>,
    guard: InFlight,
    account: Account,
    pieces: Pieces,
    /// Read already, not passed on yet.
    ahead: VecDeque<Bytes>,
    observer: Observer,
    /// Prompt tokens that the prefill worker counted.
    expected: Option<u64>,
    first: Option<Instant>,
    last: Option<Instant>,
    /// The end was seen, and is in the books. A client may leave from then on.
    booked: bool,
    ended: bool,
}

impl Relay {
    /// A stream whose first pieces were read, and observed, already.
    pub(crate) fn new(
        app: &Arc<App>,
        guard: InFlight,
        account: Account,
        pieces: Pieces,
        ahead: VecDeque<Bytes>,
        observer: Observer,
        expected: Option<u64>,
    ) -> Self {
        let now = (observer.tokens > 0).then(Instant::now);
        if now.is_some() {
            account.first_token();
        }
        Self {
            app: Arc::clone(app),
            guard,
            account,
            pieces,
            ahead,
            observer,
            expected,
            first: now,
            last: now,
            booked: false,
            ended: false,
        }
    }

    /// The body of the reply.
    pub(crate) fn into_stream(self) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
        futures::stream::unfold(self, |mut relay| async move {
            relay.next().await.map(|piece| (Ok(piece), relay))
        })
    }

    async fn next(&mut self) -> Option<Bytes> {
        if let Some(piece) = self.ahead.pop_front() {
            return Some(match self.check() {
                Ok(()) => {
                    if self.ahead.is_empty() {
                        self.book_if_done();
                    }
                    piece
                }
                Err(failure) => self.fail(&failure),
            });
        }
        if self.ended {
            return None;
        }
        let limit = self.app.timeouts.between;
        let next = within(limit, async { self.pieces.next().await.transpose() }).await;
        let outcome = match next {
            Ok(Some(piece)) => self.observe(&piece).map(|()| piece),
            Ok(None) if self.booked => {
                self.ended = true;
                return None;
            }
            Ok(None) => Err(Failure::Transport("the stream ended early".to_owned())),
            Err(failure) => Err(failure),
        };
        // What breaks after the end is nobody's loss.
        match outcome {
            Ok(piece) => {
                self.book_if_done();
                Some(piece)
            }
            Err(_) if self.booked => {
                self.ended = true;
                None
            }
            Err(failure) => Some(self.fail(&failure)),
        }
    }

    fn observe(&mut self, piece: &[u8]) -> Result<(), Failure> {
        let is_token = self.observer.push(piece)?;
        if is_token {
            let now = Instant::now();
            match self.last {
                Some(last) => self.app.metrics.itl(now - last),
                None => {
                    self.account.first_token();
                    self.first = Some(now);
                }
            }
            self.last = Some(now);
        }
        self.check()
    }

    /// Whether both workers speak of the same prompt.
    fn check(&self) -> Result<(), Failure> {
        match (self.expected, self.observer.prompt_tokens) {
            (Some(prefill), Some(decode)) if prefill != decode => {
                Err(Failure::TokensDiffer { prefill, decode })
            }
            _ => Ok(()),
        }
    }

    /// Ends the stream with an event that says why.
    fn fail(&mut self, failure: &Failure) -> Bytes {
        health::doubt(&self.app, &self.guard, failure);
        self.ended = true;
        self.ahead.clear();
        let error: ApiError = failure.to_api_error(self.guard.worker());
        self.account.close(error.status.as_u16());
        Event::new(error.to_json().to_string()).encode()
    }

    /// Books a stream whose proper end was seen, once: before that end is passed on, as the client need not wait for more.
    fn book_if_done(&mut self) {
        if !self.observer.done || std::mem::replace(&mut self.booked, true) {
            return;
        }
        let failed = self.observer.error.is_some();
        self.account.close(if failed { 502 } else { 200 });
        if failed {
            health::doubt(
                &self.app,
                &self.guard,
                &Failure::Status(ApiError::bad_upstream("the stream carried an error")),
            );
        }
        let tokens = self
            .observer
            .completion_tokens
            .unwrap_or(self.observer.tokens);
        if let (Some(first), Some(last), Ok(gaps)) = (
            self.first,
            self.last,
            u32::try_from(tokens.saturating_sub(1)),
        ) && gaps > 0
        {
            self.app.metrics.tpot((last - first) / gaps);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn events_are_read_across_pieces() {
        let mut observer = Observer::default();
        assert!(!observer.push(b": ping\n\n").unwrap());
        assert!(
            !observer
                .push(br#"data: {"choices":[{"text":"a"}]"#)
                .unwrap()
        );
        assert!(observer.push(b"}\n\n").unwrap());
        assert!(!observer.push(b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":1}}\n\n").unwrap());
        assert!(!observer.push(b"data: [DONE]\n\n").unwrap());
        assert_eq!((observer.tokens, observer.events), (1, 3));
        assert_eq!(
            (observer.prompt_tokens, observer.completion_tokens),
            (Some(7), Some(1))
        );
        assert!(observer.done && observer.error.is_none());
    }

    #[test]
    fn errors_in_place_of_chunks_are_seen() {
        let mut observer = Observer::default();
        observer
            .push(b"data: {\"error\":{\"message\":\"m\",\"code\":\"kv_transfer_failed\"}}\n\n")
            .unwrap();
        assert_eq!(observer.error.unwrap()["code"], "kv_transfer_failed");
    }
}
