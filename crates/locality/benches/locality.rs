//! Decision, fit and wire form at the size of Qwen3-30B-A3B: L = 48, E = 128, top-8.
//!
//! `tools/bench/locality/run.sh` runs this beside NumPy and SciPy on the same data, which it names
//! in `LOCALITY_BENCH_DATA`; without it records are made up.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;

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

fn locality(criterion: &mut Criterion) {
    let file = data();
    for clusters in [16, 256] {
        let config = FitConfig {
            clusters,
            transform: Some(Transform::CountIdf),
            mask: MaskChoice::All,
            pairs: Some(100),
            restarts: 1,
            ..FitConfig::default()
        };
        let (map, _) = fit(&file, &config, &mut |_| ()).unwrap();
        let mut signature = Signature::default();
        let mut similarities = vec![0.0; clusters];
        let mut members = Vec::with_capacity(clusters);
        let band = Band::default();
        let mut next = file.records.iter().cycle();
        criterion.bench_function(&format!("decision/K={clusters}"), |bencher| {
            bencher.iter(|| {
                let counts = next.next().unwrap().prompt.counts();
                map.signature_into(black_box(counts), &mut signature)
                    .unwrap();
                map.similarities(&signature, &mut similarities);
                band.members(&similarities, &mut members);
                members.len()
            });
        });
    }

    let prompt = &file.records[0].prompt;
    let text = prompt.encode();
    criterion.bench_function("wire/encode", |b| b.iter(|| black_box(prompt).encode()));
    criterion.bench_function("wire/decode", |b| {
        b.iter(|| PromptCounts::decode(black_box(&text)).unwrap());
    });

    let mut group = criterion.benchmark_group("fit");
    group.sample_size(10);
    for restarts in [1, 4] {
        let config = FitConfig {
            clusters: 16,
            restarts,
            ..FitConfig::default()
        };
        group.bench_function(format!("N=1000,K=16,restarts={restarts}"), |b| {
            b.iter(|| fit(&file, &config, &mut |_| ()).unwrap().1.iterations);
        });
    }
    group.finish();
    for restarts in [1, 4] {
        let config = FitConfig {
            clusters: 16,
            restarts,
            ..FitConfig::default()
        };
        let (map, report) = fit(&file, &config, &mut |_| ()).unwrap();
        eprintln!(
            "restarts {restarts}: {} rho {:.4} (all layers {:.4}), {} layers kept, within {:.5}, between {:.5}, {} iterations, map {} KiB",
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
}

criterion_group!(benches, locality);
criterion_main!(benches);
