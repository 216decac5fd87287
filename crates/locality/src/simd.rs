//! Inner loops, compiled once for every machine, once for AVX2 and once for AVX-512, chosen when they run.
//!
//! The loops keep sixteen partial sums in a fixed order and nothing is contracted, so all give the
//! same bits.

use std::sync::LazyLock;

use pulp::{Arch, WithSimd};

static ARCH: LazyLock<Arch> = LazyLock::new(Arch::new);

/// Runs `body` with the widest instructions there are. The closure must say `#[inline(always)]`: on
/// its own it would be compiled for every machine.
#[inline(always)]
pub(crate) fn dispatch<R>(body: impl FnOnce() -> R) -> R {
    struct Body<F>(F);
    impl<R, F: FnOnce() -> R> WithSimd for Body<F> {
        type Output = R;
        #[inline(always)]
        fn with_simd<S: pulp::Simd>(self, _: S) -> R {
            (self.0)()
        }
    }
    run(Body(body))
}

/// Runs `body` with the widest vectors there are.
#[inline(always)]
pub(crate) fn run<B: WithSimd>(body: B) -> B::Output {
    ARCH.dispatch(body)
}

/// `a . b` in sixteen interleaved partial sums; both of the same length.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..16 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    for ((sum, a), b) in sums.iter_mut().zip(a_rest).zip(b_rest) {
        *sum += a * b;
    }
    tree_sum(sums)
}

/// Sums sixteen lanes pairwise.
#[inline(always)]
pub(crate) fn tree_sum(mut sums: [f32; 16]) -> f32 {
    let mut half = 8;
    while half > 0 {
        for lane in 0..half {
            sums[lane] += sums[lane + half];
        }
        half /= 2;
    }
    sums[0]
}
