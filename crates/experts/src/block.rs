//! Counts per KV block: the signature cache.

use crate::counts::{CountError, ExpertCounts, check_ids};
use crate::shape::ModelShape;

/// One row of counts per KV block, `blocks x (layers x experts)`: same index and same lifetime as
/// the block (ELDR, arXiv 2607.00466, "signature cache"). A row is written as its block's tokens
/// are computed, cleared when the block is given to someone else, and summed over the blocks of a
/// request, so that a prefix hit gives exactly the counts of a cold prefill.
///
/// A cell is a `u16` and saturates at 65,535. A token selects an expert at most once per layer, so
/// **a block of at most 65,535 tokens never saturates**, and KV blocks hold 16 to a few hundred. In
/// a longer block a count would stay at 65,535: too small, never wrapped round, and
/// [`PromptCounts::new`](crate::PromptCounts::new) refuses the sum because the layers no longer
/// agree on the number of tokens (or all fall short alike, which reads as lower coverage).
#[derive(Debug, Clone)]
pub struct BlockCounts {
    shape: ModelShape,
    blocks: usize,
    counts: Vec<u16>,
}

impl BlockCounts {
    /// Empty rows for `blocks` KV blocks: `2 x layers x experts` bytes each.
    #[must_use]
    pub fn new(shape: ModelShape, blocks: usize) -> Self {
        Self {
            shape,
            blocks,
            counts: vec![0; blocks * shape.cells()],
        }
    }

    /// The model these counts belong to.
    #[must_use]
    pub fn shape(&self) -> ModelShape {
        self.shape
    }

    /// Rows there are.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes of one row in [`write_bytes`](Self::write_bytes).
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.shape.cells() * 2
    }

    /// Counts one token of `block` in MoE layer `layer`; `ids` are its top-k experts there.
    ///
    /// # Errors
    /// An index or id out of range, or another number of ids than top-k; nothing is counted then.
    pub fn add_token(&mut self, block: usize, layer: usize, ids: &[u16]) -> Result<(), CountError> {
        check_ids(self.shape, layer, ids)?;
        let start = self.start(block)? + layer * self.shape.experts as usize;
        let row = &mut self.counts[start..start + self.shape.experts as usize];
        for &id in ids {
            let cell = &mut row[id as usize];
            *cell = cell.saturating_add(1);
        }
        Ok(())
    }

    /// Forgets a block's counts, for its next owner.
    ///
    /// # Errors
    /// [`CountError::Block`] when there is no such row.
    pub fn clear(&mut self, block: usize) -> Result<(), CountError> {
        let start = self.start(block)?;
        self.counts[start..start + self.shape.cells()].fill(0);
        Ok(())
    }

    /// Copies a row, when a block's contents are copied.
    ///
    /// # Errors
    /// [`CountError::Block`] when either row does not exist.
    pub fn copy(&mut self, from: usize, to: usize) -> Result<(), CountError> {
        let (from, to) = (self.start(from)?, self.start(to)?);
        self.counts.copy_within(from..from + self.shape.cells(), to);
        Ok(())
    }

    /// One block's counts, `layers x experts`.
    ///
    /// # Errors
    /// [`CountError::Block`] when there is no such row.
    pub fn row(&self, block: usize) -> Result<&[u16], CountError> {
        let start = self.start(block)?;
        Ok(&self.counts[start..start + self.shape.cells()])
    }

    /// Adds a block's counts to a request's.
    ///
    /// # Errors
    /// [`CountError::Shape`] when `sum` belongs to another model, [`CountError::Block`] when there
    /// is no such row.
    pub fn sum_into(&self, block: usize, sum: &mut ExpertCounts) -> Result<(), CountError> {
        self.shape.expect(sum.shape())?;
        for (cell, &count) in sum.as_mut_slice().iter_mut().zip(self.row(block)?) {
            *cell = cell.saturating_add(u32::from(count));
        }
        Ok(())
    }

    /// Appends a row as little-endian `u16`s, to travel with its block.
    ///
    /// # Errors
    /// [`CountError::Block`] when there is no such row.
    pub fn write_bytes(&self, block: usize, out: &mut Vec<u8>) -> Result<(), CountError> {
        let row = self.row(block)?;
        out.reserve(row.len() * 2);
        for count in row {
            out.extend_from_slice(&count.to_le_bytes());
        }
        Ok(())
    }

    /// Replaces a row by what [`write_bytes`](Self::write_bytes) wrote elsewhere.
    ///
    /// # Errors
    /// [`CountError::Block`] when there is no such row, [`CountError::RowBytes`] when `bytes` is
    /// not exactly [`row_bytes`](Self::row_bytes) long.
    pub fn read_bytes(&mut self, block: usize, bytes: &[u8]) -> Result<(), CountError> {
        let start = self.start(block)?;
        if bytes.len() != self.row_bytes() {
            return Err(CountError::RowBytes {
                expected: self.row_bytes(),
                got: bytes.len(),
            });
        }
        let row = &mut self.counts[start..start + self.shape.cells()];
        for (cell, pair) in row.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *cell = u16::from_le_bytes(*pair);
        }
        Ok(())
    }

    fn start(&self, block: usize) -> Result<usize, CountError> {
        if block < self.blocks {
            Ok(block * self.shape.cells())
        } else {
            Err(CountError::Block {
                blocks: self.blocks,
                block,
            })
        }
    }
}
