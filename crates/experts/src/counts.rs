//! How many tokens chose each expert of each layer.

use thiserror::Error;

use crate::shape::{ModelShape, ShapeError};

/// Top-k selections per layer and expert: `layers x experts`, row-major, one row per MoE layer.
///
/// Additions saturate at `u32::MAX`, which takes more than four billion tokens in one record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertCounts {
    shape: ModelShape,
    counts: Vec<u32>,
}

/// Expert ids that do not fit the shape they are counted in.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CountError {
    /// The layer index is beyond the model's MoE layers.
    #[error("expected a layer below {layers}, got {layer}")]
    Layer {
        /// MoE layers of the model.
        layers: u32,
        /// The index that came.
        layer: usize,
    },
    /// The block index is beyond the rows there are.
    #[error("expected a block below {blocks}, got {block}")]
    Block {
        /// Rows there are.
        blocks: usize,
        /// The index that came.
        block: usize,
    },
    /// A token must bring exactly top-k ids per layer.
    #[error("expected {top_k} expert ids for a token in layer {layer}, got {got}")]
    TopK {
        /// Experts each token selects.
        top_k: u32,
        /// The layer being counted.
        layer: usize,
        /// Ids that came.
        got: usize,
    },
    /// An expert id is beyond the layer's experts.
    #[error("expected an expert id below {experts} in layer {layer}, got {id}")]
    Expert {
        /// Experts per layer.
        experts: u32,
        /// The layer being counted.
        layer: usize,
        /// The id that came.
        id: u16,
    },
    /// A row of bytes has another length than the shape asks for.
    #[error("expected {expected} bytes for a row of block counts, got {got}")]
    RowBytes {
        /// Bytes wanted.
        expected: usize,
        /// Bytes that came.
        got: usize,
    },
    /// The two sides of a sum belong to different models.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

/// Checks one token's ids in one layer; nothing has been counted when it fails.
pub(crate) fn check_ids(shape: ModelShape, layer: usize, ids: &[u16]) -> Result<(), CountError> {
    if layer >= shape.layers as usize {
        return Err(CountError::Layer {
            layers: shape.layers,
            layer,
        });
    }
    if ids.len() != shape.top_k as usize {
        return Err(CountError::TopK {
            top_k: shape.top_k,
            layer,
            got: ids.len(),
        });
    }
    match ids.iter().find(|&&id| u32::from(id) >= shape.experts) {
        Some(&id) => Err(CountError::Expert {
            experts: shape.experts,
            layer,
            id,
        }),
        None => Ok(()),
    }
}

impl ExpertCounts {
    /// No selections yet.
    #[must_use]
    pub fn zeros(shape: ModelShape) -> Self {
        Self {
            shape,
            counts: vec![0; shape.cells()],
        }
    }

    /// Takes counts that are already in row-major order.
    ///
    /// # Errors
    /// [`ShapeError::Length`] when there is not one count per layer and expert.
    pub fn from_vec(shape: ModelShape, counts: Vec<u32>) -> Result<Self, ShapeError> {
        if counts.len() == shape.cells() {
            Ok(Self { shape, counts })
        } else {
            Err(ShapeError::Length {
                shape,
                expected: shape.cells(),
                got: counts.len(),
            })
        }
    }

    /// The model these counts belong to.
    #[must_use]
    pub fn shape(&self) -> ModelShape {
        self.shape
    }

    /// Counts one token's `ids` (exactly top-k of them) in MoE layer `layer`.
    ///
    /// # Errors
    /// A layer or id out of range, or another number of ids than top-k; nothing is counted then.
    pub fn record(&mut self, layer: usize, ids: &[u16]) -> Result<(), CountError> {
        check_ids(self.shape, layer, ids)?;
        let experts = self.shape.experts as usize;
        let row = &mut self.counts[layer * experts..(layer + 1) * experts];
        for &id in ids {
            let cell = &mut row[id as usize];
            *cell = cell.saturating_add(1);
        }
        Ok(())
    }

    /// Adds another record's counts, cell by cell, saturating.
    ///
    /// # Errors
    /// [`ShapeError::Mismatch`] when `other` belongs to another shape.
    pub fn add(&mut self, other: &Self) -> Result<(), ShapeError> {
        self.shape.expect(other.shape)?;
        for (cell, &more) in self.counts.iter_mut().zip(&other.counts) {
            *cell = cell.saturating_add(more);
        }
        Ok(())
    }

    /// The counts of one MoE layer, one per expert.
    ///
    /// # Panics
    /// When `layer` is not below the shape's layers.
    #[must_use]
    pub fn row(&self, layer: usize) -> &[u32] {
        let experts = self.shape.experts as usize;
        &self.counts[layer * experts..(layer + 1) * experts]
    }

    /// All rows, in layer order.
    pub fn rows(&self) -> impl Iterator<Item = &[u32]> {
        self.counts.chunks_exact(self.shape.experts.max(1) as usize)
    }

    /// All counts, `layers x experts`, row-major.
    #[must_use]
    pub fn as_slice(&self) -> &[u32] {
        &self.counts
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u32] {
        &mut self.counts
    }

    /// True when nothing has been counted.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.counts.iter().all(|&count| count == 0)
    }
}
