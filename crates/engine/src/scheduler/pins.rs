//! Blocks that wait for a handed-over request.

use std::collections::BTreeMap;

use crate::cache::{BlockId, PinId};

/// Pins that no request has used yet, in the order in which they were given out.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    /// A pin has a reference to each of its blocks; `None` once they were taken away.
    pins: BTreeMap<PinId, Option<Vec<BlockId>>>,
    next: u64,
}

impl Pins {
    /// Keeps referenced blocks under a new name.
    pub(crate) fn insert(&mut self, blocks: Vec<BlockId>) -> PinId {
        let id = PinId(self.next);
        self.next += 1;
        self.pins.insert(id, Some(blocks));
        id
    }

    /// Ends a pin and gives its blocks with their references; the inner `None` when they were taken away.
    pub(crate) fn take(&mut self, id: PinId) -> Option<Option<Vec<BlockId>>> {
        self.pins.remove(&id)
    }

    /// Takes the blocks of the latest pin that has any.
    pub(crate) fn revoke_latest(&mut self) -> Option<Vec<BlockId>> {
        let held =
            |blocks: &&mut Option<Vec<BlockId>>| blocks.as_ref().is_some_and(|b| !b.is_empty());
        self.pins.values_mut().rev().find(held)?.take()
    }

    pub(crate) fn len(&self) -> usize {
        self.pins.len()
    }

    #[cfg(test)]
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &[BlockId]> {
        self.pins.values().flatten().map(Vec::as_slice)
    }
}
