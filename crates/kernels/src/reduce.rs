//! Sums and maxima over a slice in one order for every instruction set: element `i` goes to lane `i mod 16`, and lanes are
//! folded in halves.

use crate::lanes::LANES;

/// Folds `f(acc, x)` over the slice in sixteen lanes.
#[inline(always)]
pub(crate) fn lanes(x: &[f32], init: f32, f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    let mut acc = [init; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (acc, &x) in acc.iter_mut().zip(chunk) {
            *acc = f(*acc, x);
        }
    }
    for (acc, &x) in acc.iter_mut().zip(rest) {
        *acc = f(*acc, x);
    }
    acc
}

/// Folds the lanes in halves: 16, 8, 4, 2, 1.
#[inline(always)]
pub(crate) fn fold(mut acc: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            acc[i] = f(acc[i], acc[i + width]);
        }
        width /= 2;
    }
    acc[0]
}

/// The sum.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    fold(lanes(x, 0.0, |a, x| a + x), |a, b| a + b)
}

/// The sum of squares.
#[inline(always)]
pub(crate) fn sum_of_squares(x: &[f32]) -> f32 {
    fold(lanes(x, 0.0, |a, x| x.mul_add(x, a)), |a, b| a + b)
}

/// The largest element, NaN left out; -infinity where there is none.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    fold(lanes(x, f32::NEG_INFINITY, larger), larger)
}
