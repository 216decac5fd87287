//! Decision, fit and wire form at the size of Qwen3-30B-A3B: L = 48, E = 128, top-8.
//!
//! `tools/bench/locality/run.sh` runs this beside NumPy and SciPy on the same data, which it names
//! in `LOCALITY_BENCH_DATA`; without it records are made up.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stderr)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use experts::{
    CalibrationFile, CalibrationHeader, CalibrationRecord, ExpertCounts, ModelShape, PromptCounts,
};
use locality::{Band, FitConfig, MaskChoice, Signature, Transform, fit};

/// Five `u32`: records, layers, experts, top-k, tokens; then per record prompt counts, decode
/// counts (`u32`), gate probabilities, gate logits (`f32`), all `layers x experts`, little-endian.
fn load(path: &str) -> CalibrationFile {
    let bytes = std::fs::read(path).unwrap();
    let words: Vec<u32> = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&word| u32::from_le_bytes(word))
        .collect();
    let shape = ModelShape {
        layers: words[1],
        experts: words[2],
        top_k: words[3],
    };
    let cells = shape.cells();
    let records = words[5..]
        .chunks_exact(4 * cells)
        .map(|record| {
            let part = |at: usize| record[at * cells..(at + 1) * cells].to_vec();
            let counts = |at| ExpertCounts::from_vec(shape, part(at)).unwrap();
            let floats = |at| Some(part(at).into_iter().map(f32::from_bits).collect());
            let prompt = PromptCounts::new(counts(0), words[4]).unwrap();
            let mut record = CalibrationRecord::new(prompt, Some(counts(1)));
            record.gate_probabilities = floats(2);
            record.gate_logits = floats(3);
            record
        })
        .collect();
    CalibrationFile {
        header: CalibrationHeader::new("bench", shape),
        records,
    }
}

fn data() -> CalibrationFile {
    match std::env::var("LOCALITY_BENCH_DATA") {
        Ok(path) => load(&path),
        Err(_) => {
            let shape = ModelShape {
                layers: 48,
                experts: 128,
                top_k: 8,
            };
            common::calibration(shape, 1000, 12, 2048, 1)
        }
    }
}

/// Processor time of this process in seconds, all threads: what a busy machine does not stretch.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks = |at: usize| {
        let field = after_name.split_whitespace().nth(at);
        field.and_then(|t| t.parse::<f64>().ok()).unwrap_or(0.0)
    };
    (ticks(11) + ticks(12)) / 100.0
}

fn decision(criterion: &mut Criterion, file: &CalibrationFile, clusters: usize) {
    let config = FitConfig {
        clusters,
        transform: Some(Transform::CountIdf),
        mask: MaskChoice::All,
        pairs: Some(100),
        restarts: 1,
        max_iterations: 2,
        ..FitConfig::default()
    };
    let (map, _) = fit(file, &config, &mut |_| ()).unwrap();
    let mut signature = Signature::default();
    let mut similarities = vec![0.0; clusters];
    let mut members = Vec::with_capacity(clusters);
    let band = Band::default();
    // Few prompts in turn: a gateway has just decoded the counts, so they are in the cache.
    let mut next = file.records.iter().take(16).cycle();
    let mut decide = || {
        let counts = next.next().unwrap().prompt.counts();
        map.signature_into(black_box(counts), &mut signature)
            .unwrap();
        map.similarities(&signature, &mut similarities);
        band.members(&similarities, &mut members);
        members.len()
    };
    criterion.bench_function(&format!("decision/K={clusters}"), |b| b.iter(&mut decide));
    let mut times: Vec<Duration> = (0..3000)
        .map(|_| {
            let start = Instant::now();
            black_box(decide());
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    eprintln!(
        "decision/K={clusters}: p50 {:.1} us, p10 {:.1} us, all {} layers",
        times[1500].as_secs_f64() * 1e6,
        times[300].as_secs_f64() * 1e6,
        map.mask().len(),
    );
}

/// One fit, with the processor time of each phase.
fn fit_once(file: &CalibrationFile, restarts: usize) {
    let config = FitConfig {
        clusters: 16,
        restarts,
        ..FitConfig::default()
    };
    let (wall, start) = (Instant::now(), processor_seconds());
    let mut ends = [start; 3];
    let (map, report) = fit(file, &config, &mut |progress| {
        ends[progress.phase as usize] = processor_seconds();
    })
    .unwrap();
    let (wall, all) = (wall.elapsed().as_secs_f64(), processor_seconds() - start);
    eprintln!(
        "fit/N={},K=16,restarts={restarts}: {wall:.2} s, {all:.2} s of processor time ({:.2} transforms, {:.2} mask, {:.2} clusters); {} rho {:.4} (all layers {:.4}), {} layers kept, within {:.5}, between {:.5}, {} iterations, map {} KiB",
        report.records,
        ends[0] - start,
        ends[1] - ends[0],
        ends[2] - ends[1],
        report.transform,
        report.quality.rho.unwrap_or(f64::NAN),
        report.quality.rho_all_layers.unwrap_or(f64::NAN),
        report.layers_kept.len(),
        report.quality.within_similarity,
        report.quality.between_similarity.unwrap_or(f64::NAN),
        report.iterations,
        map.to_bytes().unwrap().len() / 1024,
    );
}

fn locality(criterion: &mut Criterion) {
    let file = data();
    for clusters in [16, 256] {
        decision(criterion, &file, clusters);
    }
    let prompt = &file.records[0].prompt;
    let text = prompt.encode();
    criterion.bench_function("wire/encode", |b| b.iter(|| black_box(prompt).encode()));
    criterion.bench_function("wire/decode", |b| {
        b.iter(|| PromptCounts::decode(black_box(&text)).unwrap());
    });
    // Too long for criterion's many runs.
    for restarts in [1, 4] {
        fit_once(&file, restarts);
        fit_once(&file, restarts);
    }
}

criterion_group!(benches, locality);
criterion_main!(benches);
