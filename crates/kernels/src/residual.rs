//! Sums into the residual stream.

use crate::error::{ShapeError, expect_len};
use crate::isa::{Isa, Kernel};
use crate::lanes::Lanes;

/// `out += x`.
///
/// # Errors
/// The slices differ in length.
pub fn add(isa: Isa, x: &[f32], out: &mut [f32]) -> Result<(), ShapeError> {
    expect_len("add", "out", x.len(), out.len())?;
    isa.run(Add { x, out });
    Ok(())
}

/// `out[t] += sum over j of weights[t, j] * y[t, j]` for each token `t`: the experts' outputs, `[tokens, top_k, width]`, unreduced,
/// summed in top-k order into the residual stream, `[tokens, width]`.
///
/// # Errors
/// The sizes do not fit each other: `weights` is `[tokens, top_k]`, `top_k` and `width` are not 0.
pub fn combine(
    isa: Isa,
    weights: &[f32],
    top_k: usize,
    y: &[f32],
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let tokens = weights.len().checked_div(top_k).unwrap_or(0);
    let width = out.len().checked_div(tokens).unwrap_or(0);
    expect_len("combine", "weights", tokens * top_k, weights.len())?;
    expect_len("combine", "out", tokens * width, out.len())?;
    expect_len("combine", "y", tokens * top_k * width, y.len())?;
    if !out.is_empty() {
        isa.run(Combine {
            weights,
            top_k,
            width,
            y,
            out,
        });
    }
    Ok(())
}

struct Add<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        for (out, &x) in self.out.iter_mut().zip(self.x) {
            *out += x;
        }
    }
}

struct Combine<'a> {
    weights: &'a [f32],
    top_k: usize,
    width: usize,
    y: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Combine<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let tokens = self.out.chunks_exact_mut(self.width);
        let weights = self.weights.chunks_exact(self.top_k);
        let y = self.y.chunks_exact(self.top_k * self.width);
        for ((out, weights), y) in tokens.zip(weights).zip(y) {
            const STEP: usize = 64;
            for (c, out) in out.chunks_mut(STEP).enumerate() {
                let mut sum = [0.0_f32; STEP];
                for (y, &weight) in y.chunks_exact(self.width).zip(weights) {
                    for (sum, &y) in sum.iter_mut().zip(&y[c * STEP..][..out.len()]) {
                        *sum = weight.mul_add(y, *sum);
                    }
                }
                for (out, &sum) in out.iter_mut().zip(&sum) {
                    *out += sum;
                }
            }
        }
    }
}
