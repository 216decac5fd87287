//! From f32 to bf16 and back.

use half::bf16;

use crate::error::{ShapeError, expect_len};
use crate::isa::{Isa, Kernel};
use crate::lanes::Lanes;

/// The nearest bf16, ties to even; a NaN stays one (made quiet), and what is too large becomes infinite.
#[inline(always)]
#[must_use]
pub fn round_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
}

/// Rounds each element as [`round_bf16`] does.
///
/// # Errors
/// The slices differ in length.
pub fn to_bf16(isa: Isa, x: &[f32], out: &mut [bf16]) -> Result<(), ShapeError> {
    expect_len("to_bf16", "out", x.len(), out.len())?;
    isa.run(Round { x, out });
    Ok(())
}

/// Widens each element, exactly.
///
/// # Errors
/// The slices differ in length.
pub fn to_f32(isa: Isa, x: &[bf16], out: &mut [f32]) -> Result<(), ShapeError> {
    expect_len("to_f32", "out", x.len(), out.len())?;
    isa.run(Widen { x, out });
    Ok(())
}

struct Round<'a> {
    x: &'a [f32],
    out: &'a mut [bf16],
}

impl Kernel for Round<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        for (out, &x) in self.out.iter_mut().zip(self.x) {
            *out = round_bf16(x);
        }
    }
}

struct Widen<'a> {
    x: &'a [bf16],
    out: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        for (out, x) in self.out.iter_mut().zip(self.x) {
            *out = f32::from_bits(u32::from(x.to_bits()) << 16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_half_on_every_upper_half_and_many_lower_halves() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff_u32] {
                let x = f32::from_bits((u32::from(high) << 16) | low);
                assert_eq!(
                    round_bf16(x).to_bits(),
                    bf16::from_f32(x).to_bits(),
                    "{x:e} {:#x}",
                    x.to_bits()
                );
            }
        }
    }
}
