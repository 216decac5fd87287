//! The form in which a prompt's blocks travel from one engine to another.
//!
//! A header says what follows, so that the receiver can check every length and the model before it takes a block; all integers
//! are little-endian:
//!
//! | field | bytes |
//! |---|---|
//! | magic `COLOKV01` | 8 |
//! | layers, kv heads, head dim, block size, MoE layers, experts, top-k | 7 x 4 |
//! | bytes of one block's keys and values | 8 |
//! | prompt tokens, first block, number of blocks | 3 x 4 |
//! | name of the prompt: hash over model fingerprint, block size and token ids | 32 |
//!
//! Then, for every block: the number of tokens in its signature row (4), the row (`layers x experts` 16-bit counts), and the keys
//! and values (bf16) in the backend's order.

use experts::ModelShape;

use crate::backend::BackendFacts;
use crate::cache::{BlockHash, RowError, check_row};

const MAGIC: &[u8; 8] = b"COLOKV01";
/// Bytes before the first block.
const HEADER: usize = 8 + 7 * 4 + 8 + 3 * 4 + 32;

/// What two engines must have in common to exchange blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGeometry {
    /// Names the model.
    pub fingerprint: String,
    /// Attention layers.
    pub layers: usize,
    /// Key and value heads per layer.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Bytes of one block's keys and values (bf16).
    pub block_bytes: usize,
    /// The MoE layers, which give the signature rows their size.
    pub shape: ModelShape,
}

impl KvGeometry {
    pub(crate) fn new(facts: &BackendFacts, block_bytes: usize) -> Self {
        Self {
            fingerprint: facts.fingerprint.clone(),
            layers: facts.layers,
            kv_heads: facts.kv_heads,
            head_dim: facts.head_dim,
            block_size: facts.block_size,
            block_bytes,
            shape: facts.shape,
        }
    }

    /// Bytes of one block's signature row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.shape.layers as usize * self.shape.experts as usize * 2
    }

    /// Blocks of a prompt.
    #[must_use]
    pub fn blocks(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Bytes that a peer sends for a prompt of `tokens` tokens from block `first_block` on: the most that a receiver need read.
    #[must_use]
    pub fn payload_bytes(&self, tokens: usize, first_block: usize) -> usize {
        HEADER + self.blocks(tokens).saturating_sub(first_block) * self.stride()
    }

    /// Bytes of one block in a payload.
    fn stride(&self) -> usize {
        4 + self.row_bytes() + self.block_bytes
    }

    /// The header's first part, which must be equal on both sides.
    fn fields(&self) -> [(&'static str, u64); 8] {
        [
            ("layers", self.layers as u64),
            ("kv heads", self.kv_heads as u64),
            ("head dim", self.head_dim as u64),
            ("block size", self.block_size as u64),
            ("moe layers", u64::from(self.shape.layers)),
            ("experts", u64::from(self.shape.experts)),
            ("top-k", u64::from(self.shape.top_k)),
            ("block bytes", self.block_bytes as u64),
        ]
    }
}

/// What a payload holds beside the geometry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) tokens: usize,
    pub(crate) first_block: usize,
    /// Name of the whole prompt.
    pub(crate) prompt: BlockHash,
}

/// Why blocks could not be read or taken over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandoffError {
    /// No finished request of that name holds blocks: it never did, or they were released.
    #[error("request {id} holds no blocks here")]
    NotHeld {
        /// The request's name.
        id: u64,
    },
    /// The first block asked for lies beyond the prompt.
    #[error("expected a first block of at most {blocks}, got {first_block}")]
    FirstBlock {
        /// Blocks of the prompt.
        blocks: usize,
        /// The block asked for.
        first_block: usize,
    },
    /// The payload does not begin as one.
    #[error("expected a payload of blocks that begins with COLOKV01")]
    Magic,
    /// The payload is shorter or longer than its header says, or than a header.
    #[error("expected a payload of {expected} bytes, got {got}")]
    Length {
        /// Bytes wanted.
        expected: usize,
        /// Bytes that came.
        got: usize,
    },
    /// The other engine's blocks have another form.
    #[error("expected blocks with {field} {expected}, got {got}")]
    Geometry {
        /// What differs.
        field: &'static str,
        /// This engine's.
        expected: u64,
        /// The payload's.
        got: u64,
    },
    /// The blocks are of another prompt or of another model.
    #[error("expected blocks of this prompt and model, got blocks of another one")]
    Prompt,
    /// A block's signature row does not count its tokens.
    #[error("block {block}: {source}")]
    Row {
        /// The block's place in the prompt.
        block: usize,
        /// What is wrong.
        source: RowError,
    },
    /// The pin was never given out, or has been used or given back.
    #[error("expected a pin that waits for its request, got one that is unknown or used")]
    Pin,
}

/// Writes a header, to be followed by the blocks.
pub(crate) fn write_header(geometry: &KvGeometry, contents: &Contents, out: &mut Vec<u8>) {
    out.extend_from_slice(MAGIC);
    for (name, value) in geometry.fields() {
        if name == "block bytes" {
            out.extend_from_slice(&value.to_le_bytes());
        } else {
            out.extend_from_slice(&(value as u32).to_le_bytes());
        }
    }
    let blocks = geometry.blocks(contents.tokens) - contents.first_block;
    for value in [contents.tokens, contents.first_block, blocks] {
        out.extend_from_slice(&(value as u32).to_le_bytes());
    }
    out.extend_from_slice(contents.prompt.as_bytes());
}

/// Checks a payload against what this engine expects of it: geometry, prompt, first block, every length and every row.
pub(crate) fn check(
    geometry: &KvGeometry,
    expected: &Contents,
    payload: &[u8],
) -> Result<(), HandoffError> {
    let Some((magic, rest)) = payload.split_first_chunk::<8>() else {
        return Err(HandoffError::Length {
            expected: geometry.payload_bytes(expected.tokens, expected.first_block),
            got: payload.len(),
        });
    };
    if magic != MAGIC {
        return Err(HandoffError::Magic);
    }
    let short = HandoffError::Length {
        expected: geometry.payload_bytes(expected.tokens, expected.first_block),
        got: payload.len(),
    };
    let mut reader = Reader(rest);
    for (field, expected) in geometry.fields() {
        let got = if field == "block bytes" {
            reader.u64()
        } else {
            reader.u32().map(u64::from)
        };
        let got = got.ok_or_else(|| short.clone())?;
        if got != expected {
            return Err(HandoffError::Geometry {
                field,
                expected,
                got,
            });
        }
    }
    let blocks = geometry.blocks(expected.tokens) - expected.first_block;
    let counts = [
        ("prompt tokens", expected.tokens),
        ("first block", expected.first_block),
        ("number of blocks", blocks),
    ];
    for (field, expected) in counts {
        let (expected, got) = (
            expected as u64,
            u64::from(reader.u32().ok_or_else(|| short.clone())?),
        );
        if got != expected {
            return Err(HandoffError::Geometry {
                field,
                expected,
                got,
            });
        }
    }
    let prompt = reader.take(32).ok_or_else(|| short.clone())?;
    if prompt != expected.prompt.as_bytes() {
        return Err(HandoffError::Prompt);
    }
    if payload.len() != geometry.payload_bytes(expected.tokens, expected.first_block) {
        return Err(short);
    }
    for (i, block) in self::blocks(geometry, payload).enumerate() {
        let place = expected.first_block + i;
        let tokens = geometry
            .block_size
            .min(expected.tokens - place * geometry.block_size);
        let filled = u64::from(block.filled);
        if filled != tokens as u64 {
            return Err(HandoffError::Geometry {
                field: "tokens in a signature row",
                expected: tokens as u64,
                got: filled,
            });
        }
        check_row(geometry.shape, block.filled, block.row).map_err(|source| HandoffError::Row {
            block: place,
            source,
        })?;
    }
    Ok(())
}

/// One block of a payload.
pub(crate) struct PayloadBlock<'a> {
    /// Tokens that the row covers.
    pub(crate) filled: u32,
    pub(crate) row: &'a [u8],
    /// Keys and values.
    pub(crate) kv: &'a [u8],
}

/// The blocks of a payload whose length is right.
pub(crate) fn blocks<'a>(
    geometry: &KvGeometry,
    payload: &'a [u8],
) -> impl Iterator<Item = PayloadBlock<'a>> {
    let (row_bytes, stride) = (geometry.row_bytes(), geometry.stride());
    payload[HEADER..].chunks_exact(stride).map(move |block| {
        let mut reader = Reader(block);
        let filled = reader.u32().unwrap_or(0);
        let (row, kv) = reader.0.split_at(row_bytes);
        PayloadBlock { filled, row, kv }
    })
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }

    fn u32(&mut self) -> Option<u32> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_le_bytes(*head))
    }

    fn u64(&mut self) -> Option<u64> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*head))
    }
}
