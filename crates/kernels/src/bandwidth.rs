//! How fast this machine reads memory: what decode is measured against.

use std::hint::black_box;

use crate::isa::{Isa, Kernel};
use crate::lanes::{LANES, Lanes};
use crate::storage::{AlignedBuf, LINE};

/// Memory to read through, larger than the caches.
#[derive(Debug)]
pub struct ReadTest {
    data: AlignedBuf,
}

impl ReadTest {
    /// `bytes` of memory, all written.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let mut data = AlignedBuf::zeroed(bytes.div_ceil(64) * LINE);
        data.fill(half::bf16::ONE);
        Self { data }
    }

    /// Bytes that one pass reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.len() * 2
    }

    /// Reads everything once, on one core, with plain vector loads. The caller holds the clock.
    pub fn pass(&self, isa: Isa) {
        black_box(isa.run(Read { data: &self.data }));
    }
}

struct Read<'a> {
    data: &'a AlignedBuf,
}

impl Kernel for Read<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> f32 {
        let lines = self.data.lines();
        let start = lines.as_ptr().cast::<f32>();
        let mut folded = [0.0; LANES];
        // SAFETY: the processor has `L` (the caller's promise); each load reads one of `lines.len()` lines of 64 bytes.
        unsafe {
            let one = L::splat(1.0);
            let mut acc = [L::zero(); 4];
            for i in 0..lines.len() / 4 {
                for (j, acc) in acc.iter_mut().enumerate() {
                    *acc = L::fma(L::load(start.add((4 * i + j) * LANES)), one, *acc);
                }
            }
            for acc in acc {
                L::store(folded.as_mut_ptr(), acc);
                black_box(&folded);
            }
        }
        folded.iter().sum()
    }
}
