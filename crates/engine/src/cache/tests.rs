//! The block manager by itself: no model, no scheduler.

#![allow(clippy::unwrap_used)]

use experts::ModelShape;
use proptest::prelude::*;

use super::{BlockHash, BlockId, BlockManager, PrefixHasher};

const SHAPE: ModelShape = ModelShape {
    layers: 2,
    experts: 4,
    top_k: 1,
};

fn names(seed: u32, count: usize) -> Vec<BlockHash> {
    let tokens: Vec<u32> = (0..count as u32).map(|i| seed + i).collect();
    PrefixHasher::new("m", 1).full_blocks(&tokens)
}

/// Takes blocks for a sequence of full blocks, names them, and gives them back.
fn cache(manager: &mut BlockManager, names: &[BlockHash]) -> Vec<BlockId> {
    let mut blocks = Vec::new();
    assert!(manager.allocate(names.len(), &mut blocks));
    for (&block, &name) in blocks.iter().zip(names) {
        manager.publish(block, name);
    }
    manager.release(blocks.iter().copied());
    blocks
}

#[test]
fn the_longest_unused_goes_first_and_ends_before_beginnings() {
    let mut manager = BlockManager::new(SHAPE, 6);
    let (a, b) = (names(10, 3), names(20, 3));
    let blocks_a = cache(&mut manager, &a);
    let blocks_b = cache(&mut manager, &b);
    // Using a again makes b the longest unused.
    manager.share(&blocks_a);
    manager.release(blocks_a.iter().copied());
    let mut new = Vec::new();
    assert!(manager.allocate(2, &mut new));
    assert_eq!(new, [blocks_b[2], blocks_b[1]]);
    assert_eq!(manager.find_prefix(&b), blocks_b[..1]);
    assert_eq!(manager.find_prefix(&a), blocks_a);
    assert!(manager.allocate(2, &mut new));
    assert_eq!(new[2..], [blocks_b[0], blocks_a[2]]);
    assert!(!manager.allocate(3, &mut new));
    assert_eq!(new.len(), 4);
    manager.check([&new[..]]);
}

#[test]
fn a_content_has_one_block() {
    let mut manager = BlockManager::new(SHAPE, 4);
    let name = names(1, 1);
    let mut blocks = Vec::new();
    assert!(manager.allocate(2, &mut blocks));
    manager.publish(blocks[0], name[0]);
    manager.publish(blocks[1], name[0]);
    assert_eq!(manager.find_prefix(&name), blocks[..1]);
    assert!(!manager.is_writable(blocks[0]));
    assert!(manager.is_writable(blocks[1]));
    manager.release(blocks.into_iter());
    let usage = manager.usage();
    assert_eq!((usage.used, usage.cached, usage.total), (0, 1, 4));
}

#[test]
fn a_row_counts_each_token_once_and_dies_with_its_block() {
    let mut manager = BlockManager::new(SHAPE, 1);
    let mut blocks = Vec::new();
    assert!(manager.allocate(1, &mut blocks));
    manager.record(blocks[0], 0, &[1, 2]);
    manager.record(blocks[0], 1, &[1, 3]);
    manager.record(blocks[0], 1, &[1, 3]);
    manager.record(blocks[0], 0, &[1, 2]);
    assert_eq!(manager.sum(&blocks).as_slice(), [0, 2, 0, 0, 0, 0, 1, 1]);
    assert_eq!(manager.filled(blocks[0]), 2);
    manager.release(blocks.drain(..));
    assert!(manager.allocate(1, &mut blocks));
    assert!(manager.sum(&blocks).is_zero());
    assert_eq!(manager.filled(blocks[0]), 0);
}

proptest! {
    #[test]
    fn references_are_those_of_the_owners(
        ops in prop::collection::vec((0u8..4, 0usize..8, 1usize..5), 1..80),
        num_blocks in 1usize..12,
    ) {
        let mut manager = BlockManager::new(SHAPE, num_blocks);
        let mut owners: Vec<Vec<BlockId>> = Vec::new();
        for (op, which, count) in ops {
            let named = names(which as u32 * 100, count);
            match op {
                // A new sequence, its prefix taken up where it is known.
                0 | 1 => {
                    let mut blocks = manager.find_prefix(&named);
                    let found = blocks.len();
                    manager.share(&blocks);
                    if manager.allocate(count - found, &mut blocks) {
                        for (&block, &name) in blocks.iter().zip(&named).skip(found) {
                            prop_assert!(manager.is_writable(block));
                            if op == 0 {
                                manager.publish(block, name);
                            }
                        }
                    }
                    owners.push(blocks);
                }
                2 if which < owners.len() => {
                    let blocks = owners.swap_remove(which);
                    manager.release(blocks.into_iter());
                }
                3 if which < owners.len() => {
                    manager.share(&owners[which]);
                    owners.push(owners[which].clone());
                }
                _ => {}
            }
            manager.check(owners.iter().map(Vec::as_slice));
        }
        for blocks in owners {
            manager.release(blocks.into_iter());
        }
        prop_assert_eq!(manager.available(), num_blocks);
    }
}
