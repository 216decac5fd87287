//! Same bits in any company: a token's logits, experts, gates and cached keys and values do not depend on what else is in the
//! batch, on the chunking, on where its prefix came from, on the blocks' numbers, on padding or on the instruction set.
#![allow(clippy::unwrap_used)]

mod common;

use common::{BLOCK, slice, whole};
use engine::testing::{RandomModel, write_random_checkpoint};
use engine::{
    ForwardOutput, KvStore, LoadOptions, LogitsWanted, Model, Phase, Scratch, SequenceSlice,
};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn shapes() -> Vec<RandomModel> {
    vec![
        RandomModel::default(),
        RandomModel {
            hidden_size: 40,
            layers: 4,
            mlp_only_layers: vec![1, 3],
            intermediate_size: 56,
            heads: 6,
            kv_heads: 2,
            head_dim: 10,
            experts: 12,
            top_k: 3,
            moe_intermediate_size: 20,
            norm_topk_prob: false,
            tie_word_embeddings: false,
            ..RandomModel::default()
        },
    ]
}

fn load(shape: &RandomModel, options: &LoadOptions) -> Model {
    let dir = tempfile::tempdir().unwrap();
    write_random_checkpoint(dir.path(), shape, 7).unwrap();
    Model::load(dir.path(), options).unwrap()
}

fn models() -> Vec<Model> {
    shapes()
        .iter()
        .map(|shape| load(shape, &LoadOptions::default()))
        .collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// What one token of a sequence came to.
#[derive(Debug, PartialEq)]
struct Row {
    logits: Option<Vec<u32>>,
    experts: Vec<u16>,
    gates: Option<(Vec<u32>, Vec<u32>)>,
}

/// Takes the output of a batch apart, row by row, in batch order.
fn rows(model: &Model, batch: &[SequenceSlice<'_>], out: &ForwardOutput) -> Vec<Row> {
    let vocab = model.config().vocab_size;
    let (ids, cells) = (model.shape().ids_per_token(), model.shape().cells());
    let mut logits = out.logits.chunks_exact(vocab);
    let mut experts = out.experts.chunks_exact(ids);
    let mut gates = out
        .gates
        .probabilities
        .chunks_exact(cells)
        .zip(out.gates.logits.chunks_exact(cells));
    let mut rows = Vec::new();
    for slice in batch {
        for i in 0..slice.tokens.len() {
            let wanted = match slice.logits {
                LogitsWanted::None => false,
                LogitsWanted::Last => i + 1 == slice.tokens.len(),
                LogitsWanted::All => true,
            };
            rows.push(Row {
                logits: wanted.then(|| bits(logits.next().unwrap())),
                experts: experts.next().unwrap().to_vec(),
                gates: slice.gates.then(|| {
                    let (probabilities, logits) = gates.next().unwrap();
                    (bits(probabilities), bits(logits))
                }),
            });
        }
    }
    assert!(logits.next().is_none() && experts.next().is_none() && gates.next().is_none());
    rows
}

/// A row that asked for less must equal the row that asked for everything, as far as it goes.
fn assert_same(row: &Row, reference: &Row) {
    assert_eq!(row.experts, reference.experts);
    if row.logits.is_some() {
        assert_eq!(row.logits, reference.logits);
    }
    if row.gates.is_some() {
        assert_eq!(row.gates, reference.gates);
    }
}

struct Sequence {
    tokens: Vec<u32>,
    reference: Vec<Row>,
    done: usize,
    table: Vec<u32>,
}

/// Several sequences of random lengths, cut into random chunks, batched at random with random wishes and shuffled blocks.
fn run_at_random(model: &Model, seed: u64, scratch: &mut Scratch, out: &mut ForwardOutput) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let count = rng.random_range(1..7);
    let mut free: Vec<u32> = (0..64).collect();
    let mut sequences = Vec::new();
    for _ in 0..count {
        let len = rng.random_range(1..100);
        let tokens: Vec<u32> = (0..len).map(|_| rng.random_range(0..259)).collect();
        let all = whole(model, &tokens);
        let reference = rows(model, &[slice(&tokens, 0, &[])], &all);
        let table = (0..tokens.len().div_ceil(BLOCK))
            .map(|_| free.swap_remove(rng.random_range(0..free.len())))
            .collect();
        sequences.push(Sequence {
            tokens,
            reference,
            done: 0,
            table,
        });
    }
    let mut kv = KvStore::new(model.config(), BLOCK, 64).unwrap();
    // What lies in unused slots must not matter.
    let garbage: Vec<u8> = (0..kv.block_bytes()).map(|_| rng.random()).collect();
    for block in 0..64 {
        kv.write_block(block, &garbage);
    }
    while sequences
        .iter()
        .any(|sequence| sequence.done < sequence.tokens.len())
    {
        let mut batch = Vec::new();
        let mut expected = Vec::new();
        let mut order: Vec<usize> = (0..sequences.len()).collect();
        while !order.is_empty() {
            let sequence = &sequences[order.swap_remove(rng.random_range(0..order.len()))];
            let left = sequence.tokens.len() - sequence.done;
            if left == 0 || rng.random_range(0..4) == 0 {
                continue;
            }
            let take = rng.random_range(1..left.min(40) + 1);
            batch.push(SequenceSlice {
                tokens: &sequence.tokens[sequence.done..sequence.done + take],
                first_position: sequence.done,
                block_table: &sequence.table,
                logits: [LogitsWanted::None, LogitsWanted::Last, LogitsWanted::All]
                    [rng.random_range(0..3)],
                gates: rng.random(),
                phase: if rng.random() {
                    Phase::Decode
                } else {
                    Phase::Prefill
                },
            });
            expected.extend(&sequence.reference[sequence.done..sequence.done + take]);
        }
        if batch.is_empty() {
            continue;
        }
        model.forward(&batch, &mut kv, scratch, out).unwrap();
        let got = rows(model, &batch, out);
        assert_eq!(got.len(), expected.len());
        for (row, reference) in got.iter().zip(expected) {
            assert_same(row, reference);
        }
        check_statistics(model, &batch, out, &got);
        let done: Vec<(usize, usize)> = batch
            .iter()
            .map(|slice| {
                let at = |sequence: &Sequence| {
                    std::ptr::eq(sequence.table.as_slice(), slice.block_table)
                };
                (sequences.iter().position(at).unwrap(), slice.tokens.len())
            })
            .collect();
        for (sequence, take) in done {
            sequences[sequence].done += take;
        }
    }
}

fn check_statistics(model: &Model, batch: &[SequenceSlice<'_>], out: &ForwardOutput, rows: &[Row]) {
    let top_k = model.config().top_k;
    let decode: Vec<bool> = batch
        .iter()
        .flat_map(|slice| slice.tokens.iter().map(|_| slice.phase == Phase::Decode))
        .collect();
    for layer in 0..model.config().moe_layers.len() {
        let distinct = |decode_only: bool| {
            let wanted = rows
                .iter()
                .zip(&decode)
                .filter(|(_, decode)| **decode || !decode_only);
            let ids = wanted.flat_map(|(row, _)| &row.experts[layer * top_k..][..top_k]);
            ids.collect::<std::collections::HashSet<_>>().len() as u32
        };
        assert_eq!(out.distinct_experts[layer], distinct(false));
        assert_eq!(out.distinct_experts_decode[layer], distinct(true));
    }
}

#[test]
fn company_and_chunking_change_no_bit() {
    for model in models() {
        let (mut scratch, mut out) = (Scratch::default(), ForwardOutput::default());
        for seed in 0..25 {
            run_at_random(&model, seed, &mut scratch, &mut out);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn company_and_chunking_change_no_bit_whatever_the_seed(seed: u64) {
        let model = load(&shapes()[1], &LoadOptions::default());
        run_at_random(&model, seed, &mut Scratch::default(), &mut ForwardOutput::default());
    }
}

/// A large step crosses the sizes at which kernels change their tiles.
#[test]
fn a_large_batch_changes_no_bit() {
    let model = load(&RandomModel::default(), &LoadOptions::default());
    let prompts: Vec<Vec<u32>> = (0..70)
        .map(|i| {
            (0..1 + i % 9)
                .map(|j| (i * 31 + j * 7) as u32 % 256)
                .collect()
        })
        .collect();
    let tables: Vec<[u32; 1]> = (0..70).map(|i| [i]).collect();
    let batch: Vec<_> = prompts
        .iter()
        .zip(&tables)
        .map(|(prompt, table)| slice(prompt, 0, table))
        .collect();
    let mut kv = KvStore::new(model.config(), BLOCK, 70).unwrap();
    let mut out = ForwardOutput::default();
    model
        .forward(&batch, &mut kv, &mut Scratch::default(), &mut out)
        .unwrap();
    let got = rows(&model, &batch, &out);
    let mut got = got.iter();
    for prompt in &prompts {
        for reference in rows(&model, &[slice(prompt, 0, &[])], &whole(&model, prompt)) {
            assert_eq!(got.next().unwrap(), &reference);
        }
    }
}

#[test]
fn a_block_may_come_from_another_store() {
    for model in models() {
        let tokens: Vec<u32> = (0..50).map(|i| i * 5 % 256).collect();
        let reference = rows(&model, &[slice(&tokens, 0, &[])], &whole(&model, &tokens));
        let (mut scratch, mut out) = (Scratch::default(), ForwardOutput::default());
        let mut first = KvStore::new(model.config(), BLOCK, 4).unwrap();
        model
            .forward(
                &[slice(&tokens[..40], 0, &[3, 1, 0])],
                &mut first,
                &mut scratch,
                &mut out,
            )
            .unwrap();
        let mut second = KvStore::new(model.config(), BLOCK, 9).unwrap();
        for (from, to) in [(3, 8), (1, 0), (0, 5)] {
            second.write_block(to, first.block(from));
        }
        let rest = slice(&tokens[40..], 40, &[8, 0, 5, 2]);
        model
            .forward(
                std::slice::from_ref(&rest),
                &mut second,
                &mut scratch,
                &mut out,
            )
            .unwrap();
        assert_eq!(rows(&model, &[rest], &out), reference[40..]);
    }
}

#[test]
fn the_block_size_changes_no_bit() {
    let model = load(&RandomModel::default(), &LoadOptions::default());
    let tokens: Vec<u32> = (0..70).map(|i| i * 11 % 256).collect();
    let reference = whole(&model, &tokens);
    for block_size in [32, 48, 128] {
        let mut kv = KvStore::new(model.config(), block_size, 3).unwrap();
        let mut out = ForwardOutput::default();
        model
            .forward(
                &[slice(&tokens, 0, &[2, 0, 1])],
                &mut kv,
                &mut Scratch::default(),
                &mut out,
            )
            .unwrap();
        assert_eq!(bits(&out.logits), bits(&reference.logits));
    }
}

#[test]
fn expert_padding_changes_no_bit() {
    for shape in shapes() {
        let tokens: Vec<u32> = (0..60).map(|i| i * 13 % 256).collect();
        let plain = load(&shape, &LoadOptions::default());
        let reference = whole(&plain, &tokens);
        for expert_padding in [2, 5] {
            let padded = load(&shape, &LoadOptions { expert_padding });
            assert_eq!(padded.fingerprint(), plain.fingerprint());
            let out = whole(&padded, &tokens);
            assert_eq!(bits(&out.logits), bits(&reference.logits));
            assert_eq!(out.experts, reference.experts);
        }
    }
}

#[test]
fn the_instruction_set_changes_no_bit() {
    for mut model in models() {
        let tokens: Vec<u32> = (0..60).map(|i| i * 17 % 256).collect();
        let reference = whole(&model, &tokens);
        for isa in kernels::Isa::available() {
            model.set_isa(isa);
            assert_eq!(
                bits(&whole(&model, &tokens).logits),
                bits(&reference.logits),
                "{isa:?}"
            );
        }
    }
}

#[test]
fn refuses_a_batch_that_breaks_the_rules() {
    let model = load(
        &RandomModel {
            max_positions: 64,
            ..RandomModel::default()
        },
        &LoadOptions::default(),
    );
    let mut kv = KvStore::new(model.config(), BLOCK, 4).unwrap();
    let long = vec![0; 65];
    for (tokens, first, table, words) in [
        (&[][..], 0, &[0][..], "no tokens"),
        (&long, 0, &[0, 1, 2, 3, 0], "position 65"),
        (&[1], 16, &[0], "1 blocks, expected 2"),
        (&[1], 0, &[4], "block 4"),
        (&[259], 0, &[0], "token 259"),
    ] {
        let mut out = ForwardOutput::default();
        let error = model.forward(
            &[slice(tokens, first, table)],
            &mut kv,
            &mut Scratch::default(),
            &mut out,
        );
        let message = error.unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
    }
    assert!(KvStore::new(model.config(), 8, 4).is_err());
    model
        .forward(
            &[],
            &mut kv,
            &mut Scratch::default(),
            &mut ForwardOutput::default(),
        )
        .unwrap();
}
