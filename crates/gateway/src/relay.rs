//! Bytes as they come: a stream is passed on event by event, unchanged and unbuffered, while its events are read aside.
//!
//! Only whole events go on, so that an error of the gateway's own never follows half of one.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
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
use crate::upstream::{Failure, within_life};

/// A worker's stream in the pieces in which it comes.
pub(crate) type Pieces = Pin<Box<dyn Stream<Item = Result<Bytes, Failure>> + Send>>;

/// Reads a stream's events, and says what of it the client gets.
#[derive(Debug)]
pub(crate) struct Observer {
    parser: Parser,
    /// Whether the client asked for the usage chunk, which the worker is always asked for.
    shows_usage: bool,
    /// Prompt tokens that the prefill worker counted.
    expected: Option<u64>,
    /// Events with choices.
    pub(crate) tokens: u64,
    /// Any event at all.
    pub(crate) events: u64,
    /// The stream came to its proper end.
    pub(crate) done: bool,
    /// An error in place of a chunk.
    pub(crate) error: Option<Value>,
    /// From the last usage seen.
    completion_tokens: Option<u64>,
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
    pub(crate) fn new(shows_usage: bool, expected: Option<u64>) -> Self {
        Self {
            parser: Parser::default(),
            shows_usage,
            expected,
            tokens: 0,
            events: 0,
            done: false,
            error: None,
            completion_tokens: None,
        }
    }

    /// Reads on. What goes on to the client is added to `passed`.
    ///
    /// # Errors
    /// An event beyond all bounds, or usage that contradicts the prefill worker's. `passed` holds what came before it.
    pub(crate) fn push(&mut self, piece: &[u8], passed: &mut BytesMut) -> Result<(), Failure> {
        let blocks = self
            .parser
            .blocks(piece)
            .map_err(|error| Failure::BadReply(error.to_string()))?;
        for block in blocks {
            let shown = match &block.event {
                Some(event) => self.event(event)?,
                None => true,
            };
            if shown {
                passed.extend_from_slice(&block.bytes);
            }
        }
        Ok(())
    }

    /// Reads an event. Whether the client gets it.
    fn event(&mut self, event: &Event) -> Result<bool, Failure> {
        self.events += 1;
        if event.is_done() {
            self.done = true;
            return Ok(true);
        }
        // What is no chunk is not ours to judge.
        let Ok(chunk) = serde_json::from_str::<Chunk>(&event.data) else {
            return Ok(true);
        };
        let has_choices = chunk.choices.as_ref().is_some_and(|list| !list.is_empty());
        self.tokens += u64::from(has_choices);
        if let Some(error) = chunk.error.filter(|error| !error.is_null()) {
            self.error = Some(error);
        }
        let Some(usage) = chunk.usage else {
            return Ok(true);
        };
        self.completion_tokens = usage.completion_tokens.or(self.completion_tokens);
        if let (Some(prefill), Some(decode)) = (self.expected, usage.prompt_tokens)
            && prefill != decode
        {
            return Err(Failure::TokensDiffer { prefill, decode });
        }
        Ok(self.shows_usage || has_choices || chunk.choices.is_none())
    }

    /// Whether nothing of weight is to come: the proper end was seen, or an error in its place.
    fn is_over(&self) -> bool {
        self.done || self.error.is_some()
    }
}

/// A stream whose first event has come.
pub(crate) struct Opened {
    pub(crate) guard: InFlight,
    pub(crate) pieces: Pieces,
    /// To be passed on first.
    pub(crate) ahead: Bytes,
    pub(crate) observer: Observer,
}

/// A stream on its way from a decode worker to a client. Dropping it drops the upstream request and the load it counts for.
pub(crate) struct Relay {
    app: Arc<App>,
    account: Account,
    guard: InFlight,
    pieces: Pieces,
    ahead: Option<Bytes>,
    observer: Observer,
    first: Option<Instant>,
    last: Option<Instant>,
    /// The end was seen, and is in the books. A client may leave from then on.
    booked: bool,
    ended: bool,
}

impl Relay {
    pub(crate) fn new(app: &Arc<App>, account: Account, opened: Opened) -> Self {
        let Opened {
            guard,
            pieces,
            ahead,
            observer,
        } = opened;
        let now = (observer.tokens > 0).then(Instant::now);
        if now.is_some() {
            account.first_token();
        }
        Self {
            app: Arc::clone(app),
            account,
            guard,
            pieces,
            ahead: Some(ahead),
            observer,
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
        if let Some(ahead) = self.ahead.take() {
            self.book_if_over();
            return Some(ahead);
        }
        let mut passed = BytesMut::new();
        while passed.is_empty() && !self.ended {
            if let Err(failure) = self.read(&mut passed).await {
                self.ended = true;
                // What breaks after the end is nobody's loss.
                if !self.booked {
                    passed.extend_from_slice(&self.fail(&failure));
                }
            }
        }
        (!passed.is_empty()).then(|| passed.freeze())
    }

    /// Waits for the next piece and adds what the client gets of it.
    async fn read(&mut self, passed: &mut BytesMut) -> Result<(), Failure> {
        let piece = self.pieces.next();
        let piece = within_life(&self.guard, self.app.timeouts.between, async {
            piece.await.transpose()
        });
        let Some(piece) = piece.await? else {
            self.ended = true;
            return if self.booked {
                Ok(())
            } else {
                Err(Failure::Transport("the stream ended early".to_owned()))
            };
        };
        let before = self.observer.tokens;
        let read = self.observer.push(&piece, passed);
        if self.observer.tokens > before {
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
        read?;
        self.book_if_over();
        Ok(())
    }

    /// The event that ends a stream and says why.
    fn fail(&mut self, failure: &Failure) -> Bytes {
        health::doubt(&self.app, &self.guard, failure);
        let error = failure.to_api_error(self.guard.worker());
        self.account.close(error.status.as_u16());
        Event::new(error.to_json().to_string()).encode()
    }

    /// Books a stream whose end was seen, once: before that end is passed on, as the client need not wait for more.
    fn book_if_over(&mut self) {
        if !self.observer.is_over() || std::mem::replace(&mut self.booked, true) {
            return;
        }
        if let Some(error) = &self.observer.error {
            let error = ApiError::from_event(error);
            self.account.close(error.status.as_u16());
            health::doubt(&self.app, &self.guard, &Failure::Status(error));
        } else {
            self.account.close(200);
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

    const USAGE: &str =
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":1}}\n\n";

    /// What the client gets of these pieces.
    fn passed(observer: &mut Observer, pieces: &[&str]) -> Result<String, Failure> {
        let mut passed = BytesMut::new();
        for piece in pieces {
            observer.push(piece.as_bytes(), &mut passed)?;
        }
        Ok(String::from_utf8(passed.to_vec()).unwrap())
    }

    #[test]
    fn events_are_read_across_pieces() {
        for shows_usage in [true, false] {
            let pieces = [
                ": ping\n\n",
                r#"data: {"choices":[{"text":"a"}]"#,
                "}\n\n",
                USAGE,
                "data: [DONE]\n\ndata: unfini",
            ];
            let mut observer = Observer::new(shows_usage, Some(7));
            let passed = passed(&mut observer, &pieces).unwrap();
            let whole = pieces.concat().replace("data: unfini", "");
            let expected = if shows_usage {
                whole
            } else {
                whole.replace(USAGE, "")
            };
            assert_eq!(passed, expected);
            assert_eq!((observer.tokens, observer.events), (1, 3));
            assert_eq!(observer.completion_tokens, Some(1));
            assert!(observer.done && observer.error.is_none());
        }
    }

    #[test]
    fn another_prompt_is_told_after_what_came_before() {
        let mut observer = Observer::new(false, Some(8));
        let mut passed = BytesMut::new();
        let piece = format!("data: {{\"choices\":[{{}}]}}\n\n{USAGE}data: [DONE]\n\n");
        let failure = observer.push(piece.as_bytes(), &mut passed).unwrap_err();
        assert_eq!(failure.kind(), "tokens_differ");
        assert_eq!(passed, "data: {\"choices\":[{}]}\n\n");
    }

    #[test]
    fn errors_in_place_of_chunks_are_seen() {
        let mut observer = Observer::new(false, None);
        let error = "data: {\"error\":{\"message\":\"m\",\"code\":\"kv_transfer_failed\"}}\n\n";
        assert_eq!(passed(&mut observer, &[error]).unwrap(), error);
        assert_eq!(observer.error.unwrap()["code"], "kv_transfer_failed");
    }
}
