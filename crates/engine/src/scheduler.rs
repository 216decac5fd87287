//! Who takes part in the next step, and with which blocks.
//!
//! First come, first served: the running requests are always the oldest ones, so that running and waiting ones together are in the
//! order of arrival. Each step gives a token to every running request whose prompt is done, then computes prompts in chunks
//! with what is left of its tokens. When a request needs a block and none is left, the latest of the running ones gives its blocks up
//! and waits again; it computes its tokens anew, taking up what is still cached.

mod pins;
mod placement;

use std::collections::VecDeque;

use crate::cache::{BlockId, BlockManager, PrefixHasher};
use crate::handoff::KvGeometry;
use crate::request::RequestId;
use crate::sequence::Sequence;

pub(crate) use pins::Pins;

/// What a scheduler works with.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) max_num_seqs: usize,
    pub(crate) max_batched_tokens: usize,
    pub(crate) prefix_cache: bool,
}

/// Queues of requests, and the blocks that they share.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    geometry: KvGeometry,
    pub(crate) hasher: PrefixHasher,
    pub(crate) blocks: BlockManager,
    pub(crate) pins: Pins,
    /// In the order of arrival; holds no blocks but those of imports.
    pub(crate) waiting: VecDeque<Sequence>,
    /// In the order of arrival, all before those that wait.
    pub(crate) running: Vec<Sequence>,
    pub(crate) totals: Totals,
}

/// Sums since the start.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) preemptions: u64,
}

/// What the next step does.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// In the order of arrival.
    pub(crate) slots: Vec<Slot>,
    /// What happens to keys and values before, in this order.
    pub(crate) moves: Vec<BlockMove>,
    pub(crate) preempted: usize,
}

/// One request's part in a step: its next `tokens` tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    /// Its place among the running.
    pub(crate) index: usize,
    pub(crate) tokens: usize,
}

/// Keys and values that a step needs in place.
#[derive(Debug)]
pub(crate) enum BlockMove {
    /// From one block to another.
    Copy { from: BlockId, to: BlockId },
    /// From a checked payload.
    Import {
        blocks: Vec<BlockId>,
        payload: Vec<u8>,
    },
}

impl Scheduler {
    pub(crate) fn new(limits: Limits, geometry: KvGeometry, num_blocks: usize) -> Self {
        Self {
            limits,
            hasher: PrefixHasher::new(&geometry.fingerprint, geometry.block_size),
            blocks: BlockManager::new(geometry.shape, num_blocks),
            geometry,
            pins: Pins::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            totals: Totals::default(),
        }
    }

    /// Decides the next step.
    pub(crate) fn plan(&mut self) -> Plan {
        let mut plan = Plan::default();
        let mut budget = self.limits.max_batched_tokens;
        self.plan_decode(&mut plan, &mut budget);
        self.plan_prefill(&mut plan, &mut budget);
        if plan.preempted == 0 {
            self.admit_waiting(&mut plan, &mut budget);
        }
        plan.slots.sort_unstable_by_key(|slot| slot.index);
        plan
    }

    /// Requests with one token to compute, which may need a block for it.
    fn plan_decode(&mut self, plan: &mut Plan, budget: &mut usize) {
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            if self.running[index].pending() == 1 && self.make_room(index, plan) {
                plan.slots.push(Slot { index, tokens: 1 });
                *budget -= 1;
            }
            index += 1;
        }
    }

    /// Requests with more to compute; they got their blocks when they began to run.
    fn plan_prefill(&mut self, plan: &mut Plan, budget: &mut usize) {
        for (index, sequence) in self.running.iter().enumerate() {
            let tokens = sequence.pending().min(*budget);
            if sequence.pending() > 1 && tokens > 0 {
                plan.slots.push(Slot { index, tokens });
                *budget -= tokens;
            }
        }
    }

    /// Gives a running request the blocks of all its tokens, if need be those of later ones. False when it cannot take part:
    /// it is the latest one and waits again, or all blocks are held.
    fn make_room(&mut self, index: usize, plan: &mut Plan) -> bool {
        loop {
            let sequence = &mut self.running[index];
            let needed = sequence.blocks_needed(self.geometry.block_size);
            let missing = needed.saturating_sub(sequence.blocks.len());
            if self.blocks.allocate(missing, &mut sequence.blocks) {
                return true;
            }
            if self.running.len() > 1 {
                plan.preempted += 1;
                self.preempt_latest();
                if index == self.running.len() {
                    return false;
                }
            } else if !self.revoke_latest_pin() {
                return false;
            }
        }
    }

    fn preempt_latest(&mut self) {
        if let Some(mut victim) = self.running.pop() {
            self.blocks.release(victim.blocks.drain(..));
            victim.computed = 0;
            self.totals.preemptions += 1;
            self.waiting.push_front(victim);
        }
    }

    /// Takes the blocks of the latest pin away, of those not yet used first. False when no pin has any, save the oldest waiting
    /// request's, which would need them itself.
    fn revoke_latest_pin(&mut self) -> bool {
        if let Some(blocks) = self.pins.revoke_latest() {
            self.blocks.release(blocks.into_iter());
            return true;
        }
        let oldest = usize::from(self.running.is_empty());
        for sequence in self.waiting.iter_mut().skip(oldest).rev() {
            let import = sequence.import.take_if(|import| !import.pinned.is_empty());
            if let Some(import) = import {
                self.blocks.release(import.pinned.into_iter());
                return true;
            }
        }
        false
    }

    /// Lets waiting requests run, as long as there are places, tokens and blocks.
    fn admit_waiting(&mut self, plan: &mut Plan, budget: &mut usize) {
        while self.running.len() < self.limits.max_num_seqs && *budget > 0 {
            let Some(mut sequence) = self.waiting.pop_front() else {
                return;
            };
            if self.place(&mut sequence, plan) {
                let tokens = sequence.pending().min(*budget);
                *budget -= tokens;
                plan.slots.push(Slot {
                    index: self.running.len(),
                    tokens,
                });
                self.running.push(sequence);
                continue;
            }
            self.waiting.push_front(sequence);
            if !self.running.is_empty() || !self.revoke_latest_pin() {
                return;
            }
        }
    }

    /// Takes a step's result in: `tokens` more tokens of the running request at `index` are computed.
    pub(crate) fn advance(&mut self, index: usize, tokens: usize) {
        let sequence = &mut self.running[index];
        let first = sequence.computed / self.geometry.block_size;
        sequence.computed += tokens;
        self.hasher.extend(&mut sequence.names, &sequence.tokens);
        if self.limits.prefix_cache {
            publish(&mut self.blocks, sequence, first, self.geometry.block_size);
        }
    }

    /// Ends a request that waits or runs, and frees its blocks. False when there is none of that name.
    pub(crate) fn remove(&mut self, id: RequestId) -> bool {
        if let Some(at) = self.running.iter().position(|s| s.id == id) {
            let sequence = self.running.remove(at);
            self.blocks.release(sequence.blocks.into_iter());
            return true;
        }
        let Some(at) = self.waiting.iter().position(|s| s.id == id) else {
            return false;
        };
        if let Some(import) = self.waiting.remove(at).and_then(|s| s.import) {
            self.blocks.release(import.pinned.into_iter());
        }
        true
    }
}

/// Names a request's full computed blocks from block `first` on.
fn publish(blocks: &mut BlockManager, sequence: &Sequence, first: usize, block_size: usize) {
    for block in first..sequence.computed / block_size {
        blocks.publish(sequence.blocks[block], sequence.names[block]);
    }
}
