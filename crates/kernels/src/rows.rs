//! Views of the rows that a product reads and writes.

use half::bf16;

use crate::error::ShapeError;

/// Rows of bf16 to read: all of a row-major matrix, or those that a list of indices names.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    data: &'a [bf16],
    stride: usize,
    index: Option<&'a [u32]>,
}

impl<'a> Rows<'a> {
    /// All rows of `data`, `[rows, stride]`.
    #[must_use]
    pub fn dense(data: &'a [bf16], stride: usize) -> Self {
        Self {
            data,
            stride,
            index: None,
        }
    }

    /// Row `index[i]` of `data`, `[rows, stride]`, for each `i`: the tokens of one expert.
    #[must_use]
    pub fn gather(data: &'a [bf16], stride: usize, index: &'a [u32]) -> Self {
        Self {
            data,
            stride,
            index: Some(index),
        }
    }

    /// How many rows there are.
    #[must_use]
    pub fn len(&self) -> usize {
        count(self.data.len(), self.stride, self.index)
    }

    /// Whether there is no row at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first `k` elements of row `i`.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize, k: usize) -> Result<&'a [bf16], ShapeError> {
        let row = self.index.map_or(i, |index| index[i] as usize);
        row.checked_mul(self.stride)
            .and_then(|start| self.data.get(start..)?.get(..k))
            .ok_or(ShapeError::Index {
                operation: "rows",
                what: "input row",
                index: row,
                limit: self.data.len().checked_div(self.stride).unwrap_or(0),
            })
    }
}

/// Rows of f32 to write: all of a row-major matrix, or those that a list of indices names.
#[derive(Debug)]
pub struct RowsMut<'a> {
    data: &'a mut [f32],
    stride: usize,
    index: Option<&'a [u32]>,
}

impl<'a> RowsMut<'a> {
    /// All rows of `data`, `[rows, stride]`.
    #[must_use]
    pub fn dense(data: &'a mut [f32], stride: usize) -> Self {
        Self {
            data,
            stride,
            index: None,
        }
    }

    /// Row `index[i]` of `data`, `[rows, stride]`, for each `i`. Where an index repeats, the later row stays.
    #[must_use]
    pub fn scatter(data: &'a mut [f32], stride: usize, index: &'a [u32]) -> Self {
        Self {
            data,
            stride,
            index: Some(index),
        }
    }

    /// How many rows there are.
    #[must_use]
    pub fn len(&self) -> usize {
        count(self.data.len(), self.stride, self.index)
    }

    /// Whether there is no row at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first `n` elements of row `i`.
    #[inline(always)]
    pub(crate) fn row(&mut self, i: usize, n: usize) -> Result<&mut [f32], ShapeError> {
        let row = self.index.map_or(i, |index| index[i] as usize);
        let limit = self.data.len().checked_div(self.stride).unwrap_or(0);
        row.checked_mul(self.stride)
            .and_then(|start| self.data.get_mut(start..)?.get_mut(..n))
            .ok_or(ShapeError::Index {
                operation: "rows",
                what: "output row",
                index: row,
                limit,
            })
    }
}

fn count(len: usize, stride: usize, index: Option<&[u32]>) -> usize {
    index.map_or(len.checked_div(stride).unwrap_or(0), <[u32]>::len)
}
