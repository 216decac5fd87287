//! Server-sent events: a writer, and a parser that takes the stream in whatever pieces the network gives.
//!
//! The parser follows the WHATWG rules: lines end in LF, CR or CRLF; a colon starts a comment; several `data` lines join with a newline; an
//! event ends at an empty line; what a stream leaves unfinished at its end is dropped. It bounds its memory. Who passes a stream on takes
//! it in [`Block`]s: each is an event with the bytes that it came in.

use bytes::Bytes;
use serde::Serialize;

/// The data of the event that ends an OpenAI stream.
pub const DONE: &str = "[DONE]";

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Event {
    /// The event's name, where it has one.
    pub name: Option<String>,
    /// Its data; lines are joined with LF.
    pub data: String,
}

impl Event {
    /// An event without a name.
    pub fn new(data: impl Into<String>) -> Self {
        Self {
            name: None,
            data: data.into(),
        }
    }

    /// The event that ends an OpenAI stream.
    pub fn done() -> Self {
        Self::new(DONE)
    }

    /// Whether this event ends an OpenAI stream.
    pub fn is_done(&self) -> bool {
        self.data.trim() == DONE
    }

    /// The event on the wire, with the empty line that ends it.
    pub fn encode(&self) -> Bytes {
        let mut text = String::with_capacity(self.data.len() + 16);
        if let Some(name) = &self.name {
            text.push_str("event: ");
            text.extend(name.chars().filter(|c| !matches!(c, '\r' | '\n')));
            text.push('\n');
        }
        for line in split_lines(&self.data) {
            text.push_str("data: ");
            text.push_str(line);
            text.push('\n');
        }
        text.push('\n');
        Bytes::from(text)
    }
}

/// `payload` as one event on the wire.
///
/// # Errors
/// Where it cannot be written as JSON (a map with keys that are not strings).
pub fn encode_json(payload: &impl Serialize) -> Result<Bytes, serde_json::Error> {
    Ok(Event::new(serde_json::to_string(payload)?).encode())
}

/// The lines of `text`, whichever way they end.
fn split_lines(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let Some(at) = text.find(['\r', '\n']) else {
            rest = None;
            return Some(text);
        };
        let after = if text[at..].starts_with("\r\n") {
            at + 2
        } else {
            at + 1
        };
        rest = Some(&text[after..]);
        Some(&text[..at])
    })
}

/// The stream holds an event larger than the parser's limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("server-sent event exceeds the limit of {limit} bytes")]
pub struct EventTooLarge {
    /// The limit, in bytes.
    pub limit: usize,
}

/// A piece of a stream that ends with an empty line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The event, unless the block holds only comments and the like.
    pub event: Option<Event>,
    /// The bytes as they came.
    pub bytes: Bytes,
}

/// An incremental parser.
#[derive(Debug, Clone)]
pub struct Parser {
    limit: usize,
    /// All bytes since the last block.
    block: Vec<u8>,
    /// Where the unfinished line begins among them.
    line: usize,
    after_cr: bool,
    first_line: bool,
    data: Option<String>,
    name: Option<String>,
}

impl Default for Parser {
    fn default() -> Self {
        Self::with_limit(16 << 20)
    }
}

impl Parser {
    /// A parser that refuses events, with the comments before them, larger than `limit` bytes.
    pub fn with_limit(limit: usize) -> Self {
        Self {
            limit,
            block: Vec::new(),
            line: 0,
            after_cr: false,
            first_line: true,
            data: None,
            name: None,
        }
    }

    /// Takes the next piece of the stream and gives the events that it completes.
    ///
    /// # Errors
    /// Where an event exceeds the limit; the stream cannot be read on.
    pub fn push(&mut self, piece: &[u8]) -> Result<Vec<Event>, EventTooLarge> {
        let blocks = self.blocks(piece)?;
        Ok(blocks.into_iter().filter_map(|block| block.event).collect())
    }

    /// Takes the next piece of the stream and gives the blocks that it completes. Together they are the stream, but for what it leaves
    /// unfinished.
    ///
    /// # Errors
    /// Where a block exceeds the limit; the stream cannot be read on.
    pub fn blocks(&mut self, piece: &[u8]) -> Result<Vec<Block>, EventTooLarge> {
        let mut blocks = Vec::new();
        let mut rest = piece;
        while !rest.is_empty() {
            if std::mem::take(&mut self.after_cr) && rest[0] == b'\n' {
                // The second half of a line's end, which may already have gone on with its block: an empty line ends nothing.
                self.block.push(b'\n');
                self.line = self.block.len();
                rest = &rest[1..];
                continue;
            }
            let end = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n'));
            let taken = end.map_or(rest.len(), |end| end + 1);
            if self.block.len() + taken > self.limit {
                return Err(EventTooLarge { limit: self.limit });
            }
            self.block.extend_from_slice(&rest[..taken]);
            let Some(end) = end else { break };
            self.after_cr = rest[end] == b'\r';
            rest = &rest[taken..];
            let line = self.block[self.line..self.block.len() - 1].to_vec();
            self.line = self.block.len();
            let is_empty = line.is_empty();
            let event = self.end_line(&line);
            if is_empty {
                self.line = 0;
                blocks.push(Block {
                    event,
                    bytes: std::mem::take(&mut self.block).into(),
                });
            }
        }
        Ok(blocks)
    }

    fn end_line(&mut self, line: &[u8]) -> Option<Event> {
        const BOM: &[u8] = "\u{feff}".as_bytes();
        let line = match std::mem::take(&mut self.first_line) {
            true => line.strip_prefix(BOM).unwrap_or(line),
            false => line,
        };
        if line.is_empty() {
            let name = self.name.take();
            return self.data.take().map(|data| Event { name, data });
        }
        let line = String::from_utf8_lossy(line);
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            },
            "event" => self.name = (!value.is_empty()).then(|| value.to_owned()),
            // Comments (an empty field name), ids and retry times mean nothing here.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Vec<Event> {
        Parser::default().push(text.as_bytes()).unwrap()
    }

    fn data(text: &str) -> Vec<String> {
        parse(text).into_iter().map(|event| event.data).collect()
    }

    #[test]
    fn the_rules_of_the_format() {
        let check = |text: &str, expected: &[&str]| assert_eq!(data(text), expected, "{text:?}");
        check("data: a\n\n", &["a"]);
        check("data:a\r\n\r\n", &["a"]);
        check("data: a\r\rdata: b\r\r", &["a", "b"]);
        check("data: a\ndata: b\n\n", &["a\nb"]);
        check(": ping\n\ndata: a\n\n", &["a"]);
        check("data: a\n: in between\ndata: b\n\n", &["a\nb"]);
        check("data\n\n", &[""]);
        check("data:  two spaces\n\n", &[" two spaces"]);
        check("id: 3\nretry: 5\ndata: x:y\n\n", &["x:y"]);
        check("\u{feff}data: a\n\n", &["a"]);
        check("data: unfinished\n", &[]);
        check("\n\n\n", &[]);
        check("data: [DONE]\n\n", &["[DONE]"]);
        assert!(parse("data: [DONE]\n\n")[0].is_done());
        assert_eq!(
            parse("event: error\ndata: {}\n\n")[0].name.as_deref(),
            Some("error")
        );
    }

    #[test]
    fn memory_is_bounded() {
        let mut parser = Parser::with_limit(100);
        let error = (0..50).find_map(|_| parser.push(b"data: abcdef\n").err());
        assert_eq!(error, Some(EventTooLarge { limit: 100 }));
        let mut parser = Parser::with_limit(100);
        assert!(parser.push(&[b'x'; 101]).is_err());
    }

    #[test]
    fn blocks_are_the_stream() {
        let wire = b": ping\n\ndata: a\r\n\r\ndata: b\rdata: c\r\r\n\ndata: unfinished\n";
        for size in 1..wire.len() {
            let mut parser = Parser::default();
            let pieces = wire.chunks(size);
            let blocks: Vec<Block> = pieces
                .flat_map(|piece| parser.blocks(piece).unwrap())
                .collect();
            let bytes: Vec<u8> = blocks
                .iter()
                .flat_map(|block| block.bytes.to_vec())
                .collect();
            assert!(wire.starts_with(&bytes) && wire.ends_with(b"data: unfinished\n"));
            let data: Vec<_> = blocks
                .into_iter()
                .filter_map(|block| Some(block.event?.data))
                .collect();
            assert_eq!(data, ["a", "b\nc"], "pieces of {size}");
        }
    }

    fn event() -> impl Strategy<Value = Event> {
        let name = proptest::option::of("[a-z]{1,8}");
        let data = "[a-z:é \n\u{1F600}]{0,24}";
        (name, data).prop_map(|(name, data)| Event { name, data })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_in_any_pieces(
            events in proptest::collection::vec(event(), 0..6),
            ending in prop_oneof![Just("\n"), Just("\r\n"), Just("\r")],
            sizes in proptest::collection::vec(1usize..9, 1..64),
        ) {
            let wire: Vec<u8> = events.iter().flat_map(|event| event.encode().to_vec()).collect();
            let wire = String::from_utf8(wire).unwrap().replace('\n', ending);
            let mut parser = Parser::default();
            let mut read = Vec::new();
            let mut rest = wire.as_bytes();
            for size in sizes.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (piece, after) = rest.split_at((*size).min(rest.len()));
                read.extend(parser.push(piece).unwrap());
                rest = after;
            }
            prop_assert_eq!(read, events);
        }

        #[test]
        fn any_bytes_are_survived(pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..32), 0..8)) {
            let mut parser = Parser::with_limit(64);
            for piece in pieces {
                if parser.push(&piece).is_err() {
                    break;
                }
            }
        }
    }
}
