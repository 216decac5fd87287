//! Root mean square norm.

use half::bf16;

use crate::error::ShapeError;
use crate::isa::{Isa, Kernel};
use crate::lanes::Lanes;
use crate::reduce;
use crate::round::round_bf16;

/// `out = x / sqrt(mean(x^2) + eps) * weight` for each row, `[rows, weight.len()]`, rounded to bf16.
///
/// # Errors
/// `x` is not a whole number of rows, or `out` differs from it in length.
pub fn rms_norm(
    isa: Isa,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [bf16],
) -> Result<(), ShapeError> {
    check_rows("rms_norm", x.len(), weight.len(), out.len())?;
    isa.run(RmsNorm {
        x,
        weight,
        eps,
        out,
        convert: round_bf16,
    });
    Ok(())
}

/// As [`rms_norm`], but left in f32.
///
/// # Errors
/// `x` is not a whole number of rows, or `out` differs from it in length.
pub fn rms_norm_f32(
    isa: Isa,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    check_rows("rms_norm", x.len(), weight.len(), out.len())?;
    isa.run(RmsNorm {
        x,
        weight,
        eps,
        out,
        convert: |x| x,
    });
    Ok(())
}

pub(crate) fn check_rows(
    operation: &'static str,
    len: usize,
    width: usize,
    out: usize,
) -> Result<(), ShapeError> {
    if width == 0 || !len.is_multiple_of(width) {
        return Err(ShapeError::Unsupported {
            operation,
            what: "length of x",
            rule: "a multiple of the row's width",
            got: len,
        });
    }
    crate::error::expect_len(operation, "out", len, out)
}

/// `1 / sqrt(mean(x^2) + eps)`.
///
/// # Safety
/// The processor has the instructions of `L`.
#[inline(always)]
pub(crate) unsafe fn inverse_rms<L: Lanes>(x: &[f32], eps: f32) -> f32 {
    // SAFETY: the caller's promise.
    let squares = unsafe { reduce::sum_of_squares::<L>(x) };
    1.0 / (squares / x.len() as f32 + eps).sqrt()
}

struct RmsNorm<'a, T, C> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [T],
    convert: C,
}

impl<T, C: Fn(f32) -> T> Kernel for RmsNorm<'_, T, C> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let width = self.weight.len();
        for (x, out) in self
            .x
            .chunks_exact(width)
            .zip(self.out.chunks_exact_mut(width))
        {
            // SAFETY: the caller's promise.
            let scale = unsafe { inverse_rms::<L>(x, self.eps) };
            for ((out, &x), &w) in out.iter_mut().zip(x).zip(self.weight) {
                *out = (self.convert)(x * scale * w);
            }
        }
    }
}
