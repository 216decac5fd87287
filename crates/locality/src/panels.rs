//! Columns side by side, in panels of sixteen: the layout that one row times all columns wants.

use pulp::{Simd, WithSimd};

use crate::simd;

/// Columns per panel: one cache line of `f32`.
pub(crate) const WIDTH: usize = 16;

/// One row of a panel. Aligned to the cache line, so that no vector is read from two of them: that alone halves the time
/// of a product.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(align(64))]
struct Line([f32; WIDTH]);

/// A matrix of `columns` vectors of `rows` cells, stored as panels of sixteen columns, each
/// `rows x 16`, the last one filled up with zeros.
///
/// A product reads each panel once, front to back, and every column has its own lane: so the order
/// of additions, and with it every bit, is the same at any vector width.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Panels {
    rows: usize,
    columns: usize,
    data: Vec<Line>,
}

impl Panels {
    /// Packs `columns`, each of `rows` cells, one after another.
    pub(crate) fn pack(rows: usize, columns: &[f32]) -> Self {
        let count = columns.len().checked_div(rows).unwrap_or(0);
        let mut data = vec![Line([0.0; WIDTH]); count.div_ceil(WIDTH) * rows];
        for (k, column) in columns.chunks_exact(rows.max(1)).enumerate() {
            let panel = &mut data[k / WIDTH * rows..][..rows];
            for (line, &value) in panel.iter_mut().zip(column) {
                line.0[k % WIDTH] = value;
            }
        }
        Self {
            rows,
            columns: count,
            data,
        }
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// One column, unpacked.
    pub(crate) fn column(&self, k: usize) -> Vec<f32> {
        assert!(k < self.columns, "expected a column below {}", self.columns);
        let panel = &self.data[k / WIDTH * self.rows..][..self.rows];
        panel.iter().map(|line| line.0[k % WIDTH]).collect()
    }

    /// `out[k] = column_k . row`.
    pub(crate) fn multiply(&self, row: &[f32], out: &mut [f32]) {
        assert_eq!(row.len(), self.rows, "a row of another length");
        assert_eq!(out.len(), self.columns, "an output of another length");
        if self.rows == 0 {
            out.fill(0.0);
            return;
        }
        let panels = self.data.chunks_exact(self.rows);
        for (panel, out) in panels.zip(out.chunks_mut(WIDTH)) {
            let sums = simd::run(PanelSums { panel, row });
            out.copy_from_slice(&sums[..out.len()]);
        }
    }

    /// `out[r,k] = column_k . row_r` for many rows, four at a time, so that a panel is read once
    /// for four. The order of additions is not [`multiply`](Self::multiply)'s.
    pub(crate) fn multiply_rows(&self, rows: &[f32], out: &mut [f32]) {
        if self.rows == 0 || self.columns == 0 {
            out.fill(0.0);
            return;
        }
        let count = rows.len() / self.rows;
        let row = |r: usize| &rows[r * self.rows..(r + 1) * self.rows];
        simd::dispatch(
            #[inline(always)]
            || {
                for (p, panel) in self.data.chunks_exact(self.rows).enumerate() {
                    let first = p * WIDTH;
                    let width = WIDTH.min(self.columns - first);
                    for start in (0..count).step_by(4) {
                        // At the end the last row is taken again instead of a missing one.
                        let at = |offset: usize| (start + offset).min(count - 1);
                        let sums =
                            block_sums(panel, [row(at(0)), row(at(1)), row(at(2)), row(at(3))]);
                        for (offset, sums) in sums.iter().enumerate() {
                            let out = &mut out[at(offset) * self.columns + first..][..width];
                            out.copy_from_slice(&sums[..width]);
                        }
                    }
                }
            },
        );
    }
}

/// Sixteen dot products of each of four rows, each in one running sum.
#[inline(always)]
fn block_sums(lines: &[Line], rows: [&[f32]; 4]) -> [[f32; WIDTH]; 4] {
    // One length for all, so that nothing is checked inside.
    let rows = rows.map(|row| &row[..lines.len()]);
    let mut sums = [[0.0f32; WIDTH]; 4];
    for (at, line) in lines.iter().enumerate() {
        for (sums, row) in sums.iter_mut().zip(rows) {
            for (sum, value) in sums.iter_mut().zip(line.0) {
                *sum += row[at] * value;
            }
        }
    }
    sums
}

/// Sixteen dot products at once, each in four interleaved sums, so that no addition waits for the one before it.
struct PanelSums<'a> {
    panel: &'a [Line],
    row: &'a [f32],
}

impl WithSimd for PanelSums<'_> {
    type Output = [f32; WIDTH];

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> [f32; WIDTH] {
        match S::F32_LANES {
            16 => self.sums::<S, 1>(simd),
            8 => self.sums::<S, 2>(simd),
            4 => self.sums::<S, 4>(simd),
            _ => self.sums::<S, WIDTH>(simd),
        }
    }
}

impl PanelSums<'_> {
    /// `VECTORS` is how many vectors of `S` make a line.
    #[inline(always)]
    fn sums<S: Simd, const VECTORS: usize>(self, simd: S) -> [f32; WIDTH] {
        let (blocks, lines_left) = self.panel.as_chunks::<4>();
        let (fours, values_left) = self.row.as_chunks::<4>();
        let mut sums = [[simd.splat_f32s(0.0); VECTORS]; 4];
        let add = |sums: &mut [S::f32s; VECTORS], line: &Line, value: f32| {
            let value = simd.splat_f32s(value);
            for (sum, &vector) in sums.iter_mut().zip(S::as_simd_f32s(&line.0).0) {
                *sum = simd.add_f32s(*sum, simd.mul_f32s(value, vector));
            }
        };
        for (lines, values) in blocks.iter().zip(fours) {
            for (sums, (line, &value)) in sums.iter_mut().zip(lines.iter().zip(values)) {
                add(sums, line, value);
            }
        }
        for (sums, (line, &value)) in sums.iter_mut().zip(lines_left.iter().zip(values_left)) {
            add(sums, line, value);
        }
        let [a, b, c, d] = sums;
        let mut total = [0.0; WIDTH];
        for (v, total) in S::as_mut_simd_f32s(&mut total).0.iter_mut().enumerate() {
            *total = simd.add_f32s(simd.add_f32s(a[v], b[v]), simd.add_f32s(c[v], d[v]));
        }
        total
    }
}
