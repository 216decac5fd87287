//! Weights in the order in which the kernels read them.

use half::bf16;

use crate::error::{ShapeError, expect_len};
use crate::lanes::LANES;
use crate::storage::{AlignedBuf, LINE, Line};

/// A weight matrix `[n, k]` in panels of sixteen outputs.
///
/// A panel holds, for each pair of k, the two weights of each of its sixteen outputs side by side: 64 bytes, one cache line,
/// one vector. Sixteen outputs are sixteen lanes, so no sum over lanes is ever needed, and an output's sum runs over k in
/// one order whatever the number of rows. `n` is padded to a multiple of 16 and `k` to an even number, with zeros that
/// change no bit of a result: `acc + 0 * x` is `acc` for every finite `x`, and an accumulator begins at +0.
/// (Only an accumulator of -0 would turn into +0, and one arises only where a product underflows to nothing. An infinity or
/// NaN in `x` is multiplied only by the `k` weights that exist: the kernels fill the padding of `x` with zeros themselves.)
#[derive(Debug, Clone)]
pub struct PackedMatrix {
    n: usize,
    k: usize,
    pairs: usize,
    /// Whether a weight [`is_tiny`].
    tiny: bool,
    data: AlignedBuf,
}

impl PackedMatrix {
    /// Packs `weights`, `[n, k]` row-major as in a checkpoint.
    ///
    /// # Errors
    /// `weights` is not `n * k` long.
    pub fn pack(weights: &[bf16], n: usize, k: usize) -> Result<Self, ShapeError> {
        Self::pack_padded(weights, n, k, n, k)
    }

    /// Packs `weights`, `[n, k]`, as the upper left part of an `[n_to, k_to]` matrix whose rest is zero.
    ///
    /// The zeros are really written: reading them costs what reading weights costs.
    ///
    /// # Errors
    /// `weights` is not `n * k` long, or `n_to < n`, or `k_to < k`.
    pub fn pack_padded(
        weights: &[bf16],
        n: usize,
        k: usize,
        n_to: usize,
        k_to: usize,
    ) -> Result<Self, ShapeError> {
        check_padding("pack", n, k, n_to, k_to)?;
        expect_len("pack", "weights", n * k, weights.len())?;
        let mut packed = Self::zeros(n_to, k_to);
        for (output, row) in rows(weights, k).enumerate().take(n) {
            packed.put(output / LANES, output % LANES, row);
        }
        Ok(packed)
    }

    fn zeros(n: usize, k: usize) -> Self {
        let pairs = k.div_ceil(2);
        Self {
            n,
            k,
            pairs,
            tiny: false,
            data: AlignedBuf::zeroed(n.div_ceil(LANES) * pairs * LINE),
        }
    }

    fn put(&mut self, panel: usize, lane: usize, row: &[bf16]) {
        let start = panel * self.pairs * LINE;
        self.tiny |= any_tiny(row);
        for (i, &weight) in row.iter().enumerate() {
            self.data[start + i / 2 * LINE + lane * 2 + i % 2] = weight;
        }
    }

    /// Outputs.
    #[must_use]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes that one pass over the matrix reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        std::mem::size_of_val(self.data.lines())
    }

    /// Back to `[n, k]` row-major.
    #[must_use]
    pub fn unpack(&self) -> Vec<bf16> {
        let mut weights = Vec::with_capacity(self.n * self.k);
        for output in 0..self.n {
            let start = output / LANES * self.pairs * LINE + output % LANES * 2;
            weights.extend((0..self.k).map(|i| self.data[start + i / 2 * LINE + i % 2]));
        }
        weights
    }

    /// One row of `[n, k]` (an embedding tied to the output matrix), as f32.
    ///
    /// # Errors
    /// `output` is not below `n`, or `out` is not `k` long.
    pub fn row(&self, output: usize, out: &mut [f32]) -> Result<(), ShapeError> {
        if output >= self.n {
            return Err(ShapeError::Index {
                operation: "packed row",
                what: "output",
                index: output,
                limit: self.n,
            });
        }
        expect_len("packed row", "out", self.k, out.len())?;
        let start = output / LANES * self.pairs * LINE + output % LANES * 2;
        for (i, value) in out.iter_mut().enumerate() {
            *value = self.data[start + i / 2 * LINE + i % 2].to_f32();
        }
        Ok(())
    }

    pub(crate) fn pairs(&self) -> usize {
        self.pairs
    }

    pub(crate) fn tiny(&self) -> bool {
        self.tiny
    }

    pub(crate) fn panels(&self) -> usize {
        self.n.div_ceil(LANES)
    }

    /// The lines of one panel, one for each pair of k.
    pub(crate) fn panel(&self, panel: usize) -> &[Line] {
        &self.data.lines()[panel * self.pairs..][..self.pairs]
    }
}

/// The gate and up matrices of a gated MLP, interleaved panel by panel, so that one pass gives both halves of
/// `silu(gate) * up`.
#[derive(Debug, Clone)]
pub struct PackedGateUp {
    pub(crate) both: PackedMatrix,
    intermediate: usize,
}

impl PackedGateUp {
    /// Packs `gate` and `up`, each `[intermediate, k]` row-major.
    ///
    /// # Errors
    /// A matrix is not `intermediate * k` long.
    pub fn pack(
        gate: &[bf16],
        up: &[bf16],
        intermediate: usize,
        k: usize,
    ) -> Result<Self, ShapeError> {
        Self::pack_padded(gate, up, intermediate, k, intermediate)
    }

    /// Packs `gate` and `up`, each `[intermediate, k]`, with zero outputs up to `intermediate_to`. A padded output is
    /// `silu(0) * 0 = 0`.
    ///
    /// # Errors
    /// A matrix is not `intermediate * k` long, or `intermediate_to < intermediate`.
    pub fn pack_padded(
        gate: &[bf16],
        up: &[bf16],
        intermediate: usize,
        k: usize,
        intermediate_to: usize,
    ) -> Result<Self, ShapeError> {
        check_padding("pack gate_up", intermediate, k, intermediate_to, k)?;
        expect_len("pack gate_up", "gate", intermediate * k, gate.len())?;
        expect_len("pack gate_up", "up", intermediate * k, up.len())?;
        let panels = intermediate_to.div_ceil(LANES);
        let mut both = PackedMatrix::zeros(2 * panels * LANES, k);
        for (half, weights) in [gate, up].into_iter().enumerate() {
            for (output, row) in rows(weights, k).enumerate().take(intermediate) {
                both.put(output / LANES * 2 + half, output % LANES, row);
            }
        }
        Ok(Self {
            both,
            intermediate: intermediate_to,
        })
    }

    /// Outputs of the activation, which are the inputs of the down projection.
    #[must_use]
    pub fn intermediate(&self) -> usize {
        self.intermediate
    }

    /// Inputs.
    #[must_use]
    pub fn k(&self) -> usize {
        self.both.k
    }

    /// Bytes that one pass over both matrices reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.both.bytes()
    }
}

/// Whether a value is not zero and below 2^-55.
///
/// Where none is, no sum of products can be denormal: a bf16 has eight bits, so a value is a multiple of 2^-62, a product a
/// multiple of 2^-124, and so is every sum, rounded or not; the smallest normal f32 is 2^-126.
pub(crate) fn any_tiny(values: &[bf16]) -> bool {
    const BOUND: u16 = (127 - 55) << 7;
    // No early exit: the loop is a few vector instructions.
    values.iter().fold(false, |any, value| {
        // Zero wraps around to the largest.
        any | ((value.to_bits() & 0x7fff).wrapping_sub(1) < BOUND - 1)
    })
}

fn rows(weights: &[bf16], k: usize) -> std::slice::Chunks<'_, bf16> {
    weights.chunks(k.max(1))
}

fn check_padding(
    operation: &'static str,
    n: usize,
    k: usize,
    n_to: usize,
    k_to: usize,
) -> Result<(), ShapeError> {
    for (what, to, from) in [("padded n", n_to, n), ("padded k", k_to, k)] {
        if to < from {
            return Err(ShapeError::Unsupported {
                operation,
                what,
                rule: "at least the unpadded size",
                got: to,
            });
        }
    }
    Ok(())
}
