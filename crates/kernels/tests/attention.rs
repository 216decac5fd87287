//! Attention: exact agreement of the instruction sets, exact chunk-invariance, error against f64.
#![allow(clippy::unwrap_used)]

mod common;

use common::random;
use half::bf16;
use kernels::{Attention, Isa, KvLayout};
use proptest::prelude::*;

/// A sequence in a cache whose other blocks and unwritten slots are NaN.
struct Sequence {
    layout: KvLayout,
    heads: usize,
    queries: Vec<bf16>,
    keys: Vec<bf16>,
    values: Vec<bf16>,
    cache: Vec<bf16>,
    table: Vec<u32>,
}

impl Sequence {
    fn new(layout: KvLayout, group: usize, tokens: usize, seed: u64) -> Self {
        let heads = layout.kv_heads() * group;
        let width = layout.kv_heads() * layout.head_dim();
        let blocks = tokens.div_ceil(layout.block_size());
        let keys = random(seed, tokens * width, 3.0);
        let values = random(seed ^ 1, tokens * width, 1.0);
        let queries = random(seed ^ 2, tokens * heads * layout.head_dim(), 3.0);
        let table: Vec<u32> = (0..blocks as u32)
            .map(|b| (b * 7 + seed as u32 % 5) % (7 * blocks as u32 + 5))
            .collect();
        let elements = layout.block_elements();
        let mut cache = vec![bf16::NAN; (7 * blocks + 5) * elements];
        for token in 0..tokens {
            let block = table[token / layout.block_size()] as usize;
            let block = &mut cache[block * elements..][..elements];
            let slot = token % layout.block_size();
            let range = token * width..(token + 1) * width;
            layout
                .write_token(block, slot, &keys[range.clone()], &values[range])
                .unwrap();
        }
        Self {
            layout,
            heads,
            queries,
            keys,
            values,
            cache,
            table,
        }
    }

    /// Output of the tokens, in chunks.
    fn run(&self, isa: Isa, chunks: &[usize]) -> Vec<bf16> {
        let width = self.heads * self.layout.head_dim();
        let mut out = vec![bf16::NAN; self.queries.len()];
        let mut first_position = 0;
        let tokens = self.queries.len() / width;
        let mut sizes = chunks.iter().copied().chain(std::iter::repeat(tokens));
        while first_position < tokens {
            let rows = sizes.next().unwrap().clamp(1, tokens - first_position);
            let range = first_position * width..(first_position + rows) * width;
            let attention = Attention {
                layout: self.layout,
                heads: self.heads,
                scale: self.scale(),
                cache: &self.cache,
                table: &self.table,
                first_position,
            };
            attention
                .run(isa, &self.queries[range.clone()], &mut out[range])
                .unwrap();
            first_position += rows;
        }
        out
    }

    fn scale(&self) -> f32 {
        1.0 / (self.layout.head_dim() as f32).sqrt()
    }

    /// The same in f64, by the textbook.
    fn exact(&self, token: usize, head: usize) -> Vec<f64> {
        let dim = self.layout.head_dim();
        let kv_width = self.layout.kv_heads() * dim;
        let kv = head / (self.heads / self.layout.kv_heads()) * dim;
        let q = &self.queries[(token * self.heads + head) * dim..][..dim];
        let scores: Vec<f64> = (0..=token)
            .map(|t| {
                let k = &self.keys[t * kv_width + kv..][..dim];
                let dot: f64 = q.iter().zip(k).map(|(q, k)| q.to_f64() * k.to_f64()).sum();
                dot * f64::from(self.scale())
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let p: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = p.iter().sum();
        (0..dim)
            .map(|i| {
                let weighted = p.iter().enumerate();
                weighted
                    .map(|(t, p)| p * self.values[t * kv_width + kv + i].to_f64())
                    .sum::<f64>()
                    / sum
            })
            .collect()
    }
}

fn shapes() -> impl Strategy<Value = (KvLayout, usize, usize, u64)> {
    let dims = prop::sample::select(vec![2_usize, 6, 16, 24, 32, 48, 64, 128]);
    (
        1_usize..4,
        1_usize..4,
        dims,
        1_usize..10,
        1_usize..200,
        any::<u64>(),
    )
        .prop_map(|(blocks, kv_heads, dim, group, tokens, seed)| {
            let layout = KvLayout::new(16 * blocks, kv_heads, dim).unwrap();
            (layout, group, tokens, seed)
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Values are within -1..1. The output's rounding to bf16 is at most 2^-8 of it, all the rest below 2^-15.
    #[test]
    fn agrees_with_the_textbook_in_f64((layout, group, tokens, seed) in shapes()) {
        let sequence = Sequence::new(layout, group, tokens, seed);
        let out = sequence.run(Isa::detect(), &[]);
        let dim = layout.head_dim();
        for token in [0, tokens / 2, tokens - 1] {
            for head in 0..sequence.heads {
                let got = &out[(token * sequence.heads + head) * dim..][..dim];
                for (got, want) in got.iter().zip(sequence.exact(token, head)) {
                    let error = (got.to_f64() - want).abs();
                    prop_assert!(error <= want.abs() / 256.0 + 2.0_f64.powi(-15), "{got} for {want}");
                }
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_chunks_or_the_instruction_set(
        (layout, group, tokens, seed) in shapes(), chunks in prop::collection::vec(1_usize..40, 0..20),
    ) {
        let sequence = Sequence::new(layout, group, tokens, seed);
        let whole = sequence.run(Isa::detect(), &[]);
        prop_assert!(whole.iter().all(|x| x.is_finite()), "an unwritten slot was used");
        for isa in Isa::available() {
            prop_assert_eq!(&sequence.run(isa, &chunks), &whole, "{}", isa);
        }
        prop_assert_eq!(&sequence.run(Isa::detect(), &vec![1; tokens]), &whole);
    }

    #[test]
    fn bits_do_not_depend_on_the_block_size(kv_heads in 1_usize..3, tokens in 1_usize..200, seed: u64) {
        let run = |block_size| {
            let layout = KvLayout::new(block_size, kv_heads, 32).unwrap();
            Sequence::new(layout, 2, tokens, seed).run(Isa::detect(), &[])
        };
        prop_assert_eq!(run(16), run(48));
    }

    #[test]
    fn a_slot_reads_back_what_was_written((layout, _, _, seed) in shapes(), slot in 0_usize..48) {
        let width = layout.kv_heads() * layout.head_dim();
        let (keys, values) = (random(seed, width, 1.0), random(seed ^ 1, width, 1.0));
        let mut block = layout.allocate(1);
        let written = layout.write_token(&mut block, slot, &keys, &values);
        if slot < layout.block_size() {
            written.unwrap();
            prop_assert_eq!(layout.read_token(&block, slot).unwrap(), (keys, values));
            let others = block.iter().filter(|x| **x != bf16::ZERO).count();
            prop_assert!(others <= 2 * width);
        } else {
            prop_assert!(written.is_err());
        }
    }
}

/// A later token of the same chunk may be infinite: those before it must not see it, not even times zero.
#[test]
fn an_infinite_value_reaches_no_earlier_row() {
    let layout = KvLayout::new(16, 1, 32).unwrap();
    let mut sequence = Sequence::new(layout, 2, 60, 3);
    let clean = sequence.run(Isa::detect(), &[]);
    let elements = layout.block_elements();
    let block = sequence.table[50 / 16] as usize;
    layout
        .write_token(
            &mut sequence.cache[block * elements..][..elements],
            50 % 16,
            &[bf16::INFINITY; 32],
            &[bf16::NAN; 32],
        )
        .unwrap();
    let dirty = sequence.run(Isa::detect(), &[]);
    assert_eq!(clean[..50 * 64], dirty[..50 * 64]);
    assert!(dirty[50 * 64..].iter().all(|x| x.is_nan()));
}

#[test]
fn wrong_shapes_are_errors() {
    let refused = |block_size, kv_heads, dim| {
        KvLayout::new(block_size, kv_heads, dim)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        refused(24, 1, 32),
        "kv layout: block_size must be a multiple of 16 and not 0, got 24"
    );
    assert_eq!(
        refused(16, 1, 31),
        "kv layout: head_dim must be even and not 0, got 31"
    );
    assert_eq!(
        refused(16, 0, 32),
        "kv layout: kv_heads must be at least 1, got 0"
    );
    let layout = KvLayout::new(16, 2, 32).unwrap();
    let cache = layout.allocate(2);
    let good = Attention {
        layout,
        heads: 4,
        scale: 1.0,
        cache: &cache,
        table: &[1, 0],
        first_position: 31,
    };
    let query = [bf16::ONE; 128];
    let try_it = |attention: Attention<'_>, rows: usize| {
        let mut out = [bf16::ZERO; 128];
        attention.run(Isa::detect(), &query[..rows], &mut out[..rows])
    };
    assert!(try_it(good, 128).is_ok());
    assert!(try_it(good, 127).is_err());
    assert!(try_it(Attention { heads: 3, ..good }, 96).is_err());
    assert!(
        try_it(
            Attention {
                first_position: 32,
                ..good
            },
            128
        )
        .is_err()
    );
    assert!(
        try_it(
            Attention {
                table: &[1, 2],
                ..good
            },
            128
        )
        .is_err()
    );
    assert!(try_it(good, 0).is_ok());
}
