//! The kernels at the demo model's shapes, and against what memory gives.
//!
//! `cargo bench -p kernels`; throughput is printed in bytes of weights (few rows) or in elements, one element being one
//! floating-point operation (many rows).

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use kernels::{
    Attention, Isa, KvLayout, PackedGateUp, PackedMatrix, Rows, RowsMut, bandwidth::ReadTest,
    matmul, matmul_silu_mul,
};

fn data(len: usize) -> Vec<bf16> {
    (0..len)
        .map(|i| bf16::from_f32((i * 31 % 97) as f32 / 97.0 - 0.5))
        .collect()
}

fn weights(n: usize, k: usize) -> PackedMatrix {
    match PackedMatrix::pack(&data(n * k), n, k) {
        Ok(w) => w,
        Err(error) => unreachable!("{error}"),
    }
}

/// Weights that are in no cache: copies until they fill 64 MiB, taken in turn.
fn streamed(c: &mut Criterion) {
    let isa = Isa::detect();
    let mut group = c.benchmark_group("expert 768 x 2048 from memory");
    let copies: Vec<_> = (0..20).map(|_| weights(768, 2048)).collect();
    for m in [1, 4, 16] {
        let (x, mut out) = (data(m * 2048), vec![0.0; m * 768]);
        group.throughput(Throughput::Bytes(copies[0].bytes() as u64));
        let mut turn = 0;
        group.bench_function(BenchmarkId::from_parameter(m), |b| {
            b.iter(|| {
                turn = (turn + 1) % copies.len();
                let out = RowsMut::dense(&mut out, 768);
                black_box(matmul(isa, Rows::dense(&x, 2048), &copies[turn], out))
            });
        });
    }
    group.finish();

    let test = ReadTest::new(256 << 20);
    let mut group = c.benchmark_group("read bandwidth");
    group.throughput(Throughput::Bytes(test.bytes() as u64));
    group.sample_size(20);
    group.bench_function("256 MiB", |b| b.iter(|| test.pass(isa)));
    group.finish();
}

fn products(c: &mut Criterion) {
    for isa in Isa::available()
        .into_iter()
        .filter(|isa| *isa != Isa::SCALAR)
    {
        for (name, n, k) in [("qkv", 384, 192), ("router", 64, 192), ("head", 4096, 192)] {
            let w = weights(n, k);
            let mut group = c.benchmark_group(format!("{name} {n} x {k} {isa}"));
            for m in [1, 4, 16, 32, 512] {
                let (x, mut out) = (data(m * k), vec![0.0; m * n]);
                group.throughput(Throughput::Elements((2 * m * n * k) as u64));
                group.bench_function(BenchmarkId::from_parameter(m), |b| {
                    b.iter(|| matmul(isa, Rows::dense(&x, k), &w, RowsMut::dense(&mut out, n)));
                });
            }
            group.finish();
        }
    }
}

fn expert(c: &mut Criterion) {
    let isa = Isa::detect();
    let (hidden, inner) = (192, 64);
    let Ok(gate_up) =
        PackedGateUp::pack(&data(inner * hidden), &data(inner * hidden), inner, hidden)
    else {
        unreachable!("the shapes fit")
    };
    let down = weights(hidden, inner);
    let mut group = c.benchmark_group("demo expert 192 x 64");
    for m in [1, 4, 16, 32] {
        let x = data(m * hidden);
        let (mut act, mut out) = (vec![bf16::ZERO; m * inner], vec![0.0; m * hidden]);
        group.throughput(Throughput::Elements((6 * m * hidden * inner) as u64));
        group.bench_function(BenchmarkId::from_parameter(m), |b| {
            b.iter(|| {
                matmul_silu_mul(isa, Rows::dense(&x, hidden), &gate_up, &mut act)?;
                matmul(
                    isa,
                    Rows::dense(&act, inner),
                    &down,
                    RowsMut::dense(&mut out, hidden),
                )
            });
        });
    }
    group.finish();
}

fn attention(c: &mut Criterion) {
    let isa = Isa::detect();
    let mut group = c.benchmark_group("attention 6 heads, 3 kv heads, 32");
    for (name, context, rows) in [("decode at 256", 256, 1), ("prefill 512", 512, 512)] {
        let Ok(layout) = KvLayout::new(16, 3, 32) else {
            unreachable!("the layout is valid")
        };
        let table: Vec<u32> = (0..context as u32 / 16).collect();
        let cache = data(table.len() * layout.block_elements());
        let attention = Attention {
            layout,
            heads: 6,
            scale: 0.18,
            cache: &cache,
            table: &table,
            first_position: context - rows,
        };
        let queries = data(rows * 6 * 32);
        let mut out = vec![bf16::ZERO; queries.len()];
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_function(name, |b| b.iter(|| attention.run(isa, &queries, &mut out)));
    }
    group.finish();
}

criterion_group!(benches, streamed, products, expert, attention);
criterion_main!(benches);
