//! Rotary positions, and the norm of query and key heads that goes before them.

use half::bf16;

use crate::error::{ShapeError, expect_len};
use crate::isa::{Isa, Kernel};
use crate::lanes::{LANES, Lanes};
use crate::norm::{check_rows, inverse_rms};
use crate::round::round_bf16;

/// Cosines and sines for every position, Hugging Face's convention: the angle of dimension `i` and of `i + head_dim / 2` is
/// `position * theta^(-2 i / head_dim)`.
#[derive(Debug, Clone)]
pub struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Tables for positions below `positions`.
    ///
    /// # Errors
    /// `head_dim` is 0 or odd.
    pub fn new(theta: f64, head_dim: usize, positions: usize) -> Result<Self, ShapeError> {
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(ShapeError::Unsupported {
                operation: "rope",
                what: "head_dim",
                rule: "even and not 0",
                got: head_dim,
            });
        }
        let half = head_dim / 2;
        let frequencies: Vec<f32> = (0..half)
            .map(|i| (1.0 / theta.powf((2 * i) as f64 / head_dim as f64)) as f32)
            .collect();
        let angles =
            (0..positions).flat_map(|p| frequencies.iter().map(move |f| f64::from(p as f32 * f)));
        let (cos, sin) = angles.map(|a| (a.cos() as f32, a.sin() as f32)).unzip();
        Ok(Self { half, cos, sin })
    }

    /// Positions that the table covers.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.cos.len() / self.half
    }

    /// Cosines and sines of one position, `head_dim / 2` each.
    ///
    /// # Errors
    /// `position` is beyond the table.
    #[inline]
    pub fn at(&self, position: usize) -> Result<(&[f32], &[f32]), ShapeError> {
        if position >= self.positions() {
            return Err(ShapeError::Index {
                operation: "rope",
                what: "position",
                index: position,
                limit: self.positions(),
            });
        }
        let range = position * self.half..(position + 1) * self.half;
        Ok((&self.cos[range.clone()], &self.sin[range]))
    }
}

/// Rotates each head of `x`, `[heads, 2 * cos.len()]`, to a position and rounds to bf16: what attention reads.
///
/// `out[i] = x[i] cos[i] - x[i + half] sin[i]`, `out[i + half] = x[i + half] cos[i] + x[i] sin[i]`.
///
/// # Errors
/// `cos` and `sin` differ in length, `x` is not a whole number of heads, or `out` differs from it in length.
pub fn rope(
    isa: Isa,
    x: &[f32],
    cos: &[f32],
    sin: &[f32],
    out: &mut [bf16],
) -> Result<(), ShapeError> {
    expect_len("rope", "sin", cos.len(), sin.len())?;
    check_rows("rope", x.len(), 2 * cos.len(), out.len())?;
    isa.run(Rope {
        x,
        norm: None,
        cos,
        sin,
        out,
    });
    Ok(())
}

/// Norms each head of `x` with `weight` (as [`rms_norm_f32`](crate::rms_norm_f32)), then rotates it as [`rope`] does.
///
/// # Errors
/// `weight` is not `2 * cos.len()` long, or as for [`rope`].
pub fn head_norm_rope(
    isa: Isa,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    cos: &[f32],
    sin: &[f32],
    out: &mut [bf16],
) -> Result<(), ShapeError> {
    expect_len("head_norm_rope", "sin", cos.len(), sin.len())?;
    expect_len("head_norm_rope", "weight", 2 * cos.len(), weight.len())?;
    check_rows("head_norm_rope", x.len(), 2 * cos.len(), out.len())?;
    isa.run(Rope {
        x,
        norm: Some((weight, eps)),
        cos,
        sin,
        out,
    });
    Ok(())
}

struct Rope<'a> {
    x: &'a [f32],
    norm: Option<(&'a [f32], f32)>,
    cos: &'a [f32],
    sin: &'a [f32],
    out: &'a mut [bf16],
}

impl Kernel for Rope<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let half = self.cos.len();
        let heads = self.x.chunks_exact(2 * half);
        for (x, out) in heads.zip(self.out.chunks_exact_mut(2 * half)) {
            let (x1, x2) = x.split_at(half);
            let (out1, out2) = out.split_at_mut(half);
            let norm = self.norm.map(|(weight, eps)| {
                let (w1, w2) = weight.split_at(half);
                // SAFETY: the caller's promise.
                (unsafe { inverse_rms::<L>(x, eps) }, w1, w2)
            });
            for start in (0..half).step_by(LANES) {
                let len = LANES.min(half - start);
                // Whole lanes in arrays of their own, what is missing zero: so the loop becomes vectors.
                let part = |from: &[f32]| {
                    let mut part = [0.0; LANES];
                    match from.get(start..start + LANES) {
                        Some(whole) => part.copy_from_slice(whole),
                        None => part[..len].copy_from_slice(&from[start..]),
                    }
                    part
                };
                let (mut a, mut b) = (part(x1), part(x2));
                if let Some((scale, w1, w2)) = norm {
                    let (w1, w2) = (part(w1), part(w2));
                    for i in 0..LANES {
                        a[i] = a[i] * scale * w1[i];
                        b[i] = b[i] * scale * w2[i];
                    }
                }
                let (cos, sin) = (part(self.cos), part(self.sin));
                let mut rotated = [[bf16::ZERO; LANES]; 2];
                for i in 0..LANES {
                    rotated[0][i] = round_bf16(a[i] * cos[i] - b[i] * sin[i]);
                }
                for i in 0..LANES {
                    rotated[1][i] = round_bf16(b[i] * cos[i] + a[i] * sin[i]);
                }
                for (out, rotated) in [&mut *out1, &mut *out2].into_iter().zip(&rotated) {
                    match out.get_mut(start..start + LANES) {
                        Some(whole) => whole.copy_from_slice(rotated),
                        None => out[start..].copy_from_slice(&rotated[..len]),
                    }
                }
            }
        }
    }
}
