//! Buffers that begin on a cache line.

use half::bf16;

/// A cache line of bf16: the pairs of one k-pair for sixteen outputs.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [bf16; 32]);

pub(crate) const LINE: usize = 32;

/// bf16 values that begin on a cache line, all written (never a lazily zero page).
#[derive(Clone)]
pub struct AlignedBuf {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedBuf {
    /// `len` zeros, each really written.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        // A pattern first, hidden from the optimiser: memory that was only ever zeroed may be one shared page of the
        // kernel's, which costs no traffic to read and would make measurements lie.
        let mut lines = vec![Line([bf16::ONE; LINE]); len.div_ceil(LINE)];
        std::hint::black_box(&mut lines);
        lines.fill(Line([bf16::ZERO; LINE]));
        Self { lines, len }
    }

    /// The values.
    #[must_use]
    pub fn as_slice(&self) -> &[bf16] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }

    /// The values, to write.
    pub fn as_mut_slice(&mut self) -> &mut [bf16] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }

    pub(crate) fn lines(&self) -> &[Line] {
        &self.lines
    }
}

impl std::ops::Deref for AlignedBuf {
    type Target = [bf16];

    fn deref(&self) -> &[bf16] {
        self.as_slice()
    }
}

impl std::ops::DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [bf16] {
        self.as_mut_slice()
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBuf({} elements)", self.len)
    }
}
