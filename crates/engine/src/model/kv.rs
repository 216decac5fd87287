//! Storage for keys and values, in blocks.

use half::bf16;
use kernels::{AlignedBuf, KvLayout, ShapeError};

use super::ModelConfig;

/// Keys and values of a pool of blocks, bf16, as `[block][layer]` of [`KvLayout`] (keys, then values, of one layer).
///
/// All that belongs to a block lies together, so that a block is exported and imported as one run of bytes. Which block belongs
/// to whom is the caller's matter.
#[derive(Debug)]
pub struct KvStore {
    layout: KvLayout,
    layers: usize,
    num_blocks: usize,
    data: AlignedBuf,
}

impl KvStore {
    /// Zeroed storage for `num_blocks` blocks of `block_size` positions each.
    ///
    /// # Errors
    /// When `block_size` is not a multiple of 16, or 0.
    pub fn new(
        config: &ModelConfig,
        block_size: usize,
        num_blocks: usize,
    ) -> Result<Self, ShapeError> {
        let layout = KvLayout::new(block_size, config.kv_heads, config.head_dim)?;
        let data = AlignedBuf::zeroed(num_blocks * config.layers * layout.block_elements());
        Ok(Self {
            layout,
            layers: config.layers,
            num_blocks,
            data,
        })
    }

    /// Positions per block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.layout.block_size()
    }

    /// Blocks in the pool.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Bytes of one block, all layers.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.stride() * size_of::<bf16>()
    }

    /// The bytes of block `index` (native endian bf16).
    ///
    /// # Panics
    /// When there is no such block.
    #[must_use]
    pub fn block(&self, index: u32) -> &[u8] {
        let start = index as usize * self.stride();
        bytemuck::cast_slice(&self.data[start..start + self.stride()])
    }

    /// Overwrites block `index` with bytes that [`Self::block`] gave, here or in another store of the same geometry.
    ///
    /// # Panics
    /// When there is no such block or `bytes` is not [`Self::block_bytes`] long.
    pub fn write_block(&mut self, index: u32, bytes: &[u8]) {
        let stride = self.stride();
        let start = index as usize * stride;
        let target: &mut [u8] = bytemuck::cast_slice_mut(&mut self.data[start..start + stride]);
        target.copy_from_slice(bytes);
    }

    /// Elements of one block, all layers.
    fn stride(&self) -> usize {
        self.layers * self.layout.block_elements()
    }

    pub(super) fn layout(&self) -> KvLayout {
        self.layout
    }

    /// How one layer's attention sees the store: as a cache in which block `b` has the number `b * layers`
    /// (see [`Self::entry`]), so that neither the kernels nor the layers need to know of each other.
    pub(super) fn layer(&self, layer: usize) -> &[bf16] {
        &self.data[layer * self.layout.block_elements()..]
    }

    /// The number of block `index` in [`Self::layer`], for every layer.
    pub(super) fn entry(&self, index: u32) -> u32 {
        index * self.layers as u32
    }

    /// Writes one token's keys and values, `[kv_heads, head_dim]` each, to `slot` of block `index` of `layer`.
    pub(super) fn write_token(
        &mut self,
        layer: usize,
        index: u32,
        slot: usize,
        keys: &[bf16],
        values: &[bf16],
    ) -> Result<(), ShapeError> {
        let elements = self.layout.block_elements();
        let start = (index as usize * self.layers + layer) * elements;
        self.layout
            .write_token(&mut self.data[start..start + elements], slot, keys, values)
    }
}
