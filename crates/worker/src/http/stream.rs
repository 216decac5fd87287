//! Streaming: completions become server-sent events as they come.

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::{BoxStream, SelectAll};
use protocol::ApiError;
use protocol::response::{ChatCompletionChunk, Completion, Usage};
use protocol::sse::{Event, encode_json};

use super::generation::{Generation, Piece};

/// A chunk of either API.
pub(super) enum Chunk {
    Completion(Completion),
    Chat(ChatCompletionChunk),
}

impl Chunk {
    fn encode(&self) -> Bytes {
        let encoded = match self {
            Self::Completion(chunk) => encode_json(chunk),
            Self::Chat(chunk) => encode_json(chunk),
        };
        // Chunks are plain data, which always has a JSON form.
        encoded.unwrap_or_else(|error| {
            error_event(&ApiError::internal(format!(
                "cannot write a chunk: {error}"
            )))
        })
    }
}

/// What an API's chunks look like.
pub(super) trait Chunks: Send + 'static {
    /// Those before anything has been generated.
    fn open(&mut self) -> Vec<Chunk>;
    /// The one that passes on a piece of choice `index`.
    fn piece(&mut self, index: usize, piece: Piece, usage: Option<Usage>) -> Chunk;
    /// The one with the usage, after all others.
    fn usage(&mut self, usage: Usage) -> Chunk;
}

/// The tokens of a request, counted as they come.
pub(super) struct Tally {
    /// Tokens in all prompts.
    pub(super) prompt_tokens: u32,
    /// Completions of each prompt.
    pub(super) n: usize,
    /// Cached prompt tokens, where the prefill side of a handoff has said how many.
    pub(super) handed_over_cached: Option<u32>,
    /// Whether a last chunk carries the usage.
    pub(super) at_end: bool,
    /// Whether every chunk does.
    pub(super) throughout: bool,
    cached_tokens: u32,
    completion_tokens: u32,
}

impl Tally {
    pub(super) fn new(
        prompt_tokens: u32,
        n: usize,
        handed_over_cached: Option<u32>,
        options: protocol::StreamOptions,
    ) -> Self {
        Self {
            prompt_tokens,
            n,
            handed_over_cached,
            at_end: options.include_usage,
            throughout: options.include_usage && options.continuous_usage_stats,
            cached_tokens: 0,
            completion_tokens: 0,
        }
    }

    fn count(&mut self, index: usize, piece: &Piece) {
        self.completion_tokens += 1;
        if let Some(first) = &piece.first
            && index.is_multiple_of(self.n.max(1))
        {
            self.cached_tokens += first.cached_tokens as u32;
        }
    }

    fn usage(&self) -> Usage {
        let cached = self.handed_over_cached.unwrap_or(self.cached_tokens);
        Usage::new(self.prompt_tokens, self.completion_tokens, cached)
    }
}

/// The body of a streamed reply. An error ends it with an event of its own; dropping it ends all its completions.
pub(super) fn body(
    generations: Vec<Generation>,
    chunks: impl Chunks,
    tally: Tally,
) -> axum::body::Body {
    let pieces = generations
        .into_iter()
        .enumerate()
        .map(|(index, generation)| {
            let pieces = generation.pieces().map(move |piece| (index, piece));
            pieces.boxed()
        });
    let mut writer = Writer {
        pieces: Some(pieces.collect()),
        chunks,
        tally,
    };
    let open: Vec<Bytes> = writer.chunks.open().iter().map(Chunk::encode).collect();
    let rest = futures::stream::unfold(writer, |mut writer| async move {
        let bytes = writer.next().await?;
        Some((bytes, writer))
    });
    let events = futures::stream::iter(open).chain(rest);
    axum::body::Body::from_stream(events.map(Ok::<_, std::convert::Infallible>))
}

/// The pieces of one completion, with its place among those of the request.
type Pieces = BoxStream<'static, (usize, Result<Piece, ApiError>)>;

struct Writer<C> {
    /// None once the stream has ended.
    pieces: Option<SelectAll<Pieces>>,
    chunks: C,
    tally: Tally,
}

impl<C: Chunks> Writer<C> {
    async fn next(&mut self) -> Option<Bytes> {
        match self.pieces.as_mut()?.next().await {
            Some((index, Ok(piece))) => {
                self.tally.count(index, &piece);
                let usage = self.tally.throughout.then(|| self.tally.usage());
                Some(self.chunks.piece(index, piece, usage).encode())
            }
            Some((_, Err(error))) => {
                self.pieces = None;
                Some(joined([error_event(&error), Event::done().encode()]))
            }
            None => {
                self.pieces = None;
                let usage = self
                    .tally
                    .at_end
                    .then(|| self.chunks.usage(self.tally.usage()).encode());
                Some(joined(usage.into_iter().chain([Event::done().encode()])))
            }
        }
    }
}

fn joined(parts: impl IntoIterator<Item = Bytes>) -> Bytes {
    let mut all = Vec::new();
    for part in parts {
        all.extend_from_slice(&part);
    }
    all.into()
}

fn error_event(error: &ApiError) -> Bytes {
    Event::new(error.to_json().to_string()).encode()
}
