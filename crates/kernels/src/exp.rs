//! The exponential, the same polynomial on every instruction set.

/// `e^x` within 1.1 units in the last place for `-87.33 <= x <= 88.37`.
///
/// Below that range it is 0, above +infinity (the true function leaves f32 at 88.72). NaN stays NaN.
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, a polynomial of degree 7 in `r` (the coefficients of Cephes' expf), and the
/// exponent `n` added as bits. Every step is one IEEE operation, so the compiler may vectorise it and the bits stay.
#[inline(always)]
#[must_use]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let mut p = 1.987_569_1e-4;
    p = r.mul_add(p, 1.398_199_9e-3);
    p = r.mul_add(p, 8.333_452e-3);
    p = r.mul_add(p, 4.166_579_6e-2);
    p = r.mul_add(p, 0.166_666_65);
    p = r.mul_add(p, 0.5);
    let y = (r * r).mul_add(p, r) + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    let y = y * scale;
    let y = if x < -87.33 { 0.0 } else { y };
    if x > 88.37 { f32::INFINITY } else { y }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_within_the_stated_error() {
        let mut worst = 0.0_f64;
        let mut bits = (1e-9_f32).to_bits();
        while f32::from_bits(bits) <= 88.37 {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                if x >= -87.33 {
                    let (got, want) = (exp(x), f64::from(x).exp());
                    let ulp = f64::from(f32::from_bits((want as f32).to_bits() + 1))
                        - f64::from(want as f32);
                    worst = worst.max((f64::from(got) - want).abs() / ulp);
                }
            }
            bits += 97;
        }
        assert!(worst < 1.1, "{worst} ulp");
    }

    #[test]
    fn edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(1e30), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }
}
