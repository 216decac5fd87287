//! The signature row beside every block.

use experts::{BlockCounts, ExpertCounts, ModelShape};

use super::BlockId;

/// How often the tokens of each block chose each expert (ELDR, arXiv 2607.00466, "signature cache"), and of how many of the
/// block's leading tokens that is.
///
/// Tokens are computed in order, so that number also says whether a token is already in the row: computing one again, as the
/// last prompt token of a full prefix hit or of a handoff, changes nothing.
#[derive(Debug)]
pub(super) struct Rows {
    counts: BlockCounts,
    /// Leading tokens of the block that the row covers.
    filled: Vec<u32>,
}

/// A row that does not fit its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected the signature row to count {expected} selections in layer {layer}, got {got} (at most {largest} of one expert)"
)]
pub struct RowError {
    /// The MoE layer.
    pub layer: usize,
    /// Tokens times top-k.
    pub expected: u64,
    /// The sum of the row's layer.
    pub got: u64,
    /// The largest count, which is at most the number of tokens.
    pub largest: u64,
}

impl Rows {
    pub(super) fn new(shape: ModelShape, num_blocks: usize) -> Self {
        Self {
            counts: BlockCounts::new(shape, num_blocks),
            filled: vec![0; num_blocks],
        }
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.counts.row_bytes()
    }

    pub(super) fn filled(&self, block: BlockId) -> u32 {
        self.filled[block as usize]
    }

    pub(super) fn clear(&mut self, block: BlockId) {
        self.filled[block as usize] = 0;
        known(self.counts.clear(block as usize));
    }

    pub(super) fn copy(&mut self, from: BlockId, to: BlockId) {
        self.filled[to as usize] = self.filled[from as usize];
        known(self.counts.copy(from as usize, to as usize));
    }

    /// Counts the token at `offset` of a block, whose choices are `[moe_layers, top_k]`, unless the row has it already.
    pub(super) fn record(&mut self, block: BlockId, offset: u32, choices: &[u16]) {
        let filled = &mut self.filled[block as usize];
        debug_assert!(
            offset <= *filled,
            "block {block} has {filled} tokens, got token {offset}"
        );
        if offset != *filled {
            return;
        }
        *filled += 1;
        let top_k = self.counts.shape().top_k.max(1) as usize;
        for (layer, ids) in choices.chunks_exact(top_k).enumerate() {
            known(self.counts.add_token(block as usize, layer, ids));
        }
    }

    pub(super) fn sum_into(&self, block: BlockId, sum: &mut ExpertCounts) {
        known(self.counts.sum_into(block as usize, sum));
    }

    pub(super) fn write_bytes(&self, block: BlockId, out: &mut Vec<u8>) {
        known(self.counts.write_bytes(block as usize, out));
    }

    /// Replaces a row by one from another engine that covers `filled` tokens; see [`check_row`].
    pub(super) fn read_bytes(&mut self, block: BlockId, filled: u32, bytes: &[u8]) {
        self.filled[block as usize] = filled;
        known(self.counts.read_bytes(block as usize, bytes));
    }
}

/// Checks that a row from another engine counts `filled` tokens in every layer.
///
/// # Errors
/// The first layer where it does not.
pub(crate) fn check_row(shape: ModelShape, filled: u32, bytes: &[u8]) -> Result<(), RowError> {
    let expected = u64::from(filled) * u64::from(shape.top_k);
    let layer_bytes = (shape.experts as usize * 2).max(1);
    for (layer, row) in bytes.chunks(layer_bytes).enumerate() {
        let cells = row.as_chunks::<2>().0.iter();
        let (got, largest) = cells
            .map(|cell| u64::from(u16::from_le_bytes(*cell)))
            .fold((0, 0), |(sum, largest), c| (sum + c, c.max(largest)));
        if got != expected || largest > u64::from(filled) {
            return Err(RowError {
                layer,
                expected,
                got,
                largest,
            });
        }
    }
    Ok(())
}

/// The rows' indices and shapes are the engine's own; an error would be a bug here.
fn known<E: std::fmt::Display>(result: Result<(), E>) {
    if let Err(error) = result {
        debug_assert!(false, "signature row: {error}");
        tracing::error!(%error, "signature row");
    }
}
