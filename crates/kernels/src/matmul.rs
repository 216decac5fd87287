//! Rows times packed weights.

use std::cell::RefCell;

use half::bf16;

use crate::error::{ShapeError, expect_len};
use crate::isa::{Isa, Kernel};
use crate::lanes::{LANES, Lanes};
use crate::packed::{PackedGateUp, PackedMatrix, any_tiny};
use crate::rows::{Rows, RowsMut};
use crate::silu::silu_mul_line;
use crate::tile::{self, MAX_PANELS, MAX_ROWS, Sums, TILE};

/// Rows that share one pass over the weights; as f32 they stay in the second-level cache.
const ROW_BLOCK: usize = 96;

/// `out[i] = w * x[i]` for each row, `[n, k]` times `[k]`, summed in f32.
///
/// A row's result is the same bits in any company: it does not depend on the other rows, their number, or its place
/// among them, nor on the instruction set. Weights stream from memory once for each 96 rows.
///
/// # Errors
/// `x` and `out` have different numbers of rows, or a row is too short for `w.k()` inputs or `w.n()` outputs.
/// Then some rows of `out` may already be written.
pub fn matmul(
    isa: Isa,
    x: Rows<'_>,
    w: &PackedMatrix,
    mut out: RowsMut<'_>,
) -> Result<(), ShapeError> {
    expect_len("matmul", "output rows", x.len(), out.len())?;
    let n = w.n();
    let mut sink = |rows: std::ops::Range<usize>, panel: usize, panels: usize, sums: &Sums| {
        let columns = panel * LANES..((panel + panels) * LANES).min(n);
        for (row, sums) in rows.zip(sums.chunks_exact(panels * LANES)) {
            let out = &mut out.row(row, n)?[columns.clone()];
            // Whole panels one by one: sixteen lanes are a single move, not a call.
            let (whole, rest) = out.as_chunks_mut::<LANES>();
            let (panels, _) = sums.as_chunks::<LANES>();
            for (out, sums) in whole.iter_mut().zip(panels) {
                *out = *sums;
            }
            if !rest.is_empty() {
                rest.copy_from_slice(&panels[whole.len()][..rest.len()]);
            }
        }
        Ok(())
    };
    isa.run(Product {
        x,
        w,
        sink: &mut sink,
    })
}

/// `out[i] = silu(gate * x[i]) * (up * x[i])` for each row, rounded to bf16: what a down projection reads.
///
/// `out` is `[rows, intermediate]`. Row-invariant as [`matmul`] is.
///
/// # Errors
/// `out` is not `x.len() * w.intermediate()` long, or a row of `x` is shorter than `w.k()`.
pub fn matmul_silu_mul(
    isa: Isa,
    x: Rows<'_>,
    w: &PackedGateUp,
    out: &mut [bf16],
) -> Result<(), ShapeError> {
    let width = w.intermediate();
    expect_len("matmul_silu_mul", "out", x.len() * width, out.len())?;
    // Where tiles are one panel wide, the gate's sums wait for up's.
    let mut gates = [[0.0; LANES]; ROW_BLOCK];
    let mut sink = |rows: std::ops::Range<usize>, panel: usize, panels: usize, sums: &Sums| {
        let first = panel / 2 * LANES;
        for (row, sums) in rows.zip(sums.chunks_exact(panels * LANES)) {
            let gate = &mut gates[row % ROW_BLOCK];
            let out = &mut out[row * width..][first..((panel + panels) / 2 * LANES).min(width)];
            match (panels, panel % 2) {
                (1, 0) => gate.copy_from_slice(&sums[..LANES]),
                (1, _) => {
                    let mut both = [0.0; 2 * LANES];
                    both[..LANES].copy_from_slice(gate);
                    both[LANES..].copy_from_slice(sums);
                    silu_mul_line(isa, &both, out);
                }
                _ => silu_mul_line(isa, sums, out),
            }
        }
        Ok(())
    };
    isa.run(Product {
        x,
        w: &w.both,
        sink: &mut sink,
    })
}

/// Where the sums of a tile go: rows, first panel, number of panels, sums `[rows][panels][16]`.
type Sink<'a> =
    dyn FnMut(std::ops::Range<usize>, usize, usize, &Sums) -> Result<(), ShapeError> + 'a;

struct Product<'a, 's> {
    x: Rows<'a>,
    w: &'a PackedMatrix,
    sink: &'a mut Sink<'s>,
}

thread_local! {
    /// A block of rows, widened to f32, or as pairs of bf16.
    static WIDENED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl Kernel for Product<'_, '_> {
    type Output = Result<(), ShapeError>;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> Self::Output {
        // The buffer leaves its cell while it is in use, so that no borrow can ever be found taken.
        let mut widened = WIDENED.take();
        // SAFETY: the caller's promise.
        let result = unsafe { self.blocks::<L>(&mut widened) };
        WIDENED.set(widened);
        result
    }
}

impl Product<'_, '_> {
    #[inline(always)]
    unsafe fn blocks<L: Lanes>(self, widened: &mut Vec<f32>) -> Result<(), ShapeError> {
        let Self { x, w, sink } = self;
        let k = w.k();
        let mut sums = [0.0; TILE];
        let mut first = 0;
        while first < x.len() {
            let rows = (x.len() - first).min(ROW_BLOCK);
            // One instruction for a pair would flush denormals: it is used where none can arise.
            let mut dot = L::DOT && !w.tiny();
            for i in 0..rows {
                dot = dot && !any_tiny(x.row(first + i, k)?);
            }
            let stride = if dot { w.pairs() } else { 2 * w.pairs() };
            if widened.len() < rows * stride {
                widened.resize(rows * stride, 0.0);
            }
            for i in 0..rows {
                let (from, to) = (x.row(first + i, k)?, &mut widened[i * stride..][..stride]);
                if dot {
                    pair_up(from, to);
                } else {
                    widen(from, to);
                }
            }
            // Equal tiles: 8 rows are 4 + 4, not 6 + 2.
            let tiles = rows.div_ceil(MAX_ROWS);
            let mut panel = 0;
            while panel < w.panels() {
                let panels = tile::panels_for::<L>(rows.div_ceil(tiles), w.panels() - panel);
                let mut pointers = [std::ptr::null(); MAX_PANELS];
                for (j, pointer) in pointers[..panels].iter_mut().enumerate() {
                    *pointer = w.panel(panel + j).as_ptr().cast::<bf16>();
                }
                for t in 0..tiles {
                    let (from, to) = (t * rows / tiles, (t + 1) * rows / tiles);
                    // SAFETY: the processor has `L` (the caller's promise). Rows `from..to` of `widened` are `stride`
                    // long, which is `2 * pairs`, or `pairs` with `dot`, checked by the slicing above. `panel()` gives slices of `pairs` lines. A tile has at
                    // most `ceil(rows / tiles) <= 6` rows, for which `panels` was chosen.
                    unsafe {
                        let x = widened.as_ptr().add(from * stride);
                        let panels = &pointers[..panels];
                        if dot {
                            tile::product::<L, true>(
                                x,
                                stride,
                                to - from,
                                panels,
                                w.pairs(),
                                &mut sums,
                            );
                        } else {
                            tile::product::<L, false>(
                                x,
                                stride,
                                to - from,
                                panels,
                                w.pairs(),
                                &mut sums,
                            );
                        }
                    }
                    sink(first + from..first + to, panel, panels, &sums)?;
                }
                panel += panels;
            }
            first += rows;
        }
        Ok(())
    }
}

/// A row as f32, with zeros behind it.
fn widen(row: &[bf16], to: &mut [f32]) {
    let (to, padding) = to.split_at_mut(row.len());
    for (to, from) in to.iter_mut().zip(row) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
    padding.fill(0.0);
}

/// A row as pairs of bf16, each in the place of one f32; a zero completes the last.
fn pair_up(row: &[bf16], to: &mut [f32]) {
    let (pairs, rest) = row.as_chunks::<2>();
    let rest = rest.first().map(|&last| [last, bf16::ZERO]);
    for (to, pair) in to.iter_mut().zip(pairs.iter().copied().chain(rest)) {
        let [first, second] = pair.map(|value| u32::from(value.to_bits()));
        *to = f32::from_bits(first | second << 16);
    }
}
