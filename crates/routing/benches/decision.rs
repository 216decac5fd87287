//! The whole locality decision at the handoff, at Qwen3-30B-A3B's shape: counts as the gateway holds them after decoding,
//! to a worker with its explanation. And beside it the wire form's decoding, which comes before, and the prefill side.

#![allow(clippy::unwrap_used, missing_docs)]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use experts::{
    CalibrationFile, CalibrationHeader, CalibrationRecord, ExpertCounts, ModelShape, PromptCounts,
};
use locality::{FitConfig, LocalityMap, MaskChoice, Transform};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use routing::decode::{Locality, LocalityConfig};
use routing::{DecodeFacts, DecodePolicy, PrefillFacts, PrefillPolicyName, WorkerFacts};

const SHAPE: ModelShape = ModelShape {
    layers: 48,
    experts: 128,
    top_k: 8,
};

/// Skewed counts: half the tokens of a prompt keep to a sixteenth of the experts.
fn prompt(rng: &mut ChaCha8Rng, tokens: usize) -> PromptCounts {
    let mut counts = ExpertCounts::zeros(SHAPE);
    for layer in 0..SHAPE.layers as usize {
        let home = rng.random_range(0..16u16) * 8;
        for _ in 0..tokens {
            let ids: Vec<u16> = if rng.random_bool(0.5) {
                (home..home + 8).collect()
            } else {
                let start = rng.random_range(0..128u16);
                (0..8).map(|step| (start + step * 16) % 128).collect()
            };
            counts.record(layer, &ids).unwrap();
        }
    }
    PromptCounts::complete(counts).unwrap()
}

fn map(rng: &mut ChaCha8Rng, clusters: usize) -> LocalityMap {
    let records = (0..clusters * 2).map(|_| CalibrationRecord::new(prompt(rng, 32), None));
    let calibration = CalibrationFile {
        header: CalibrationHeader::new("synthetic", SHAPE),
        records: records.collect(),
    };
    let config = FitConfig {
        clusters,
        transform: Some(Transform::CountIdf),
        mask: MaskChoice::All,
        restarts: 1,
        ..FitConfig::default()
    };
    locality::fit(&calibration, &config, &mut |_| {}).unwrap().0
}

fn decision(c: &mut Criterion) {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let counts = prompt(&mut rng, 512);
    for workers in [16, 256] {
        let mut policy =
            Locality::new(map(&mut rng, workers), workers, LocalityConfig::default()).unwrap();
        let facts: Vec<WorkerFacts> = (0..workers)
            .map(|_| WorkerFacts::new(rng.random_range(0..20)))
            .collect();
        c.bench_function(
            &format!("locality decision, 48 layers x 128 experts, {workers} workers"),
            |b| {
                b.iter(|| {
                    policy.choose(
                        black_box(&DecodeFacts {
                            counts: Some(&counts),
                            domain: None,
                        }),
                        black_box(&facts),
                    )
                });
            },
        );
    }
    let wire = counts.encode();
    c.bench_function(
        &format!(
            "decode counts of 512 tokens from the wire, {} bytes",
            wire.len()
        ),
        |b| {
            b.iter(|| PromptCounts::decode(black_box(&wire)).unwrap());
        },
    );
    let names: Vec<String> = (0..16)
        .map(|worker| format!("http://10.0.0.{worker}:8000"))
        .collect();
    let mut policy = routing::prefill_policy(PrefillPolicyName::PrefixHash, &names);
    let facts: Vec<WorkerFacts> = (0..16).map(|_| WorkerFacts::new(3)).collect();
    let text = vec![b'x'; 1024];
    c.bench_function("prefix hash, 1,024 bytes, 16 workers", |b| {
        b.iter(|| {
            policy.choose(
                black_box(&PrefillFacts { prompt: &text }),
                black_box(&facts),
            )
        });
    });
}

criterion_group!(benches, decision);
criterion_main!(benches);
