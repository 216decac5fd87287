//! Norms, rotary positions, top-k, sums: exact agreement of the instruction sets, error against f64.
#![allow(clippy::unwrap_used)]

mod common;

use common::{bits, random_f32};
use half::bf16;
use kernels::{
    Isa, Renormalise, RopeTable, add, argmax, combine, head_norm_rope, rms_norm, rms_norm_f32,
    rope, round_bf16, softmax, softmax_top_k, to_bf16, to_f32,
};
use proptest::prelude::*;

/// The same result from every instruction set; returns the reference's.
fn same<T: PartialEq + std::fmt::Debug>(run: impl Fn(Isa) -> T) -> T {
    let reference = run(Isa::SCALAR);
    for isa in Isa::available() {
        assert_eq!(run(isa), reference, "{isa}");
    }
    reference
}

proptest! {
    #[test]
    fn norm(rows in 1_usize..4, width in 1_usize..200, seed: u64, scale in prop::sample::select(vec![1e-6_f32, 1.0, 1e6])) {
        let x = random_f32(seed, rows * width, scale);
        let weight = random_f32(seed ^ 1, width, 2.0);
        let eps = 1e-6_f32;
        let got = same(|isa| {
            let mut out = vec![f32::NAN; x.len()];
            rms_norm_f32(isa, &x, &weight, eps, &mut out).unwrap();
            bits(&out)
        });
        let rounded = same(|isa| {
            let mut out = vec![bf16::NAN; x.len()];
            rms_norm(isa, &x, &weight, eps, &mut out).unwrap();
            out
        });
        for (row, x) in x.chunks(width).enumerate() {
            let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
            for (i, &x) in x.iter().enumerate() {
                let got = f32::from_bits(got[row * width + i]);
                let want = f64::from(x) / (mean + f64::from(eps)).sqrt() * f64::from(weight[i]);
                prop_assert!((f64::from(got) - want).abs() <= want.abs() * 1e-6, "{got} for {want}");
                prop_assert_eq!(rounded[row * width + i], round_bf16(got));
            }
        }
    }

    #[test]
    fn rotary(heads in 1_usize..5, half in 1_usize..70, position in 0_usize..3000, seed: u64) {
        let dim = 2 * half;
        let table = RopeTable::new(1e4, dim, 3000).unwrap();
        let (cos, sin) = table.at(position).unwrap();
        let x = random_f32(seed, heads * dim, 4.0);
        let weight = random_f32(seed ^ 1, dim, 2.0);
        let plain = same(|isa| {
            let mut out = vec![bf16::NAN; x.len()];
            rope(isa, &x, cos, sin, &mut out).unwrap();
            out
        });
        let normed = same(|isa| {
            let mut out = vec![bf16::NAN; x.len()];
            head_norm_rope(isa, &x, &weight, 1e-6, cos, sin, &mut out).unwrap();
            out
        });
        let mut parts = vec![0.0; x.len()];
        rms_norm_f32(Isa::SCALAR, &x, &weight, 1e-6, &mut parts).unwrap();
        let mut out = vec![bf16::NAN; x.len()];
        rope(Isa::SCALAR, &parts, cos, sin, &mut out).unwrap();
        prop_assert_eq!(normed, out);
        for head in 0..heads {
            for i in 0..half {
                // The angle is rounded to f32, as in transformers: 3,000 * 2^-24 = 2e-4 at most.
                let angle = position as f64 * 1e4_f64.powf(-2.0 * i as f64 / dim as f64);
                let (a, b) = (f64::from(x[head * dim + i]), f64::from(x[head * dim + half + i]));
                let want = [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()];
                for (got, want) in [plain[head * dim + i], plain[head * dim + half + i]].iter().zip(want) {
                    prop_assert!((got.to_f64() - want).abs() <= want.abs() / 256.0 + 4e-3, "{got} for {want}");
                }
            }
        }
    }

    #[test]
    fn top_k(experts in 1_usize..130, k in 1_usize..9, seed: u64, levels in 1_u32..40) {
        let k = k.min(experts);
        // Few levels, so that there are ties.
        let logits: Vec<f32> = random_f32(seed, experts, 4.0)
            .iter()
            .map(|x| (x * levels as f32 / 8.0).round())
            .collect();
        let (ids, weights, probabilities) = same(|isa| {
            let (mut ids, mut weights) = (vec![0; k], vec![0.0; k]);
            let mut probabilities = vec![0.0; experts];
            softmax_top_k(isa, &logits, Renormalise::No, &mut probabilities, &mut ids, &mut weights).unwrap();
            (ids, weights, probabilities)
        });
        let mut order: Vec<u16> = (0..experts as u16).collect();
        order.sort_by(|&a, &b| {
            let (a, b) = (usize::from(a), usize::from(b));
            probabilities[b].total_cmp(&probabilities[a]).then(a.cmp(&b))
        });
        prop_assert_eq!(&ids, &order[..k]);
        let chosen: Vec<f32> = ids.iter().map(|&id| probabilities[usize::from(id)]).collect();
        prop_assert_eq!(bits(&weights), bits(&chosen));
        let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        for (p, &x) in probabilities.iter().zip(&logits) {
            let want = f64::from(x).exp() / sum;
            prop_assert!((f64::from(*p) - want).abs() <= want * 1e-6);
        }
        let mut normed = vec![0.0; k];
        let mut probabilities = vec![0.0; experts];
        softmax_top_k(Isa::detect(), &logits, Renormalise::Yes, &mut probabilities, &mut vec![0; k], &mut normed).unwrap();
        prop_assert!((normed.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn sums(tokens in 1_usize..5, top_k in 1_usize..9, width in 1_usize..200, seed: u64) {
        let weights = random_f32(seed, tokens * top_k, 1.0);
        let y = random_f32(seed ^ 1, tokens * top_k * width, 1.0);
        let residual = random_f32(seed ^ 2, tokens * width, 1.0);
        let got = same(|isa| {
            let mut out = residual.clone();
            combine(isa, &weights, top_k, &y, &mut out).unwrap();
            bits(&out)
        });
        for t in 0..tokens {
            for c in 0..width {
                let sum = (0..top_k).fold(0.0_f32, |sum, j| {
                    weights[t * top_k + j].mul_add(y[(t * top_k + j) * width + c], sum)
                });
                prop_assert_eq!(got[t * width + c], (residual[t * width + c] + sum).to_bits());
            }
        }
        let added = same(|isa| {
            let mut out = residual.clone();
            add(isa, &y[..residual.len().min(y.len())], &mut out).unwrap();
            bits(&out)
        });
        let want: Vec<f32> = residual.iter().zip(&y).map(|(a, b)| a + b).collect();
        prop_assert_eq!(added, bits(&want));
    }

    #[test]
    fn conversions(len in 0_usize..100, seed: u64) {
        let x = random_f32(seed, len, 10.0);
        let rounded = same(|isa| {
            let mut out = vec![bf16::NAN; len];
            to_bf16(isa, &x, &mut out).unwrap();
            out
        });
        let want: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
        prop_assert_eq!(&rounded, &want);
        let wide = same(|isa| {
            let mut out = vec![f32::NAN; len];
            to_f32(isa, &rounded, &mut out).unwrap();
            bits(&out)
        });
        let want: Vec<f32> = rounded.iter().map(|x| x.to_f32()).collect();
        prop_assert_eq!(wide, bits(&want));
    }
}

#[test]
fn extreme_logits() {
    let isa = Isa::detect();
    let mut out = [0.0; 4];
    softmax(isa, &[1e30, -1e30, f32::NEG_INFINITY, 1e30], &mut out).unwrap();
    assert_eq!(out, [0.5, 0.0, 0.0, 0.5]);
    let (mut ids, mut weights) = ([9; 3], [0.0; 3]);
    let logits = [f32::NAN, f32::NAN, f32::NAN, f32::NAN];
    softmax_top_k(
        isa,
        &logits,
        Renormalise::Yes,
        &mut out,
        &mut ids,
        &mut weights,
    )
    .unwrap();
    assert_eq!(ids, [0, 1, 2]);
    assert_eq!(argmax(isa, &[1.0, 3.0, f32::NAN, 3.0]), Some(1));
    assert_eq!(argmax(isa, &[f32::NAN]), None);
    assert_eq!(argmax(isa, &[]), None);
}

#[test]
fn wrong_shapes_are_errors() {
    let isa = Isa::detect();
    let mut out = [bf16::ZERO; 4];
    assert!(rms_norm(isa, &[1.0; 4], &[1.0; 3], 1e-6, &mut out).is_err());
    assert!(rms_norm(isa, &[1.0; 4], &[], 1e-6, &mut out).is_err());
    assert!(rms_norm(isa, &[1.0; 2], &[1.0; 2], 1e-6, &mut out).is_err());
    assert!(RopeTable::new(1e4, 3, 4).is_err());
    assert!(RopeTable::new(1e4, 4, 4).unwrap().at(4).is_err());
    assert!(rope(isa, &[1.0; 4], &[1.0; 2], &[0.0; 1], &mut out).is_err());
    assert!(rope(isa, &[1.0; 4], &[], &[], &mut out).is_err());
    assert!(add(isa, &[1.0], &mut [1.0, 2.0]).is_err());
    assert!(combine(isa, &[1.0; 3], 2, &[1.0; 4], &mut [1.0; 2]).is_err());
    assert!(combine(isa, &[], 0, &[], &mut []).is_ok());
    let (mut ids, mut weights) = ([0; 3], [0.0; 3]);
    assert!(
        softmax_top_k(
            isa,
            &[1.0; 2],
            Renormalise::No,
            &mut [0.0; 2],
            &mut ids,
            &mut weights
        )
        .is_err()
    );
}
