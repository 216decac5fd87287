//! The frames that two workers exchange to move a prompt's KV blocks.
//!
//! A frame is a header of 20 bytes and a payload; integers are little-endian:
//!
//! | field | bytes |
//! |---|---|
//! | magic `CLKT` | 4 |
//! | version, 1 | 1 |
//! | kind | 1 |
//! | reserved, 0 | 2 |
//! | length of the payload | 4 |
//! | XXH3 (64 bits) of the payload | 8 |
//!
//! A reader says how long a payload it is ready to take, and refuses a longer one before it allocates anything.
//!
//! The puller speaks first: [`Kind::Pull`], answered by [`Kind::Blocks`] or [`Kind::Failure`]. Once it has checked the blocks it
//! sends [`Kind::Done`], which lets the other side free them. [`Kind::Release`] frees them unread, answered by [`Kind::Released`].

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

const MAGIC: [u8; 4] = *b"CLKT";
const VERSION: u8 = 1;

/// Bytes of a frame before its payload.
pub const HEADER_BYTES: usize = 20;

/// The longest payload of any frame but [`Kind::Blocks`].
pub const SMALL: usize = 4096;

/// The longest name (of an engine, of a request) in a frame.
const MAX_NAME: usize = protocol::handoff::MAX_NAME_BYTES;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Asks for blocks: a [`Pull`].
    Pull = 1,
    /// The blocks asked for, as the engine wrote them.
    Blocks = 2,
    /// The blocks have arrived, and may go.
    Done = 3,
    /// The blocks will not be asked for, and may go: a [`Ticket`].
    Release = 4,
    /// They are gone.
    Released = 5,
    /// What was asked cannot be done: a [`Failure`].
    Failure = 6,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        [
            Self::Pull,
            Self::Blocks,
            Self::Done,
            Self::Release,
            Self::Released,
            Self::Failure,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == byte)
    }
}

/// What is wrong with a frame, or with the connection that should have brought it.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The connection ended inside a frame, or before one.
    #[error("expected {expected} more bytes of a frame, and the connection ended")]
    Short {
        /// Bytes wanted.
        expected: usize,
    },
    /// The connection failed.
    #[error("connection failed: {0}")]
    Io(#[from] std::io::Error),
    /// The bytes are not a frame.
    #[error("expected a frame that begins with CLKT, got {got:02x?}")]
    Magic {
        /// The first bytes.
        got: [u8; 4],
    },
    /// The frame is of another version.
    #[error("expected frames of version {VERSION}, got version {got}")]
    Version {
        /// The version that came.
        got: u8,
    },
    /// The frame is of no known kind, or not of the kind that comes next.
    #[error("expected {expected}, got a frame of kind {got}")]
    Kind {
        /// What was expected.
        expected: &'static str,
        /// The kind that came.
        got: u8,
    },
    /// The payload is longer than it can be.
    #[error("expected a payload of at most {limit} bytes, got one of {got}")]
    TooLong {
        /// The limit.
        limit: usize,
        /// Its length.
        got: usize,
    },
    /// The payload is not what was sent.
    #[error("expected a payload with checksum {expected:016x}, got {got:016x}")]
    Checksum {
        /// The header's.
        expected: u64,
        /// The payload's.
        got: u64,
    },
    /// The payload does not hold what its kind says.
    #[error("damaged payload: {0}")]
    Payload(&'static str),
}

/// A frame as it goes over the wire.
pub fn header(kind: Kind, payload: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&MAGIC);
    header[4] = VERSION;
    header[5] = kind as u8;
    header[8..12].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    header[12..].copy_from_slice(&xxh3_64(payload).to_le_bytes());
    header
}

/// Writes one frame.
///
/// # Errors
/// A payload of 4 GiB or more, or a connection that fails.
pub async fn write(
    to: &mut (impl AsyncWrite + Unpin),
    kind: Kind,
    payload: &[u8],
) -> Result<(), FrameError> {
    if u32::try_from(payload.len()).is_err() {
        return Err(FrameError::TooLong {
            limit: u32::MAX as usize,
            got: payload.len(),
        });
    }
    to.write_all(&header(kind, payload)).await?;
    to.write_all(payload).await?;
    to.flush().await?;
    Ok(())
}

/// Reads one frame whose payload has at most `limit` bytes.
///
/// # Errors
/// See [`FrameError`].
pub async fn read(
    from: &mut (impl AsyncRead + Unpin),
    limit: usize,
) -> Result<(Kind, Vec<u8>), FrameError> {
    let mut header = [0; HEADER_BYTES];
    fill(from, &mut header).await?;
    let mut fields = Reader(&header);
    let magic: [u8; 4] = fields.array()?;
    if magic != MAGIC {
        return Err(FrameError::Magic { got: magic });
    }
    let [version, kind, ..]: [u8; 4] = fields.array()?;
    if version != VERSION {
        return Err(FrameError::Version { got: version });
    }
    let kind = Kind::from_byte(kind).ok_or(FrameError::Kind {
        expected: "a known kind",
        got: kind,
    })?;
    let length = fields.u32()? as usize;
    let expected = u64::from_le_bytes(fields.array()?);
    if length > limit {
        return Err(FrameError::TooLong { limit, got: length });
    }
    let mut payload = vec![0; length];
    fill(from, &mut payload).await?;
    let got = xxh3_64(&payload);
    if got != expected {
        return Err(FrameError::Checksum { expected, got });
    }
    Ok((kind, payload))
}

async fn fill(from: &mut (impl AsyncRead + Unpin), buffer: &mut [u8]) -> Result<(), FrameError> {
    let expected = buffer.len();
    match from.read_exact(buffer).await {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            Err(FrameError::Short { expected })
        }
        Err(error) => Err(error.into()),
    }
}

/// Names held blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    /// The engine that holds them. After a restart a worker has another one.
    pub engine_id: String,
    /// The request that made them.
    pub request_id: String,
}

impl Ticket {
    /// The payload of a [`Kind::Release`].
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for name in [&self.engine_id, &self.request_id] {
            // Names longer than allowed are cut; nobody holds blocks under such a name.
            let bytes = &name.as_bytes()[..name.len().min(MAX_NAME)];
            out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
            out.extend_from_slice(bytes);
        }
        out
    }

    /// Reads the payload of a [`Kind::Release`].
    ///
    /// # Errors
    /// Anything but what [`Ticket::encode`] writes.
    pub fn decode(payload: &[u8]) -> Result<Self, FrameError> {
        let mut reader = Reader(payload);
        let ticket = Self::take(&mut reader)?;
        reader.end()?;
        Ok(ticket)
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(Self {
            engine_id: reader.name()?,
            request_id: reader.name()?,
        })
    }
}

/// Asks for held blocks, and says what the asker believes them to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pull {
    /// Which blocks.
    pub ticket: Ticket,
    /// [`prompt_digest`] of the asker's prompt.
    pub prompt_digest: u128,
    /// Tokens in the asker's prompt.
    pub prompt_tokens: u32,
    /// [`geometry_digest`] of the asker's engine.
    pub geometry_digest: u64,
    /// The first block to send; the asker has those before it.
    pub first_block: u32,
}

impl Pull {
    /// The payload of a [`Kind::Pull`].
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.ticket.encode();
        out.extend_from_slice(&self.prompt_digest.to_le_bytes());
        out.extend_from_slice(&self.prompt_tokens.to_le_bytes());
        out.extend_from_slice(&self.geometry_digest.to_le_bytes());
        out.extend_from_slice(&self.first_block.to_le_bytes());
        out
    }

    /// Reads the payload of a [`Kind::Pull`].
    ///
    /// # Errors
    /// Anything but what [`Pull::encode`] writes.
    pub fn decode(payload: &[u8]) -> Result<Self, FrameError> {
        let mut reader = Reader(payload);
        let pull = Self {
            ticket: Ticket::take(&mut reader)?,
            prompt_digest: u128::from_le_bytes(reader.array()?),
            prompt_tokens: reader.u32()?,
            geometry_digest: u64::from_le_bytes(reader.array()?),
            first_block: reader.u32()?,
        };
        reader.end()?;
        Ok(pull)
    }
}

/// Why a pull was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Nothing is held under that name: never was, released, or its lease has expired.
    NotHeld = 1,
    /// The blocks are of another engine, perhaps of this worker before a restart.
    OtherEngine = 2,
    /// The asker's model or block form is another one.
    Geometry = 3,
    /// The asker's prompt is another one.
    Prompt = 4,
    /// The request makes no sense.
    Malformed = 5,
    /// The holder is at fault, or going down.
    Internal = 6,
}

impl Refusal {
    /// Whether asking again can never help, because the two sides do not fit together.
    pub fn is_mismatch(self) -> bool {
        matches!(self, Self::Geometry | Self::Prompt)
    }
}

/// The answer to a request that cannot be met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Why, for the program.
    pub refusal: Refusal,
    /// Why, for a human.
    pub message: String,
}

impl Failure {
    /// The payload of a [`Kind::Failure`].
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.refusal as u8];
        let end = (0..=self.message.len().min(SMALL - 1))
            .rev()
            .find(|&end| self.message.is_char_boundary(end))
            .unwrap_or(0);
        out.extend_from_slice(&self.message.as_bytes()[..end]);
        out
    }

    /// Reads the payload of a [`Kind::Failure`].
    ///
    /// # Errors
    /// Anything but what [`Failure::encode`] writes.
    pub fn decode(payload: &[u8]) -> Result<Self, FrameError> {
        let (&code, message) = payload
            .split_first()
            .ok_or(FrameError::Payload("a failure without a reason"))?;
        let refusal = [
            Refusal::NotHeld,
            Refusal::OtherEngine,
            Refusal::Geometry,
            Refusal::Prompt,
            Refusal::Malformed,
            Refusal::Internal,
        ]
        .into_iter()
        .find(|refusal| *refusal as u8 == code)
        .ok_or(FrameError::Payload("a failure with an unknown reason"))?;
        let message = std::str::from_utf8(message)
            .map_err(|_| FrameError::Payload("a failure whose message is not text"))?;
        Ok(Self {
            refusal,
            message: message.to_owned(),
        })
    }
}

/// Names a prompt: both sides of a handoff must mean the same tokens.
pub fn prompt_digest(tokens: &[u32]) -> u128 {
    let bytes: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
    xxh3_128(&bytes)
}

/// Names the model and the form of its blocks: both sides of a handoff must have the same.
pub fn geometry_digest(geometry: &engine::KvGeometry) -> u64 {
    let shape = geometry.shape;
    let text = format!(
        "{} {} {} {} {} {} {} {} {}",
        geometry.fingerprint,
        geometry.layers,
        geometry.kv_heads,
        geometry.head_dim,
        geometry.block_size,
        geometry.block_bytes,
        shape.layers,
        shape.experts,
        shape.top_k,
    );
    xxh3_64(text.as_bytes())
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, n: usize) -> Result<&'a [u8], FrameError> {
        let (head, rest) = self
            .0
            .split_at_checked(n)
            .ok_or(FrameError::Payload("it ends early"))?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, FrameError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn name(&mut self) -> Result<String, FrameError> {
        let length = usize::from(u16::from_le_bytes(self.array()?));
        if length > MAX_NAME {
            return Err(FrameError::Payload("a name that is too long"));
        }
        let text = std::str::from_utf8(self.bytes(length)?)
            .map_err(|_| FrameError::Payload("a name that is not text"))?;
        Ok(text.to_owned())
    }

    fn end(&self) -> Result<(), FrameError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(FrameError::Payload("bytes follow its end"))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn pull() -> Pull {
        Pull {
            ticket: Ticket {
                engine_id: "engine".into(),
                request_id: "42".into(),
            },
            prompt_digest: prompt_digest(&[1, 2, 3]),
            prompt_tokens: 3,
            geometry_digest: 9,
            first_block: 1,
        }
    }

    async fn frame(kind: Kind, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        write(&mut out, kind, payload).await.unwrap();
        out
    }

    #[tokio::test]
    async fn frames_go_round() {
        let wire = frame(Kind::Pull, &pull().encode()).await;
        let (kind, payload) = read(&mut wire.as_slice(), SMALL).await.unwrap();
        assert_eq!(kind, Kind::Pull);
        assert_eq!(Pull::decode(&payload).unwrap(), pull());
        let ticket = pull().ticket;
        assert_eq!(Ticket::decode(&ticket.encode()).unwrap(), ticket);
        let failure = Failure {
            refusal: Refusal::NotHeld,
            message: "é".repeat(SMALL),
        };
        let read = Failure::decode(&failure.encode()).unwrap();
        assert_eq!(read.refusal, Refusal::NotHeld);
        assert!(failure.message.starts_with(&read.message) && failure.encode().len() <= SMALL);
    }

    #[tokio::test]
    async fn damaged_frames_are_named() {
        let good = frame(Kind::Blocks, b"payload").await;
        let check = async |bytes: &[u8], limit: usize, part: &str| {
            let error = read(&mut &bytes[..], limit).await.unwrap_err().to_string();
            assert!(error.contains(part), "{error} does not contain {part}");
        };
        check(&good[..good.len() - 1], 99, "connection ended").await;
        check(&good[..5], 99, "connection ended").await;
        check(b"", 99, "connection ended").await;
        check(&good, 6, "at most 6 bytes, got one of 7").await;
        let damaged = |at: usize| {
            let mut bytes = good.clone();
            bytes[at] ^= 0x40;
            bytes
        };
        check(&damaged(0), 99, "begins with CLKT").await;
        check(&damaged(4), 99, "version").await;
        check(&damaged(5), 99, "known kind").await;
        check(&damaged(11), 99, "at most 99 bytes").await;
        check(&damaged(14), 99, "checksum").await;
        check(&damaged(22), 99, "checksum").await;
    }

    proptest! {
        #[test]
        fn any_payload_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Pull::decode(&bytes);
            let _ = Ticket::decode(&bytes);
            let _ = Failure::decode(&bytes);
        }

        #[test]
        fn truncated_pulls_are_errors(cut in 0usize..100) {
            let whole = pull().encode();
            if cut < whole.len() {
                prop_assert!(Pull::decode(&whole[..cut]).is_err());
            }
        }
    }
}
