//! How keys and values lie in a block of the paged cache.

use half::bf16;

use crate::error::{ShapeError, expect_len};
use crate::lanes::LANES;
use crate::storage::{AlignedBuf, LINE};

/// The layout of one block of one layer: `block_size` tokens, keys first, then values, contiguous, in bf16.
///
/// - keys: `[kv_head][block_size / 16][head_dim / 2][16 tokens][2]`, sixteen tokens side by side as a panel of weights has
///   sixteen outputs;
/// - values: `[kv_head][block_size][value_width]`, `value_width` being `head_dim` rounded up to 16.
///
/// A cache is `[blocks][block_elements()]`, so a block can be copied as bytes from one cache to another. Slots that
/// were never written are never used, whatever they hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvLayout {
    block_size: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl KvLayout {
    /// A layout for blocks of `block_size` tokens.
    ///
    /// # Errors
    /// `block_size` is not a multiple of 16, `head_dim` is not even, or a size is 0.
    pub fn new(block_size: usize, kv_heads: usize, head_dim: usize) -> Result<Self, ShapeError> {
        let checks = [
            ("block_size", block_size, 16, "a multiple of 16 and not 0"),
            ("kv_heads", kv_heads, 1, "at least 1"),
            ("head_dim", head_dim, 2, "even and not 0"),
        ];
        for (what, got, multiple, rule) in checks {
            if got == 0 || !got.is_multiple_of(multiple) {
                return Err(ShapeError::Unsupported {
                    operation: "kv layout",
                    what,
                    rule,
                    got,
                });
            }
        }
        Ok(Self {
            block_size,
            kv_heads,
            head_dim,
        })
    }

    /// Tokens of a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Key and value heads.
    #[must_use]
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Elements of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Elements from one token's values to the next one's: `head_dim` rounded up to 16.
    #[must_use]
    pub fn value_width(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Elements of one block of one layer, keys and values.
    #[must_use]
    pub fn block_elements(&self) -> usize {
        self.block_size * self.kv_heads * (self.head_dim + self.value_width())
    }

    /// A cache of `blocks` blocks for one layer, zero, on a cache line.
    #[must_use]
    pub fn allocate(&self, blocks: usize) -> AlignedBuf {
        AlignedBuf::zeroed(blocks * self.block_elements())
    }

    /// Writes one token's keys and values, `[kv_heads, head_dim]` each, to `slot` of `block`.
    ///
    /// # Errors
    /// A slice has another length, or `slot` is not below `block_size`.
    pub fn write_token(
        &self,
        block: &mut [bf16],
        slot: usize,
        keys: &[bf16],
        values: &[bf16],
    ) -> Result<(), ShapeError> {
        let operation = "kv write";
        expect_len(operation, "block", self.block_elements(), block.len())?;
        expect_len(operation, "keys", self.kv_heads * self.head_dim, keys.len())?;
        expect_len(
            operation,
            "values",
            self.kv_heads * self.head_dim,
            values.len(),
        )?;
        self.check_slot(operation, slot)?;
        for head in 0..self.kv_heads {
            let from = head * self.head_dim..(head + 1) * self.head_dim;
            let group = self.key_group(head, slot / LANES);
            let lane = slot % LANES * 2;
            let lines = block[group..][..self.head_dim * LANES].chunks_exact_mut(LINE);
            for (line, pair) in lines.zip(keys[from.clone()].chunks_exact(2)) {
                line[lane..lane + 2].copy_from_slice(pair);
            }
            let start = self.value(head, slot);
            block[start..][..self.head_dim].copy_from_slice(&values[from]);
            block[start + self.head_dim..start + self.value_width()].fill(bf16::ZERO);
        }
        Ok(())
    }

    /// Reads back what [`write_token`](Self::write_token) wrote: keys and values, `[kv_heads, head_dim]` each.
    ///
    /// # Errors
    /// `block` has another length, or `slot` is not below `block_size`.
    pub fn read_token(
        &self,
        block: &[bf16],
        slot: usize,
    ) -> Result<(Vec<bf16>, Vec<bf16>), ShapeError> {
        expect_len("kv read", "block", self.block_elements(), block.len())?;
        self.check_slot("kv read", slot)?;
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for head in 0..self.kv_heads {
            let group = self.key_group(head, slot / LANES) + slot % LANES * 2;
            for pair in 0..self.head_dim / 2 {
                keys.extend_from_slice(&block[group + pair * LINE..][..2]);
            }
            values.extend_from_slice(&block[self.value(head, slot)..][..self.head_dim]);
        }
        Ok((keys, values))
    }

    fn check_slot(&self, operation: &'static str, slot: usize) -> Result<(), ShapeError> {
        if slot < self.block_size {
            return Ok(());
        }
        Err(ShapeError::Index {
            operation,
            what: "slot",
            index: slot,
            limit: self.block_size,
        })
    }

    /// Where a head's keys of sixteen tokens begin: `head_dim / 2` lines.
    #[inline(always)]
    pub(crate) fn key_group(&self, head: usize, group: usize) -> usize {
        (head * self.block_size + group * LANES) * self.head_dim
    }

    /// Where a head's values of one token begin.
    #[inline(always)]
    pub(crate) fn value(&self, head: usize, slot: usize) -> usize {
        self.block_size * self.kv_heads * self.head_dim
            + (head * self.block_size + slot) * self.value_width()
    }
}
