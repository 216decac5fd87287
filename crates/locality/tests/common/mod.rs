//! Calibration records made up: a few domains, each with experts of its own in each layer.
#![allow(dead_code, clippy::unwrap_used)]

use experts::{
    CalibrationFile, CalibrationHeader, CalibrationRecord, ExpertCounts, ModelShape, PromptCounts,
};

/// SplitMix64: enough for tests.
pub(crate) struct Draws(pub(crate) u64);

impl Draws {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Roughly normal.
    pub(crate) fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }
}

/// Shares to whole counts that sum to `tokens * top_k`, none above `tokens`.
pub(crate) fn spread(shares: &[f64], tokens: u32, top_k: u32) -> Vec<u32> {
    let total: f64 = shares.iter().sum();
    let sum = u64::from(tokens) * u64::from(top_k);
    let mut counts: Vec<u32> = shares
        .iter()
        .map(|share| ((share / total * sum as f64) as u32).min(tokens))
        .collect();
    let mut short = sum - counts.iter().map(|&c| u64::from(c)).sum::<u64>();
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by(|&a, &b| shares[b].total_cmp(&shares[a]));
    while short > 0 {
        for &e in &order {
            if short > 0 && counts[e] < tokens {
                counts[e] += 1;
                short -= 1;
            }
        }
    }
    counts
}

/// `records` records of `domains` domains in turn.
pub(crate) fn calibration(
    shape: ModelShape,
    records: usize,
    domains: usize,
    tokens: u32,
    seed: u64,
) -> CalibrationFile {
    let mut draws = Draws(seed);
    let cells = shape.cells();
    let base: Vec<f64> = (0..cells).map(|_| draws.normal() * 0.5).collect();
    let tastes: Vec<Vec<f64>> = (0..domains)
        .map(|_| {
            (0..cells)
                .map(|cell| {
                    // Deeper layers tell domains apart better.
                    let depth =
                        (cell / shape.experts as usize + 1) as f64 / f64::from(shape.layers);
                    base[cell] + draws.normal() * 1.5 * depth
                })
                .collect()
        })
        .collect();
    let records = (0..records)
        .map(|r| {
            let taste = &tastes[r % domains];
            let own: Vec<f64> = taste.iter().map(|t| t + draws.normal() * 0.5).collect();
            let mut counts = |tokens: u32, noise: f64| {
                let mut all = Vec::with_capacity(cells);
                for row in own.chunks(shape.experts as usize) {
                    let shares: Vec<f64> = row
                        .iter()
                        .map(|t| (t + draws.normal() * noise).exp())
                        .collect();
                    all.extend(spread(&shares, tokens, shape.top_k));
                }
                ExpertCounts::from_vec(shape, all).unwrap()
            };
            let prompt = PromptCounts::new(counts(tokens, 0.3), tokens).unwrap();
            let decode = counts(tokens / 2 + 1, 0.3);
            let mut record = CalibrationRecord::new(prompt, Some(decode));
            let values = |f: fn(f64) -> f64| own.iter().map(|&t| f(t) as f32).collect();
            record.gate_probabilities = Some(values(f64::exp));
            record.gate_logits = Some(values(|t| t));
            record.domain = Some(format!("domain-{}", r % domains));
            record
        })
        .collect();
    CalibrationFile {
        header: CalibrationHeader::new("made-up", shape),
        records,
    }
}
