//! Which block of keys and values belongs to whom.
//!
//! Blocks are numbers here: what they hold is the backend's. [`BlockManager`] counts their references, finds the blocks of a
//! known prefix, evicts, and keeps the signature row beside each block.

mod hash;
mod manager;
mod pool;
mod rows;
#[cfg(test)]
mod tests;

pub use hash::{BlockHash, PrefixHasher};
pub use manager::{BlockManager, BlockUsage};
pub use rows::RowError;
pub(crate) use rows::check_row;

/// A block's number, below the number of blocks.
pub type BlockId = u32;

/// Names blocks that wait for a handed-over request, see [`Engine::pin_prefix`](crate::Engine::pin_prefix).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PinId(pub(crate) u64);

/// The leading blocks of a prompt that the engine already has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pinned {
    /// Names them to [`Engine::add`](crate::Engine::add) and [`Engine::unpin`](crate::Engine::unpin).
    pub id: PinId,
    /// How many they are.
    pub blocks: usize,
}
