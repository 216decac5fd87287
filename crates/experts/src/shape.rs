//! What a mixture-of-experts model is to a router.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The routed part of a model: its MoE layers only, not the dense ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelShape {
    /// MoE layers. Layer indices count these alone, from 0.
    pub layers: u32,
    /// Routed experts per layer, shared experts not counted.
    pub experts: u32,
    /// Experts that each token selects in each layer.
    pub top_k: u32,
}

/// A shape that cannot be, or two shapes that should be one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// A dimension is zero or beyond what this crate handles.
    #[error("expected {name} between 1 and {limit}, got {got}")]
    OutOfRange {
        /// The field's name.
        name: &'static str,
        /// The largest accepted value.
        limit: u32,
        /// The value that came.
        got: u32,
    },
    /// Two values that must describe the same model do not.
    #[error("expected a model of {expected}, got {got}")]
    Mismatch {
        /// The shape that was wanted.
        expected: ModelShape,
        /// The shape that came.
        got: ModelShape,
    },
    /// A slice does not hold one value per layer and expert.
    #[error("expected {expected} values for {shape}, got {got}")]
    Length {
        /// The shape that says how many.
        shape: ModelShape,
        /// Values wanted.
        expected: usize,
        /// Values that came.
        got: usize,
    },
}

impl ModelShape {
    /// The most MoE layers that files and the wire may name.
    pub const MAX_LAYERS: u32 = 1024;
    /// The most experts per layer that files and the wire may name.
    pub const MAX_EXPERTS: u32 = 8192;

    /// Cells of a counts matrix: layers x experts.
    #[must_use]
    pub fn cells(self) -> usize {
        self.layers as usize * self.experts as usize
    }

    /// Expert ids that one token leaves behind: layers x top-k.
    #[must_use]
    pub fn ids_per_token(self) -> usize {
        self.layers as usize * self.top_k as usize
    }

    /// Checks that the dimensions are positive, within limits, and top-k within the experts.
    ///
    /// # Errors
    /// [`ShapeError::OutOfRange`] names the first dimension that is not.
    pub fn check(self) -> Result<Self, ShapeError> {
        for (name, got, limit) in [
            ("layers", self.layers, Self::MAX_LAYERS),
            ("experts", self.experts, Self::MAX_EXPERTS),
            ("top_k", self.top_k, self.experts),
        ] {
            if got == 0 || got > limit {
                return Err(ShapeError::OutOfRange { name, limit, got });
            }
        }
        Ok(self)
    }

    /// Checks that `other` is this same shape.
    ///
    /// # Errors
    /// [`ShapeError::Mismatch`] when any dimension differs.
    pub fn expect(self, other: Self) -> Result<(), ShapeError> {
        if self == other {
            Ok(())
        } else {
            Err(ShapeError::Mismatch {
                expected: self,
                got: other,
            })
        }
    }
}

impl fmt::Display for ModelShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} MoE layers x {} experts, top-{}",
            self.layers, self.experts, self.top_k
        )
    }
}
