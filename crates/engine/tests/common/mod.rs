//! What the engine's integration tests share.
#![allow(dead_code, clippy::unwrap_used)]

use engine::{ForwardOutput, KvStore, LogitsWanted, Model, Phase, Scratch, SequenceSlice};

pub(crate) const BLOCK: usize = 16;

/// A block table of its own for each of `sequences` sequences of up to `len` tokens.
pub(crate) fn tables(sequences: usize, len: usize) -> Vec<Vec<u32>> {
    let each = len.div_ceil(BLOCK) as u32;
    (0..sequences as u32)
        .map(|i| (i * each..(i + 1) * each).collect())
        .collect()
}

pub(crate) fn slice<'a>(
    tokens: &'a [u32],
    first_position: usize,
    block_table: &'a [u32],
) -> SequenceSlice<'a> {
    SequenceSlice {
        tokens,
        first_position,
        block_table,
        logits: LogitsWanted::All,
        gates: true,
        phase: Phase::Prefill,
    }
}

/// All of `tokens` in one step on a fresh store.
pub(crate) fn whole(model: &Model, tokens: &[u32]) -> ForwardOutput {
    let mut kv = KvStore::new(model.config(), BLOCK, tokens.len().div_ceil(BLOCK)).unwrap();
    let table = &tables(1, tokens.len())[0];
    let mut out = ForwardOutput::default();
    model
        .forward(
            &[slice(tokens, 0, table)],
            &mut kv,
            &mut Scratch::default(),
            &mut out,
        )
        .unwrap();
    out
}
