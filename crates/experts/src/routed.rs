//! The raw choices, token by token.

use crate::counts::{CountError, ExpertCounts, check_ids};
use crate::shape::{ModelShape, ShapeError};

/// The expert ids of a run of tokens: `tokens x layers x top_k`, row-major, in top-k order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutedExperts {
    shape: ModelShape,
    ids: Vec<u16>,
}

impl RoutedExperts {
    /// No tokens yet.
    #[must_use]
    pub fn new(shape: ModelShape) -> Self {
        Self {
            shape,
            ids: Vec::new(),
        }
    }

    /// Takes ids that are already in order.
    ///
    /// # Errors
    /// [`ShapeError::Length`] when they are not a whole number of tokens, an id out of range
    /// otherwise.
    pub fn from_ids(shape: ModelShape, ids: Vec<u16>) -> Result<Self, CountError> {
        let per_token = shape.ids_per_token();
        if per_token == 0 || !ids.len().is_multiple_of(per_token) {
            return Err(ShapeError::Length {
                shape,
                expected: ids.len().next_multiple_of(per_token.max(1)),
                got: ids.len(),
            }
            .into());
        }
        let routed = Self { shape, ids };
        for token in 0..routed.tokens() {
            for layer in 0..shape.layers as usize {
                check_ids(shape, layer, routed.ids(token, layer))?;
            }
        }
        Ok(routed)
    }

    /// Appends one token: `layers x top_k` ids.
    ///
    /// # Errors
    /// Another number of ids or an id out of range; nothing is appended then.
    pub fn push(&mut self, ids: &[u16]) -> Result<(), CountError> {
        if ids.len() != self.shape.ids_per_token() {
            return Err(ShapeError::Length {
                shape: self.shape,
                expected: self.shape.ids_per_token(),
                got: ids.len(),
            }
            .into());
        }
        for (layer, ids) in ids
            .chunks_exact(self.shape.top_k.max(1) as usize)
            .enumerate()
        {
            check_ids(self.shape, layer, ids)?;
        }
        self.ids.extend_from_slice(ids);
        Ok(())
    }

    /// The model these ids belong to.
    #[must_use]
    pub fn shape(&self) -> ModelShape {
        self.shape
    }

    /// Tokens there are.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.ids.len() / self.shape.ids_per_token().max(1)
    }

    /// One token's experts in one MoE layer, in top-k order.
    ///
    /// # Panics
    /// When there is no such token or layer.
    #[must_use]
    pub fn ids(&self, token: usize, layer: usize) -> &[u16] {
        let top_k = self.shape.top_k as usize;
        let start = token * self.shape.ids_per_token() + layer * top_k;
        &self.ids[start..start + top_k]
    }

    /// All ids, `tokens x layers x top_k`.
    #[must_use]
    pub fn as_slice(&self) -> &[u16] {
        &self.ids
    }

    /// The counts of all tokens.
    #[must_use]
    pub fn counts(&self) -> ExpertCounts {
        let mut counts = ExpertCounts::zeros(self.shape);
        let (experts, top_k) = (self.shape.experts as usize, self.shape.top_k as usize);
        let cells = counts.as_mut_slice();
        for token in self.ids.chunks_exact(self.shape.ids_per_token().max(1)) {
            for (layer, ids) in token.chunks_exact(top_k).enumerate() {
                for &id in ids {
                    let cell = &mut cells[layer * experts + id as usize];
                    *cell = cell.saturating_add(1);
                }
            }
        }
        counts
    }
}
