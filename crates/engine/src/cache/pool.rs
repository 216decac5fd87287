//! Reference counts, the prefix index and the order of eviction.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use super::{BlockHash, BlockId};

/// A fixed number of blocks. Each is free, in use (one or more references) or cached (no reference, but its content has a name
/// and can be taken up again until the block is needed for something else, the one unused for longest first).
#[derive(Debug)]
pub(super) struct Pool {
    blocks: Vec<Block>,
    /// Unused and unnamed blocks; the last is taken first.
    free: Vec<BlockId>,
    /// Unused and named blocks by the time of their last release.
    cached: BTreeMap<u64, BlockId>,
    /// The block that holds a content.
    index: FxHashMap<BlockHash, BlockId>,
    clock: u64,
}

#[derive(Debug, Default, Clone)]
struct Block {
    references: u32,
    /// Set while the block is in the index.
    name: Option<BlockHash>,
    /// Its key in `cached` while it is there.
    released_at: u64,
}

impl Pool {
    pub(super) fn new(num_blocks: usize) -> Self {
        Self {
            blocks: vec![Block::default(); num_blocks],
            free: (0..num_blocks as BlockId).rev().collect(),
            cached: BTreeMap::new(),
            index: FxHashMap::default(),
            clock: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that nobody references.
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    pub(super) fn cached(&self) -> usize {
        self.cached.len()
    }

    pub(super) fn references(&self, block: BlockId) -> u32 {
        self.blocks[block as usize].references
    }

    pub(super) fn name(&self, block: BlockId) -> Option<BlockHash> {
        self.blocks[block as usize].name
    }

    /// A block for new content, with one reference and no name: a free one, else the one cached for longest.
    pub(super) fn allocate(&mut self) -> Option<BlockId> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let (_, id) = self.cached.pop_first()?;
                if let Some(name) = self.blocks[id as usize].name.take() {
                    self.index.remove(&name);
                }
                id
            }
        };
        self.blocks[id as usize].references = 1;
        Some(id)
    }

    /// The block that holds a content.
    pub(super) fn find(&self, name: &BlockHash) -> Option<BlockId> {
        self.index.get(name).copied()
    }

    /// Takes another reference to a block that is in use or cached.
    pub(super) fn share(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        if block.references == 0 {
            debug_assert!(
                block.name.is_some(),
                "block {id} is free and cannot be shared"
            );
            self.cached.remove(&block.released_at);
        }
        block.references += 1;
    }

    /// Gives a reference back.
    pub(super) fn release(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        debug_assert!(
            block.references > 0,
            "block {id} has no reference to give back"
        );
        block.references = block.references.saturating_sub(1);
        if block.references > 0 {
            return;
        }
        if block.name.is_some() {
            block.released_at = self.clock;
            self.cached.insert(self.clock, id);
            self.clock += 1;
        } else {
            self.free.push(id);
        }
    }

    /// Names a block's content, unless another block already holds the same.
    pub(super) fn publish(&mut self, id: BlockId, name: BlockHash) {
        let block = &mut self.blocks[id as usize];
        debug_assert!(
            block.references > 0,
            "block {id} is nobody's and cannot be named"
        );
        if block.name.is_none() && !self.index.contains_key(&name) {
            block.name = Some(name);
            self.index.insert(name, id);
        }
    }

    /// Panics unless every block is in exactly one state and its references are those in `expected`.
    #[cfg(test)]
    pub(super) fn check(&self, expected: &[u32]) {
        let mut seen = vec![0; self.blocks.len()];
        for &id in self.free.iter() {
            seen[id as usize] += 1;
            assert!(
                self.blocks[id as usize].name.is_none(),
                "free block {id} has a name"
            );
        }
        for (&at, &id) in &self.cached {
            seen[id as usize] += 1;
            assert!(
                self.blocks[id as usize].name.is_some(),
                "cached block {id} has no name"
            );
            assert_eq!(self.blocks[id as usize].released_at, at);
        }
        for (id, block) in self.blocks.iter().enumerate() {
            assert_eq!(block.references, expected[id], "references of block {id}");
            assert_eq!(
                seen[id],
                u32::from(block.references == 0),
                "state of block {id}"
            );
            if let Some(name) = &block.name {
                assert_eq!(self.index.get(name), Some(&(id as BlockId)));
            }
        }
        let named = self.blocks.iter().filter(|b| b.name.is_some()).count();
        assert_eq!(named, self.index.len());
    }
}
