//! SiLU gating.

use half::bf16;

use crate::error::{ShapeError, expect_len};
use crate::exp::exp;
use crate::isa::{Isa, Kernel};
use crate::lanes::{LANES, Lanes};
use crate::round::round_bf16;

/// `out = silu(gate) * up`, rounded to bf16, where `silu(x) = x / (1 + e^-x)`.
///
/// # Errors
/// The slices differ in length.
pub fn silu_mul(isa: Isa, gate: &[f32], up: &[f32], out: &mut [bf16]) -> Result<(), ShapeError> {
    expect_len("silu_mul", "up", gate.len(), up.len())?;
    expect_len("silu_mul", "out", gate.len(), out.len())?;
    isa.run(Separate { gate, up, out });
    Ok(())
}

#[inline(always)]
fn silu_mul_one(gate: f32, up: f32) -> bf16 {
    round_bf16(gate / (1.0 + exp(-gate)) * up)
}

struct Separate<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [bf16],
}

impl Kernel for Separate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        for ((out, &gate), &up) in self.out.iter_mut().zip(self.gate).zip(self.up) {
            *out = silu_mul_one(gate, up);
        }
    }
}

/// The same for panels in turn, sixteen of gate and sixteen of up; what is beyond `out` is dropped.
pub(crate) fn silu_mul_line(isa: Isa, panels: &[f32], out: &mut [bf16]) {
    isa.run(Interleaved { panels, out });
}

struct Interleaved<'a> {
    panels: &'a [f32],
    out: &'a mut [bf16],
}

impl Kernel for Interleaved<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        for (panels, out) in self
            .panels
            .chunks_exact(2 * LANES)
            .zip(self.out.chunks_mut(LANES))
        {
            let mut line = [bf16::ZERO; LANES];
            for (i, value) in line.iter_mut().enumerate() {
                *value = silu_mul_one(panels[i], panels[LANES + i]);
            }
            out.copy_from_slice(&line[..out.len()]);
        }
    }
}
