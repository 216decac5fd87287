//! What an engine is busy with.

use super::Engine;
use crate::cache::BlockUsage;

/// What an engine is busy with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Where the blocks are.
    pub blocks: BlockUsage,
    /// Requests that run.
    pub running: usize,
    /// Requests that wait for blocks or for a place.
    pub waiting: usize,
    /// Finished requests whose blocks are held for a peer.
    pub held: usize,
    /// Pins that wait for their request.
    pub pinned: usize,
    /// Prompt tokens of all requests that began to run, since the start.
    pub prompt_tokens_total: u64,
    /// Of these, tokens that came from the prefix cache or a handoff.
    pub cached_tokens_total: u64,
    /// Requests that lost their blocks to older ones, since the start.
    pub preemptions_total: u64,
}

impl Engine {
    /// What the engine is busy with.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            blocks: self.scheduler.blocks.usage(),
            running: self.scheduler.running.len(),
            waiting: self.scheduler.waiting.len(),
            held: self.held.len(),
            pinned: self.scheduler.pins.len(),
            prompt_tokens_total: self.scheduler.totals.prompt_tokens,
            cached_tokens_total: self.scheduler.totals.cached_tokens,
            preemptions_total: self.scheduler.totals.preemptions,
        }
    }
}
