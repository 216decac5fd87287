//! Products: exact agreement of the instruction sets, exact row-invariance, error against f64.
#![allow(clippy::unwrap_used)]

mod common;

use common::{bits, random};
use half::bf16;
use kernels::{
    Isa, PackedGateUp, PackedMatrix, Rows, RowsMut, matmul, matmul_silu_mul, round_bf16, silu_mul,
};
use proptest::prelude::*;

fn product(isa: Isa, x: &[bf16], w: &PackedMatrix) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len() / w.k() * w.n()];
    matmul(
        isa,
        Rows::dense(x, w.k()),
        w,
        RowsMut::dense(&mut out, w.n()),
    )
    .unwrap();
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// |error| <= (k + 1) 2^-24 sum |w x|: the bound of a sum of k fused multiply-adds.
    #[test]
    fn every_set_gives_the_same_bits_within_the_error_of_k_roundings(
        m in 1_usize..20, n in 1_usize..150, k in 1_usize..90, seed: u64,
    ) {
        let x = random(seed, m * k, 2.0);
        let weights = random(seed ^ 1, n * k, 1.0);
        let w = PackedMatrix::pack(&weights, n, k).unwrap();
        let reference = product(Isa::SCALAR, &x, &w);
        for row in 0..m {
            for output in 0..n {
                let terms = (0..k).map(|i| x[row * k + i].to_f64() * weights[output * k + i].to_f64());
                let (sum, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                let error = (f64::from(reference[row * n + output]) - sum).abs();
                prop_assert!(error <= (k + 1) as f64 * 2.0_f64.powi(-24) * size, "{error} of {size}");
            }
        }
        for isa in Isa::available() {
            prop_assert_eq!(bits(&product(isa, &x, &w)), bits(&reference), "{}", isa);
        }
    }

    /// Any bit patterns: denormals, infinities, NaN, overflow.
    #[test]
    fn every_set_agrees_on_any_bits(m in 1_usize..8, n in 1_usize..40, k in 1_usize..12, seed: u64) {
        let x = common::any_bits(seed, m * k);
        let w = PackedMatrix::pack(&common::any_bits(seed ^ 1, n * k), n, k).unwrap();
        let reference = bits(&product(Isa::SCALAR, &x, &w));
        for isa in Isa::available() {
            prop_assert_eq!(bits(&product(isa, &x, &w)), reference.clone(), "{}", isa);
        }
    }

    /// Sums that shrink to nothing: products that are normal, denormal or lost altogether, where an instruction might flush.
    #[test]
    fn every_set_agrees_at_the_edge_of_the_normal_numbers(
        m in 1_usize..8, n in 1_usize..40, k in 1_usize..12, x_scale in 50_i32..70, w_scale in 50_i32..70, seed: u64,
    ) {
        let x = random(seed, m * k, (-x_scale as f32).exp2());
        let w = PackedMatrix::pack(&random(seed ^ 1, n * k, (-w_scale as f32).exp2()), n, k).unwrap();
        let reference = bits(&product(Isa::SCALAR, &x, &w));
        for isa in Isa::available() {
            prop_assert_eq!(bits(&product(isa, &x, &w)), reference.clone(), "{}", isa);
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_company(
        m in 2_usize..230, n in 1_usize..150, k in 1_usize..40, seed: u64, rows in prop::collection::vec(any::<u32>(), 1..40),
    ) {
        let x = random(seed, m * k, 1.0);
        let w = PackedMatrix::pack(&random(seed ^ 1, n * k, 1.0), n, k).unwrap();
        for isa in Isa::available() {
            let all = product(isa, &x, &w);
            let index: Vec<u32> = rows.iter().map(|row| row % m as u32).collect();
            let places: Vec<u32> = (0..index.len() as u32).rev().collect();
            let mut out = vec![f32::NAN; index.len() * n];
            matmul(isa, Rows::gather(&x, k, &index), &w, RowsMut::scatter(&mut out, n, &places)).unwrap();
            for (&row, &place) in index.iter().zip(&places) {
                let (row, place) = (row as usize, place as usize);
                prop_assert_eq!(bits(&out[place * n..][..n]), bits(&all[row * n..][..n]));
            }
            let first = product(isa, &x[..k], &w);
            prop_assert_eq!(bits(&first), bits(&all[..n]));
        }
    }

    #[test]
    fn padding_changes_no_bit(
        m in 1_usize..8, hidden in 1_usize..40, inner in 1_usize..40, times in 2_usize..4, seed: u64,
    ) {
        let x = random(seed, m * hidden, 1.0);
        let (gate, up) = (random(seed ^ 1, inner * hidden, 0.5), random(seed ^ 2, inner * hidden, 0.5));
        let down = random(seed ^ 3, hidden * inner, 0.5);
        for isa in Isa::available() {
            let expert = |to: usize| {
                let gate_up = PackedGateUp::pack_padded(&gate, &up, inner, hidden, to).unwrap();
                let down = PackedMatrix::pack_padded(&down, hidden, inner, hidden, to).unwrap();
                let mut act = vec![bf16::NAN; m * to];
                matmul_silu_mul(isa, Rows::dense(&x, hidden), &gate_up, &mut act).unwrap();
                product(isa, &act, &down)
            };
            prop_assert_eq!(bits(&expert(inner)), bits(&expert(inner * times)));
        }
    }

    #[test]
    fn the_fused_gate_equals_its_parts(m in 1_usize..30, inner in 1_usize..70, k in 1_usize..40, seed: u64) {
        let x = random(seed, m * k, 1.0);
        let (gate, up) = (random(seed ^ 1, inner * k, 1.0), random(seed ^ 2, inner * k, 1.0));
        let g = product(Isa::SCALAR, &x, &PackedMatrix::pack(&gate, inner, k).unwrap());
        let u = product(Isa::SCALAR, &x, &PackedMatrix::pack(&up, inner, k).unwrap());
        let mut want = vec![bf16::NAN; m * inner];
        silu_mul(Isa::SCALAR, &g, &u, &mut want).unwrap();
        let w = PackedGateUp::pack(&gate, &up, inner, k).unwrap();
        for isa in Isa::available() {
            let mut got = vec![bf16::NAN; m * inner];
            matmul_silu_mul(isa, Rows::dense(&x, k), &w, &mut got).unwrap();
            prop_assert_eq!(&got, &want, "{}", isa);
        }
    }

    #[test]
    fn unpacking_gives_the_checkpoint_back(n in 1_usize..70, k in 1_usize..70, seed: u64) {
        let weights = common::any_bits(seed, n * k);
        let w = PackedMatrix::pack(&weights, n, k).unwrap();
        let as_bits = |w: &[bf16]| w.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(as_bits(&w.unpack()), as_bits(&weights));
        let mut row = vec![0.0; k];
        w.row(n - 1, &mut row).unwrap();
        let want: Vec<f32> = weights[(n - 1) * k..].iter().map(|w| w.to_f32()).collect();
        prop_assert_eq!(bits(&row), bits(&want));
    }
}

#[test]
fn silu_is_exact_to_bf16_almost_everywhere() {
    let gate: Vec<f32> = (-2000..2000).map(|i| i as f32 * 0.05).collect();
    let up = vec![1.7_f32; gate.len()];
    let mut out = vec![bf16::ZERO; gate.len()];
    silu_mul(Isa::detect(), &gate, &up, &mut out).unwrap();
    for (&g, out) in gate.iter().zip(&out) {
        let want = f64::from(g) / (1.0 + (-f64::from(g)).exp()) * 1.7_f32 as f64;
        // Beyond exp's range the result is 0 where the true one is below 1e-36.
        assert!(
            (out.to_f64() - want).abs() <= want.abs() * 0.0040 + 1e-36,
            "{g}: {out} for {want}"
        );
        assert_eq!(round_bf16(out.to_f32()), *out);
    }
}

#[test]
fn wrong_shapes_are_errors() {
    let isa = Isa::detect();
    let x = random(1, 12, 1.0);
    let w = PackedMatrix::pack(&random(2, 20, 1.0), 5, 4).unwrap();
    let mut out = [0.0; 15];
    let mut try_it = |x: Rows<'_>, out_rows: usize| {
        matmul(isa, x, &w, RowsMut::dense(&mut out[..out_rows * 5], 5))
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        try_it(Rows::dense(&x, 4), 2),
        "matmul: expected 3 elements of output rows, got 2"
    );
    assert_eq!(
        try_it(Rows::gather(&x, 4, &[0, 3]), 2),
        "rows: input row 3 is out of range, expected less than 3"
    );
    assert!(PackedMatrix::pack(&x, 5, 4).is_err());
    assert!(PackedMatrix::pack_padded(&x, 3, 4, 2, 4).is_err());
    assert!(PackedGateUp::pack(&x, &x[1..], 3, 4).is_err());
}

#[test]
fn nothing_to_do_is_fine() {
    let isa = Isa::detect();
    let w = PackedMatrix::pack(&[], 0, 4).unwrap();
    matmul(isa, Rows::dense(&[], 4), &w, RowsMut::dense(&mut [], 4)).unwrap();
    let w = PackedMatrix::pack(&random(1, 8, 1.0), 2, 4).unwrap();
    matmul(isa, Rows::dense(&[], 4), &w, RowsMut::dense(&mut [], 2)).unwrap();
}
