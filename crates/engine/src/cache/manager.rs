//! The block manager: the pool and the signature rows as one.

use experts::{ExpertCounts, ModelShape};

use super::pool::Pool;
use super::rows::Rows;
use super::{BlockHash, BlockId};

/// Gives out blocks and takes them back. A block's signature row has the block's index and the block's lifetime: empty when the
/// block is given out, copied when the block is, forgotten when the block is given to someone else.
///
/// Blocks with a name (see [`BlockManager::publish`]) are never written again, and neither are their rows: they may be anybody's.
#[derive(Debug)]
pub struct BlockManager {
    pool: Pool,
    rows: Rows,
    shape: ModelShape,
}

/// Where the blocks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockUsage {
    /// All blocks.
    pub total: usize,
    /// Blocks that somebody references.
    pub used: usize,
    /// Blocks that nobody references, but whose content can be taken up again.
    pub cached: usize,
}

impl BlockManager {
    /// Manages `num_blocks` blocks, all of them free.
    #[must_use]
    pub fn new(shape: ModelShape, num_blocks: usize) -> Self {
        Self {
            pool: Pool::new(num_blocks),
            rows: Rows::new(shape, num_blocks),
            shape,
        }
    }

    /// All blocks there are.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.pool.len()
    }

    /// Blocks that can be allocated now.
    #[must_use]
    pub fn available(&self) -> usize {
        self.pool.available()
    }

    /// Where the blocks are.
    #[must_use]
    pub fn usage(&self) -> BlockUsage {
        BlockUsage {
            total: self.pool.len(),
            used: self.pool.len() - self.pool.available(),
            cached: self.pool.cached(),
        }
    }

    /// The longest known run of leading blocks. They are not referenced yet.
    #[must_use]
    pub fn find_prefix(&self, names: &[BlockHash]) -> Vec<BlockId> {
        names
            .iter()
            .map_while(|name| self.pool.find(name))
            .collect()
    }

    /// References blocks that are in use or cached.
    pub fn share(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            self.pool.share(block);
        }
    }

    /// Whether nobody references a block.
    #[must_use]
    pub fn is_idle(&self, block: BlockId) -> bool {
        self.pool.references(block) == 0
    }

    /// Whether a block has exactly one reference.
    #[must_use]
    pub fn is_sole(&self, block: BlockId) -> bool {
        self.pool.references(block) == 1
    }

    /// Appends `count` new blocks, each with one reference and an empty row, or none when there are not enough.
    #[must_use]
    pub fn allocate(&mut self, count: usize, blocks: &mut Vec<BlockId>) -> bool {
        if self.pool.available() < count {
            return false;
        }
        for _ in 0..count {
            let Some(block) = self.pool.allocate() else {
                return false;
            };
            self.rows.clear(block);
            blocks.push(block);
        }
        true
    }

    /// Gives one reference to each block back, the last block first, so that the ends of sequences are evicted before their
    /// beginnings.
    pub fn release(&mut self, blocks: impl DoubleEndedIterator<Item = BlockId>) {
        for block in blocks.rev() {
            self.pool.release(block);
        }
    }

    /// Names the content of a full block, which is never written again. When another block has the name already, this one
    /// stays nameless.
    pub fn publish(&mut self, block: BlockId, name: BlockHash) {
        self.pool.publish(block, name);
    }

    /// Whether a block may be written: one owner, no name.
    #[must_use]
    pub fn is_writable(&self, block: BlockId) -> bool {
        self.is_sole(block) && self.pool.name(block).is_none()
    }

    /// Counts the token at `offset` of a block, whose choices are `[moe_layers, top_k]`, unless the block's row has it already.
    pub fn record(&mut self, block: BlockId, offset: usize, choices: &[u16]) {
        self.rows.record(block, offset as u32, choices);
    }

    /// Copies a row to the row of a block that `from` is copied to.
    pub fn copy_row(&mut self, from: BlockId, to: BlockId) {
        self.rows.copy(from, to);
    }

    /// The sum of the blocks' rows.
    #[must_use]
    pub fn sum(&self, blocks: &[BlockId]) -> ExpertCounts {
        let mut sum = ExpertCounts::zeros(self.shape);
        for &block in blocks {
            self.rows.sum_into(block, &mut sum);
        }
        sum
    }

    /// Leading tokens of a block that its row covers.
    #[must_use]
    pub fn filled(&self, block: BlockId) -> u32 {
        self.rows.filled(block)
    }

    /// Bytes of a row in [`BlockManager::write_row`].
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.rows.row_bytes()
    }

    /// Appends a block's row, to travel with the block.
    pub fn write_row(&self, block: BlockId, out: &mut Vec<u8>) {
        self.rows.write_bytes(block, out);
    }

    /// Replaces a block's row by one that covers `filled` tokens.
    pub(crate) fn read_row(&mut self, block: BlockId, filled: u32, bytes: &[u8]) {
        self.rows.read_bytes(block, filled, bytes);
    }

    /// Panics unless the references are exactly those of `owners` and every block is in one state.
    #[cfg(test)]
    pub(crate) fn check<'a>(&self, owners: impl IntoIterator<Item = &'a [BlockId]>) {
        let mut expected = vec![0; self.pool.len()];
        for blocks in owners {
            for &block in blocks {
                expected[block as usize] += 1;
            }
        }
        self.pool.check(&expected);
    }
}
