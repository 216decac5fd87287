//! Counts that know which part of the tokens they speak for.

use thiserror::Error;

use crate::counts::ExpertCounts;
use crate::shape::{ModelShape, ShapeError};
use crate::wire::{self, WireError};

/// The expert counts of a run of tokens, usually a prompt, with their coverage.
///
/// Coverage is below one when some tokens' KV blocks came from elsewhere without their ids.
/// Invariant: the shape is valid, every layer's counts sum to `covered_tokens x top_k`, no count
/// exceeds `covered_tokens`, and `covered_tokens <= prompt_tokens`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptCounts {
    counts: ExpertCounts,
    covered_tokens: u32,
    prompt_tokens: u32,
}

/// Counts that no run of tokens can have left.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PromptCountsError {
    /// The shape itself is not a model's.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A layer's counts are not those of whole tokens, or of as many as the first layer's.
    #[error("expected layer {layer}'s counts to sum to {expected} (tokens x top-k), got {got}")]
    LayerSum {
        /// The layer.
        layer: usize,
        /// The sum wanted.
        expected: u64,
        /// The sum that came.
        got: u64,
    },
    /// An expert was counted more often than there are tokens.
    #[error("expected at most {tokens} selections of expert {expert} in layer {layer}, got {got}")]
    Cell {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: usize,
        /// Tokens covered.
        tokens: u32,
        /// The count that came.
        got: u32,
    },
    /// More tokens were counted than the prompt has.
    #[error("expected counts of at most {prompt_tokens} prompt tokens, got {covered_tokens}")]
    Coverage {
        /// Tokens that the counts speak for.
        covered_tokens: u64,
        /// Tokens of the prompt.
        prompt_tokens: u32,
    },
}

impl PromptCounts {
    /// Takes the counts of a prompt of `prompt_tokens` tokens; how many of those the counts cover
    /// follows from their sums.
    ///
    /// # Errors
    /// Layers that disagree on the number of tokens, or more tokens than the prompt has.
    pub fn new(counts: ExpertCounts, prompt_tokens: u32) -> Result<Self, PromptCountsError> {
        let shape = counts.shape().check()?;
        let top_k = u64::from(shape.top_k);
        let sum = |row: &[u32]| row.iter().map(|&count| u64::from(count)).sum::<u64>();
        let covered = sum(counts.row(0)) / top_k;
        if covered > u64::from(prompt_tokens) {
            return Err(PromptCountsError::Coverage {
                covered_tokens: covered,
                prompt_tokens,
            });
        }
        let covered_tokens = covered as u32;
        let expected = covered * top_k;
        for (layer, row) in counts.rows().enumerate() {
            let got = sum(row);
            if got != expected {
                return Err(PromptCountsError::LayerSum {
                    layer,
                    expected,
                    got,
                });
            }
            if let Some(expert) = row.iter().position(|&count| count > covered_tokens) {
                return Err(PromptCountsError::Cell {
                    layer,
                    expert,
                    tokens: covered_tokens,
                    got: row[expert],
                });
            }
        }
        Ok(Self {
            counts,
            covered_tokens,
            prompt_tokens,
        })
    }

    /// Takes counts that cover every token of their run.
    ///
    /// # Errors
    /// Layers that disagree on the number of tokens.
    pub fn complete(counts: ExpertCounts) -> Result<Self, PromptCountsError> {
        let mut prompt = Self::new(counts, u32::MAX)?;
        prompt.prompt_tokens = prompt.covered_tokens;
        Ok(prompt)
    }

    /// For the wire decoder, which has checked the invariant as it went.
    pub(crate) fn trusted(counts: ExpertCounts, covered_tokens: u32, prompt_tokens: u32) -> Self {
        Self {
            counts,
            covered_tokens,
            prompt_tokens,
        }
    }

    /// The counts.
    #[must_use]
    pub fn counts(&self) -> &ExpertCounts {
        &self.counts
    }

    /// The counts, given away.
    #[must_use]
    pub fn into_counts(self) -> ExpertCounts {
        self.counts
    }

    /// The model these counts belong to.
    #[must_use]
    pub fn shape(&self) -> ModelShape {
        self.counts.shape()
    }

    /// Tokens that the counts speak for.
    #[must_use]
    pub fn covered_tokens(&self) -> u32 {
        self.covered_tokens
    }

    /// Tokens of the whole run.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// `covered_tokens / prompt_tokens`, 0 for an empty prompt.
    #[must_use]
    pub fn coverage(&self) -> f64 {
        if self.prompt_tokens == 0 {
            0.0
        } else {
            f64::from(self.covered_tokens) / f64::from(self.prompt_tokens)
        }
    }

    /// The counts of some layers alone, in the order given, as those of a model with these layers.
    ///
    /// # Panics
    /// When `layers` is empty or names a layer that does not exist.
    #[must_use]
    pub fn keep_layers(&self, layers: &[u32]) -> Self {
        assert!(!layers.is_empty(), "expected at least one layer to keep");
        let shape = ModelShape {
            layers: layers.len() as u32,
            ..self.shape()
        };
        let mut counts = ExpertCounts::zeros(shape);
        let rows = counts
            .as_mut_slice()
            .chunks_exact_mut(shape.experts as usize);
        for (row, &layer) in rows.zip(layers) {
            row.copy_from_slice(self.counts.row(layer as usize));
        }
        Self { counts, ..*self }
    }

    /// The compact text form; see [`wire`] for its layout and its size.
    #[must_use]
    pub fn encode(&self) -> String {
        wire::encode(self)
    }

    /// Reads the compact text form back, checking every bound.
    ///
    /// # Errors
    /// See [`WireError`].
    pub fn decode(text: &str) -> Result<Self, WireError> {
        wire::decode(text)
    }
}
