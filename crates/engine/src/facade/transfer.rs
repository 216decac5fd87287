//! Blocks that leave for another engine, and room for those that come.

use super::Engine;
use crate::cache::{BlockHash, BlockId, PinId, Pinned};
use crate::handoff::{self, Contents, HandoffError};
use crate::request::RequestId;

/// A finished prefill whose blocks wait for a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldBlocks {
    /// Blocks of the prompt.
    pub blocks: usize,
    /// Tokens of the prompt.
    pub tokens: usize,
}

/// A finished prefill's blocks, one reference each.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) blocks: Vec<BlockId>,
    pub(super) tokens: usize,
    /// The name of the prompt.
    pub(super) prompt: BlockHash,
}

impl Engine {
    /// The blocks that a finished request holds for a peer, if it does.
    #[must_use]
    pub fn held(&self, id: RequestId) -> Option<HeldBlocks> {
        self.held.get(&id).map(|held| HeldBlocks {
            blocks: held.blocks.len(),
            tokens: held.tokens,
        })
    }

    /// Keys, values and signature rows of a held prompt from block `first_block` on, with a header that says what they are. Asked
    /// from the number of its blocks on, it gives a header alone.
    ///
    /// # Errors
    /// Nothing is held under that name, or `first_block` lies beyond the prompt.
    pub fn read_held(&self, id: RequestId, first_block: usize) -> Result<Vec<u8>, HandoffError> {
        let held = self
            .held
            .get(&id)
            .ok_or(HandoffError::NotHeld { id: id.0 })?;
        let blocks = held
            .blocks
            .get(first_block..)
            .ok_or(HandoffError::FirstBlock {
                blocks: held.blocks.len(),
                first_block,
            })?;
        let contents = Contents {
            tokens: held.tokens,
            first_block,
            prompt: held.prompt,
        };
        let mut out = Vec::with_capacity(self.geometry.payload_bytes(held.tokens, first_block));
        handoff::write_header(&self.geometry, &contents, &mut out);
        for &block in blocks {
            out.extend_from_slice(&self.scheduler.blocks.filled(block).to_le_bytes());
            self.scheduler.blocks.write_row(block, &mut out);
            self.backend.read_block(block, &mut out);
        }
        Ok(out)
    }

    /// Lets the blocks of a finished request go; they stay in the prefix cache until needed. Unknown ids are ignored.
    pub fn release_held(&mut self, id: RequestId) {
        if let Some(held) = self.held.remove(&id) {
            self.scheduler.blocks.release(held.blocks.into_iter());
        }
    }

    /// References the leading blocks of a prompt that the engine already has, so that a peer need not send them. They stay until
    /// [`add`](Self::add) uses the pin or [`unpin`](Self::unpin) gives it back. Should no request be able to run for want of blocks,
    /// pins lose theirs, the latest first; a request that comes with such a pin computes its prompt itself.
    pub fn pin_prefix(&mut self, tokens: &[u32]) -> Pinned {
        let names = self.scheduler.hasher.full_blocks(tokens);
        let found = self.scheduler.blocks.find_prefix(&names);
        self.scheduler.blocks.share(&found);
        Pinned {
            blocks: found.len(),
            id: self.scheduler.pins.insert(found),
        }
    }

    /// Gives a pin back that no request will use. Unknown pins are ignored.
    pub fn unpin(&mut self, id: PinId) {
        let blocks = self.scheduler.pins.take(id).flatten();
        self.scheduler.blocks.release(blocks.into_iter().flatten());
    }
}
