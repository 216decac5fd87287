//! Sixteen f32 values that move together, on each instruction set.
//!
//! Every operation is one IEEE operation a lane (fused multiply-add, product, conversion), so that all
//! implementations agree bit for bit.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use half::bf16;

/// Lanes of one vector, and outputs of one panel.
pub(crate) const LANES: usize = 16;

/// Sixteen f32 lanes.
///
/// # Safety
/// All methods must be called on a processor that has the implementation's instructions; `Isa::run` sees to it.
pub(crate) trait Lanes: Copy {
    /// The sixteen values.
    type F: Copy;

    /// Panels whose sums fit into the registers beside one row; a power of two, as are the next two.
    const PANELS_OF_ONE_ROW: usize;
    /// The same for two or three rows.
    const PANELS_OF_FEW_ROWS: usize;
    /// The same for four to six rows.
    const PANELS_OF_MANY_ROWS: usize;
    /// Whether [`Lanes::dot`] is one instruction, and so worth giving it pairs of bf16 instead of widened rows.
    const DOT: bool = false;

    /// All lanes +0.
    unsafe fn zero() -> Self::F;
    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self::F;
    /// Sixteen f32 from any address; all must be readable.
    unsafe fn load(from: *const f32) -> Self::F;
    /// Sixteen f32 to any address; all must be writable.
    unsafe fn store(to: *mut f32, value: Self::F);
    /// The first of each of sixteen pairs of bf16; 64 bytes must be readable.
    unsafe fn even(from: *const bf16) -> Self::F;
    /// The second of each of sixteen pairs of bf16; 64 bytes must be readable.
    unsafe fn odd(from: *const bf16) -> Self::F;
    /// Sixteen consecutive bf16; 32 bytes must be readable.
    unsafe fn widen(from: *const bf16) -> Self::F;
    /// The sum of the lanes, folded in halves: lanes 0 to 7 plus 8 to 15, and so on.
    unsafe fn sum(value: Self::F) -> f32;
    /// The largest lane, NaN left out where it stands second.
    unsafe fn max(value: Self::F) -> f32;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;

    /// `sums` plus, for each of sixteen pairs of weights, the second and then the first product with the pair `x`; 64 bytes
    /// of weights must be readable.
    ///
    /// The bits are those of two [`Lanes::fma`] unless a number on the way is denormal: one instruction may flush it.
    #[inline(always)]
    unsafe fn dot(weights: *const bf16, x: [bf16; 2], sums: Self::F) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { fma_pair::<Self>(weights, x, sums) }
    }
}

/// [`Lanes::dot`] as the two steps that define it.
#[inline(always)]
unsafe fn fma_pair<L: Lanes>(weights: *const bf16, x: [bf16; 2], sums: L::F) -> L::F {
    // SAFETY: the caller's promise, as for `Lanes::dot`.
    unsafe {
        let sums = L::fma(L::odd(weights), L::splat(x[1].to_f32()), sums);
        L::fma(L::even(weights), L::splat(x[0].to_f32()), sums)
    }
}

/// The reference.
#[derive(Clone, Copy)]
pub(crate) struct ScalarLanes;

impl Lanes for ScalarLanes {
    type F = [f32; LANES];

    const PANELS_OF_ONE_ROW: usize = 1;
    const PANELS_OF_FEW_ROWS: usize = 1;
    const PANELS_OF_MANY_ROWS: usize = 1;

    #[inline(always)]
    unsafe fn zero() -> Self::F {
        [0.0; LANES]
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        // SAFETY: the caller promises sixteen readable f32; the read may be unaligned.
        unsafe { from.cast::<Self::F>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::F) {
        // SAFETY: the caller promises sixteen writable f32; the write may be unaligned.
        unsafe { to.cast::<Self::F>().write_unaligned(value) }
    }

    #[inline(always)]
    unsafe fn even(from: *const bf16) -> Self::F {
        // SAFETY: the caller promises 64 readable bytes; the read may be unaligned.
        let pairs = unsafe { from.cast::<[[bf16; 2]; LANES]>().read_unaligned() };
        pairs.map(|pair| pair[0].to_f32())
    }

    #[inline(always)]
    unsafe fn odd(from: *const bf16) -> Self::F {
        // SAFETY: the caller promises 64 readable bytes; the read may be unaligned.
        let pairs = unsafe { from.cast::<[[bf16; 2]; LANES]>().read_unaligned() };
        pairs.map(|pair| pair[1].to_f32())
    }

    #[inline(always)]
    unsafe fn widen(from: *const bf16) -> Self::F {
        // SAFETY: the caller promises 32 readable bytes; the read may be unaligned.
        let values = unsafe { from.cast::<[bf16; LANES]>().read_unaligned() };
        values.map(bf16::to_f32)
    }

    #[inline(always)]
    unsafe fn sum(value: Self::F) -> f32 {
        fold(value, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn max(value: Self::F) -> f32 {
        fold(value, |a, b| if b > a { b } else { a })
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut sums = c;
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = a[i].mul_add(b[i], *sum);
        }
        sums
    }
}

/// Two vectors of eight.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Avx2Lanes;

// SAFETY of the blocks below: each method's caller promises AVX2 and FMA, and the memory that the trait names. All loads
// and stores are the unaligned kind.
#[cfg(target_arch = "x86_64")]
impl Lanes for Avx2Lanes {
    type F = [__m256; 2];

    const PANELS_OF_ONE_ROW: usize = 4;
    const PANELS_OF_FEW_ROWS: usize = 2;
    const PANELS_OF_MANY_ROWS: usize = 1;

    #[inline(always)]
    unsafe fn zero() -> Self::F {
        // SAFETY: see above.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        // SAFETY: see above.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::F) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(to, value[0]);
            _mm256_storeu_ps(to.add(8), value[1]);
        }
    }

    #[inline(always)]
    unsafe fn even(from: *const bf16) -> Self::F {
        // SAFETY: see above.
        unsafe {
            let from = from.cast::<__m256i>();
            [from, from.add(1)]
                .map(|half| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_loadu_si256(half))))
        }
    }

    #[inline(always)]
    unsafe fn odd(from: *const bf16) -> Self::F {
        // SAFETY: see above.
        unsafe {
            let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let from = from.cast::<__m256i>();
            [from, from.add(1)]
                .map(|half| _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(half), high)))
        }
    }

    #[inline(always)]
    unsafe fn widen(from: *const bf16) -> Self::F {
        // SAFETY: see above.
        unsafe {
            let from = from.cast::<__m128i>();
            let a = _mm256_cvtepu16_epi32(_mm_loadu_si128(from));
            let b = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(1)));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn sum(value: Self::F) -> f32 {
        // SAFETY: see above.
        unsafe { sum_of_eight(_mm256_add_ps(value[0], value[1])) }
    }

    #[inline(always)]
    unsafe fn max(value: Self::F) -> f32 {
        // SAFETY: see above.
        unsafe { max_of_eight(_mm256_max_ps(value[1], value[0])) }
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe {
            [
                _mm256_fmadd_ps(a[0], b[0], c[0]),
                _mm256_fmadd_ps(a[1], b[1], c[1]),
            ]
        }
    }
}

/// One vector of sixteen; with `BF16`, pairs of bf16 multiply and add in one instruction.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Avx512Lanes<const BF16: bool>;

// SAFETY of the blocks below: each method's caller promises AVX-512 F and BW, and the memory that the trait names. All loads
// and stores are the unaligned kind.
#[cfg(target_arch = "x86_64")]
impl<const BF16: bool> Lanes for Avx512Lanes<BF16> {
    type F = __m512;

    const PANELS_OF_ONE_ROW: usize = 8;
    const PANELS_OF_FEW_ROWS: usize = 8;
    const PANELS_OF_MANY_ROWS: usize = 4;
    const DOT: bool = BF16;

    #[inline(always)]
    unsafe fn zero() -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::F) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to, value) }
    }

    #[inline(always)]
    unsafe fn even(from: *const bf16) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_loadu_si512(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn odd(from: *const bf16) -> Self::F {
        // SAFETY: see above.
        // A masked load instead of a mask of bits: no register for the mask, and the compiler does not keep the line for `even`.
        unsafe { _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(0xaaaa_aaaa, from.cast())) }
    }

    #[inline(always)]
    unsafe fn widen(from: *const bf16) -> Self::F {
        // SAFETY: see above.
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    unsafe fn sum(value: Self::F) -> f32 {
        // SAFETY: see above; AVX-512 DQ is there too.
        unsafe {
            let high = _mm512_extractf32x8_ps::<1>(value);
            sum_of_eight(_mm256_add_ps(_mm512_castps512_ps256(value), high))
        }
    }

    #[inline(always)]
    unsafe fn max(value: Self::F) -> f32 {
        // SAFETY: see above; AVX-512 DQ is there too.
        unsafe {
            let high = _mm512_extractf32x8_ps::<1>(value);
            max_of_eight(_mm256_max_ps(high, _mm512_castps512_ps256(value)))
        }
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn dot(weights: *const bf16, x: [bf16; 2], sums: Self::F) -> Self::F {
        // SAFETY: see above; with `BF16`, AVX-512 BF16 is there too. A vector of bf16 is a vector of 512 bits.
        unsafe {
            if BF16 {
                let weights: __m512bh = std::mem::transmute(_mm512_loadu_si512(weights.cast()));
                let pair = u32::from(x[0].to_bits()) | u32::from(x[1].to_bits()) << 16;
                let x: __m512bh = std::mem::transmute(_mm512_set1_epi32(pair.cast_signed()));
                _mm512_dpbf16_ps(sums, weights, x)
            } else {
                fma_pair::<Self>(weights, x, sums)
            }
        }
    }
}

/// Folds the lanes in halves: 16, 8, 4, 2, 1.
#[inline(always)]
fn fold(mut lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Folds eight lanes in halves.
///
/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn sum_of_eight(value: __m256) -> f32 {
    // SAFETY: the caller's promise; no memory is touched.
    unsafe {
        let four = _mm_add_ps(
            _mm256_castps256_ps128(value),
            _mm256_extractf128_ps::<1>(value),
        );
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

/// Folds eight lanes in halves; `max(b, a)` is `b` where it is larger and `a` otherwise.
///
/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn max_of_eight(value: __m256) -> f32 {
    // SAFETY: the caller's promise; no memory is touched.
    unsafe {
        let four = _mm_max_ps(
            _mm256_extractf128_ps::<1>(value),
            _mm256_castps256_ps128(value),
        );
        let two = _mm_max_ps(_mm_movehl_ps(four, four), four);
        _mm_cvtss_f32(_mm_max_ss(_mm_shuffle_ps::<1>(two, two), two))
    }
}
