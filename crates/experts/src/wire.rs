//! The text form of counts: what rides in `kv_transfer_params` between a prefill worker and the
//! gateway, and in calibration files.
//!
//! # Where it rides
//!
//! One key of ours, [`KEY`], inside vLLM's `kv_transfer_params`; its value is an object:
//!
//! - in a reply: `{"prompt_counts": "<counts>"}`, and if asked for `"output_counts": "<counts>"`,
//!   `"gate_probabilities": "<values>"`, `"gate_logits": "<values>"`;
//! - in a request: `{"want": ["output_counts", "gate_probabilities", "gate_logits"]}` asks a worker
//!   that runs the whole request for more, in replies that are not streamed.
//!
//! `<counts>` is [`encode`], `<values>` is [`encode_values`]; both are standard base64 with padding.
//!
//! # Layout of `<counts>`, version 1
//!
//! ```text
//! u8  version = 1
//! u16 layers, u16 experts, u16 top_k            little-endian
//! u32 covered_tokens, u32 prompt_tokens         little-endian
//! per layer, bits, most significant first:
//!   1 bit   0 = dense, 1 = sparse
//!   5 bits  r, the Rice parameter
//!   dense : per expert  rice(count, r)
//!   sparse: per expert  1 bit (count > 0), then per expert with a count  rice(count - 1, r)
//! zero bits up to a whole byte
//! ```
//!
//! `rice(v, r)` is `v >> r` zeros, a one, and the low `r` bits of `v`. The writer takes the shorter
//! of both forms and the best `r` per layer; a reader must accept any.
//!
//! # Size
//!
//! A layer's counts sum to `S = covered_tokens x top_k`, so a dense layer takes at most
//! `6 + E (1 + r) + S / 2^r` bits whatever their distribution, for the best `r`
//! ([`max_encoded_len`]). At L = 48, E = 128, top-8 and 8,192 tokens: 8,499 bytes, **11,332
//! characters of base64**, where 16 bits a cell would take 16,404. Skewed counts take less.
//!
//! # What a reader checks
//!
//! Length limits before anything is allocated (memory is at most 32 times the text), the version,
//! the shape's limits, every layer's sum against `covered_tokens x top_k`, every count against
//! `covered_tokens`, coverage against `prompt_tokens`, and that nothing follows the last layer.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use thiserror::Error;

use crate::bits::{BitReader, BitWriter, Unary};
use crate::counts::ExpertCounts;
use crate::prompt::PromptCounts;
use crate::shape::{ModelShape, ShapeError};

/// The one key of ours inside `kv_transfer_params`.
pub const KEY: &str = "colocate";

/// The version this crate writes, and the only one it reads.
pub const VERSION: u8 = 1;

/// The longest text that is looked at, in bytes.
pub const MAX_TEXT: usize = 32 << 20;

const HEADER: usize = 15;

/// A text that is not the wire form of counts or gate values.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// The text is longer than [`MAX_TEXT`].
    #[error("expected at most {limit} characters of base64, got {got}")]
    TooLong {
        /// The limit.
        limit: usize,
        /// The text's length.
        got: usize,
    },
    /// The text is not base64.
    #[error("expected standard base64: {0}")]
    Base64(#[from] base64::DecodeError),
    /// The data ends too early.
    #[error("truncated: {at}")]
    Truncated {
        /// Where.
        at: String,
    },
    /// Data follows the end.
    #[error("expected nothing after the last layer, got trailing bits")]
    Trailing,
    /// Another version of the form.
    #[error("expected version {VERSION} of the counts form, got {0}")]
    Version(u8),
    /// The shape is not a model's, or not the one wanted.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// More tokens covered than the prompt has.
    #[error("expected counts of at most {prompt_tokens} prompt tokens, got {covered_tokens}")]
    Coverage {
        /// Tokens that the counts speak for.
        covered_tokens: u32,
        /// Tokens of the prompt.
        prompt_tokens: u32,
    },
    /// A count that `covered_tokens` tokens cannot have left.
    #[error("expected at most {limit} selections of expert {expert} in layer {layer}, got more")]
    Cell {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: usize,
        /// Tokens covered.
        limit: u32,
    },
    /// A layer's counts do not sum to tokens x top-k.
    #[error("expected layer {layer}'s counts to sum to {expected} (tokens x top-k), got {got}")]
    LayerSum {
        /// The layer.
        layer: usize,
        /// The sum wanted.
        expected: u64,
        /// The sum that came.
        got: u64,
    },
    /// A gate value is not a finite number.
    #[error("expected finite gate values, got {value} at index {index}")]
    NotFinite {
        /// Where.
        index: usize,
        /// What, as text.
        value: String,
    },
}

/// The most base64 characters that [`encode`] writes for `tokens` covered tokens of `shape`,
/// whatever their distribution over experts.
#[must_use]
pub fn max_encoded_len(shape: ModelShape, tokens: u32) -> usize {
    let (experts, sum) = (
        u64::from(shape.experts),
        u64::from(tokens) * u64::from(shape.top_k),
    );
    let layer = (0..32u64)
        .map(|r| 6 + experts * (1 + r) + (sum >> r))
        .min()
        .unwrap_or(0);
    let bytes = HEADER as u64 + (layer * u64::from(shape.layers)).div_ceil(8);
    (bytes.div_ceil(3) * 4) as usize
}

/// Writes counts in their text form.
#[must_use]
pub fn encode(prompt: &PromptCounts) -> String {
    STANDARD.encode(to_bytes(prompt))
}

/// Writes counts in the form's bytes, before base64.
#[must_use]
pub fn to_bytes(prompt: &PromptCounts) -> Vec<u8> {
    let shape = prompt.shape();
    let mut bytes = Vec::with_capacity(HEADER + shape.cells() * 2);
    bytes.push(VERSION);
    // The shape was checked when the counts were made: its dimensions fit.
    for dimension in [shape.layers, shape.experts, shape.top_k] {
        bytes.extend_from_slice(&(dimension as u16).to_le_bytes());
    }
    bytes.extend_from_slice(&prompt.covered_tokens().to_le_bytes());
    bytes.extend_from_slice(&prompt.prompt_tokens().to_le_bytes());
    let mut bits = BitWriter::after(bytes);
    for row in prompt.counts().rows() {
        put_layer(&mut bits, row);
    }
    bits.finish()
}

/// The cheapest Rice parameter for `values`, and the bits it takes.
fn best_rice(values: &(impl Iterator<Item = u32> + Clone)) -> (u32, u64) {
    let largest = values.clone().max().unwrap_or(0);
    (0..=(31 - largest.max(1).leading_zeros()))
        .map(|r| {
            let bits = |value: u32| u64::from(value >> r) + 1 + u64::from(r);
            (r, values.clone().map(bits).sum::<u64>())
        })
        .min_by_key(|&(_, bits)| bits)
        .unwrap_or((0, 0))
}

fn put_rice(bits: &mut BitWriter, value: u32, r: u32) {
    bits.put_unary(value >> r);
    bits.put(value & ((1 << r) - 1), r);
}

fn put_layer(bits: &mut BitWriter, row: &[u32]) {
    let present = row
        .iter()
        .filter(|&&count| count > 0)
        .map(|count| count - 1);
    let (dense_r, dense) = best_rice(&row.iter().copied());
    let (sparse_r, sparse) = best_rice(&present);
    if dense <= sparse + row.len() as u64 {
        bits.put(dense_r, 6);
        for &count in row {
            put_rice(bits, count, dense_r);
        }
    } else {
        bits.put(1 << 5 | sparse_r, 6);
        for &count in row {
            bits.put(u32::from(count > 0), 1);
        }
        for rest in present {
            put_rice(bits, rest, sparse_r);
        }
    }
}

/// Reads counts from their text form, checking every bound.
///
/// # Errors
/// See [`WireError`]; nothing in a text makes this panic or allocate beyond 32 times its length.
pub fn decode(text: &str) -> Result<PromptCounts, WireError> {
    from_bytes(&from_base64(text)?)
}

/// Reads counts from the form's bytes, checking every bound.
///
/// # Errors
/// See [`WireError`].
pub fn from_bytes(bytes: &[u8]) -> Result<PromptCounts, WireError> {
    let (header, body) =
        bytes
            .split_first_chunk::<HEADER>()
            .ok_or_else(|| WireError::Truncated {
                at: format!("expected a header of {HEADER} bytes, got {}", bytes.len()),
            })?;
    if header[0] != VERSION {
        return Err(WireError::Version(header[0]));
    }
    let u16_at = |at: usize| u32::from(u16::from_le_bytes([header[at], header[at + 1]]));
    let u32_at = |at: usize| {
        u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let shape = ModelShape {
        layers: u16_at(1),
        experts: u16_at(3),
        top_k: u16_at(5),
    }
    .check()?;
    let (covered_tokens, prompt_tokens) = (u32_at(7), u32_at(11));
    if covered_tokens > prompt_tokens {
        return Err(WireError::Coverage {
            covered_tokens,
            prompt_tokens,
        });
    }
    // Every cell takes a bit at least, in both forms: so the text bounds the allocation.
    let least = shape.cells().div_ceil(8);
    if body.len() < least {
        return Err(WireError::Truncated {
            at: format!(
                "expected at least {least} bytes for {shape}, got {}",
                body.len()
            ),
        });
    }
    let mut counts = ExpertCounts::zeros(shape);
    let mut bits = BitReader::new(body);
    let rows = counts
        .as_mut_slice()
        .chunks_exact_mut(shape.experts as usize);
    for (layer, row) in rows.enumerate() {
        take_layer(&mut bits, layer, row, covered_tokens)?;
        let got = row.iter().map(|&count| u64::from(count)).sum::<u64>();
        let expected = u64::from(covered_tokens) * u64::from(shape.top_k);
        if got != expected {
            return Err(WireError::LayerSum {
                layer,
                expected,
                got,
            });
        }
    }
    if !bits.at_padding() {
        return Err(WireError::Trailing);
    }
    Ok(PromptCounts::trusted(counts, covered_tokens, prompt_tokens))
}

fn take_layer(
    bits: &mut BitReader<'_>,
    layer: usize,
    row: &mut [u32],
    limit: u32,
) -> Result<(), WireError> {
    let truncated = || WireError::Truncated {
        at: format!("the data ends in layer {layer}"),
    };
    let head = bits.take(6).ok_or_else(truncated)?;
    let (sparse, r) = (head >> 5 == 1, head & 31);
    if sparse {
        for cell in row.iter_mut() {
            *cell = bits.take(1).ok_or_else(truncated)?;
        }
    }
    for (expert, cell) in row.iter_mut().enumerate() {
        if sparse && *cell == 0 {
            continue;
        }
        let over = || WireError::Cell {
            layer,
            expert,
            limit,
        };
        // In the sparse form the cell holds the one that was subtracted.
        let quotient = bits.take_unary(limit >> r).map_err(|why| match why {
            Unary::End => truncated(),
            Unary::OverLimit => over(),
        })?;
        let rest = bits.take(r).ok_or_else(truncated)?;
        // quotient <= limit >> r, so the shift loses nothing.
        let value = u64::from(quotient << r | rest) + u64::from(*cell);
        if value > u64::from(limit) {
            return Err(over());
        }
        *cell = value as u32;
    }
    Ok(())
}

/// Writes one `f32` per layer and expert as little-endian bytes in base64.
///
/// For gate probabilities and gate logits: sums over the tokens, `layers x experts`, row-major.
#[must_use]
pub fn encode_values(values: &[f32]) -> String {
    let mut bytes = Vec::with_capacity(values.len() * 4);
    for value in values {
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    STANDARD.encode(bytes)
}

/// Reads what [`encode_values`] wrote for a model of `shape`.
///
/// # Errors
/// Text that is not base64, another number of values, a value that is not finite.
pub fn decode_values(text: &str, shape: ModelShape) -> Result<Vec<f32>, WireError> {
    let bytes = from_base64(text)?;
    let (values, rest) = bytes.as_chunks::<4>();
    if values.len() != shape.cells() || !rest.is_empty() {
        return Err(ShapeError::Length {
            shape,
            expected: shape.cells(),
            got: values.len(),
        }
        .into());
    }
    let values: Vec<f32> = values.iter().map(|&v| f32::from_le_bytes(v)).collect();
    match values.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(WireError::NotFinite {
            index,
            value: values[index].to_string(),
        }),
        None => Ok(values),
    }
}

fn from_base64(text: &str) -> Result<Vec<u8>, WireError> {
    if text.len() > MAX_TEXT {
        return Err(WireError::TooLong {
            limit: MAX_TEXT,
            got: text.len(),
        });
    }
    Ok(STANDARD.decode(text)?)
}
