//! How a waiting request comes by its blocks.

use super::{BlockMove, Plan, Scheduler, publish};
use crate::cache::BlockId;
use crate::handoff;
use crate::sequence::{Import, Sequence};

/// Where a request's blocks come from.
struct Placement {
    /// Leading blocks that exist already.
    found: Vec<BlockId>,
    /// The block after them is a copy of this one.
    copied: Option<BlockId>,
    /// Blocks to allocate, the copy among them.
    new: usize,
}

impl Scheduler {
    /// Gives a waiting request the blocks of all its tokens: those that exist, a copy, and new ones. False when there are not enough.
    pub(super) fn place(&mut self, sequence: &mut Sequence, plan: &mut Plan) -> bool {
        let Some(Placement { found, copied, new }) = self.placement(sequence) else {
            return false;
        };
        let (len, kept) = (sequence.tokens.len(), found.len());
        let import = sequence.import.take();
        match &import {
            None => {
                self.blocks.share(&found);
                self.blocks.share(copied.as_slice());
            }
            // A pin has its references already, perhaps one to a last block that is computed anew.
            Some(import) if copied.is_none() => {
                self.blocks.release(import.pinned[kept..].iter().copied());
            }
            Some(_) => {}
        }
        sequence.blocks = found;
        let enough = self.blocks.allocate(new, &mut sequence.blocks);
        debug_assert!(enough, "a placement counted blocks that were not there");
        sequence.computed = kept * self.geometry.block_size;
        if let Some(from) = copied {
            let to = sequence.blocks[kept];
            plan.moves.push(BlockMove::Copy { from, to });
            self.blocks.copy_row(from, to);
            self.blocks.release(std::iter::once(from));
            sequence.computed = len - 1;
        } else if let Some(import) = import.filter(|import| import.pinned.len() == kept) {
            self.take_over(sequence, kept, import, plan);
        }
        if sequence.cached_tokens.is_none() {
            sequence.cached_tokens = Some(sequence.computed);
            self.totals.prompt_tokens += len as u64;
            self.totals.cached_tokens += sequence.computed as u64;
        }
        true
    }

    /// Fills a request's blocks from `found` on with what a peer sent; only its last token is left to compute.
    fn take_over(
        &mut self,
        sequence: &mut Sequence,
        found: usize,
        import: Import,
        plan: &mut Plan,
    ) {
        let blocks = sequence.blocks[found..].to_vec();
        let sent = handoff::blocks(&self.geometry, &import.payload);
        for (&block, sent) in blocks.iter().zip(sent) {
            self.blocks.read_row(block, sent.filled, sent.row);
        }
        plan.moves.push(BlockMove::Import {
            blocks,
            payload: import.payload,
        });
        sequence.computed = sequence.tokens.len() - 1;
        if self.limits.prefix_cache {
            publish(&mut self.blocks, sequence, found, self.geometry.block_size);
        }
    }

    /// How a waiting request can come by its blocks now, if it can.
    ///
    /// The last token is computed in any case, for its logits. When its block exists already, the request gets a copy of that block,
    /// because a block that others may read is never written; when there is no room for a copy beside the original, it computes
    /// the whole block.
    fn placement(&self, sequence: &Sequence) -> Option<Placement> {
        let block_size = self.geometry.block_size;
        let total = sequence.blocks_needed(block_size);
        let (mut found, referenced) = match &sequence.import {
            Some(import) => (import.pinned.clone(), true),
            None if self.limits.prefix_cache && sequence.reads_cache() => {
                (self.blocks.find_prefix(&sequence.names), false)
            }
            None => (Vec::new(), false),
        };
        // Every running request may soon need another block: leave them one, rather than run now and be preempted.
        let reserve = self.running.len();
        let room = |found: &[BlockId], freed: usize| {
            let idle = found.iter().filter(|&&b| self.blocks.is_idle(b)).count();
            (self.blocks.available() + freed).checked_sub(idle + reserve)
        };
        let mut copied = None;
        let mut freed = 0;
        if found.len() * block_size == sequence.tokens.len() {
            let fits = room(&found, 0).is_some_and(|room| room > 0);
            copied = found.pop().filter(|_| fits);
            if copied.is_none() && referenced {
                let last = sequence.import.as_ref().and_then(|i| i.pinned.last());
                freed = usize::from(last.is_some_and(|&b| self.blocks.is_sole(b)));
            }
        }
        let new = total - found.len();
        room(&found, freed)
            .is_some_and(|room| room >= new)
            .then_some(Placement { found, copied, new })
    }
}
