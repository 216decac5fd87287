//! Sums and maxima over a slice in one order for every instruction set: element `i` goes to lane `i mod 16`, and lanes are
//! folded in halves.

use crate::lanes::{LANES, Lanes};

/// Folds `f(acc, x)` over the slice in sixteen lanes.
#[inline(always)]
fn lanes(x: &[f32], init: f32, f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
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

/// The sum.
///
/// # Safety
/// The processor has the instructions of `L`; so for all functions here.
#[inline(always)]
pub(crate) unsafe fn sum<L: Lanes>(x: &[f32]) -> f32 {
    let sums = lanes(x, 0.0, |a, x| a + x);
    // SAFETY: the caller's promise; `sums` is sixteen lanes.
    unsafe { L::sum(L::load(sums.as_ptr())) }
}

/// The sum of squares.
///
/// # Safety
/// As for [`sum`].
#[inline(always)]
pub(crate) unsafe fn sum_of_squares<L: Lanes>(x: &[f32]) -> f32 {
    let sums = lanes(x, 0.0, |a, x| x.mul_add(x, a));
    // SAFETY: the caller's promise; `sums` is sixteen lanes.
    unsafe { L::sum(L::load(sums.as_ptr())) }
}

/// The largest element, NaN left out; -infinity where there is none.
///
/// # Safety
/// As for [`sum`].
#[inline(always)]
pub(crate) unsafe fn max<L: Lanes>(x: &[f32]) -> f32 {
    let largest = lanes(x, f32::NEG_INFINITY, |a, x| if x > a { x } else { a });
    // SAFETY: the caller's promise; `largest` is sixteen lanes.
    unsafe { L::max(L::load(largest.as_ptr())) }
}
