//! Storage for keys and values, in blocks.

use half::bf16;

use super::ModelConfig;

/// Keys and values of a pool of blocks, bf16, as `[block][layer][key, value][kv_head][position in block][head_dim]`.
///
/// All that belongs to a block lies together, so that a block is exported and imported as one run of bytes. Which block belongs
/// to whom is the caller's matter.
#[derive(Debug)]
pub struct KvStore {
    block_size: usize,
    num_blocks: usize,
    block_elements: usize,
    data: Vec<bf16>,
}

impl KvStore {
    /// Zeroed storage for `num_blocks` blocks of `block_size` positions each.
    #[must_use]
    pub fn new(config: &ModelConfig, block_size: usize, num_blocks: usize) -> Self {
        let block_elements = config.layers * 2 * config.kv_heads * block_size * config.head_dim;
        Self {
            block_size,
            num_blocks,
            block_elements,
            data: vec![bf16::ZERO; block_elements * num_blocks],
        }
    }

    /// Positions per block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks in the pool.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Bytes of one block, all layers.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.block_elements * size_of::<bf16>()
    }

    /// The bytes of block `index` (native endian bf16).
    ///
    /// # Panics
    /// When there is no such block.
    #[must_use]
    pub fn block(&self, index: u32) -> &[u8] {
        let start = index as usize * self.block_elements;
        bytemuck::cast_slice(&self.data[start..start + self.block_elements])
    }

    /// Overwrites block `index` with bytes that [`Self::block`] gave, here or in another store of the same geometry.
    ///
    /// # Panics
    /// When there is no such block or `bytes` is not [`Self::block_bytes`] long.
    pub fn write_block(&mut self, index: u32, bytes: &[u8]) {
        let start = index as usize * self.block_elements;
        let target: &mut [u8] =
            bytemuck::cast_slice_mut(&mut self.data[start..start + self.block_elements]);
        target.copy_from_slice(bytes);
    }
}
