//! What one request's prompt says about the experts it will use.

/// A request's signature under one map: `layers kept x experts` cells, of length 1, or all zero
/// when the prompt told nothing (no covered token, or only experts whose IDF is zero).
///
/// Meant to be kept and filled again, so that a decision allocates nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Signature {
    pub(crate) values: Vec<f32>,
}

impl Signature {
    /// The cells, row-major over the layers kept.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// True when the prompt told nothing: every similarity is 0 then.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.values.iter().all(|&value| value == 0.0)
    }
}
