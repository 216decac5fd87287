//! Columns side by side, in panels of sixteen: the layout that one row times all columns wants.

use crate::simd;

/// Columns per panel: one cache line of `f32`.
pub(crate) const WIDTH: usize = 16;

/// A matrix of `columns` vectors of `rows` cells, stored as panels of sixteen columns, each
/// `rows x 16`, the last one filled up with zeros.
///
/// A product reads each panel once, front to back, and every column has its own lane: so the order
/// of additions, and with it every bit, is the same at any vector width.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Panels {
    rows: usize,
    columns: usize,
    data: Vec<f32>,
}

impl Panels {
    /// Packs `columns`, each of `rows` cells, one after another.
    pub(crate) fn pack(rows: usize, columns: &[f32]) -> Self {
        let count = columns.len().checked_div(rows).unwrap_or(0);
        let mut data = vec![0.0; count.div_ceil(WIDTH) * WIDTH * rows];
        for (k, column) in columns.chunks_exact(rows.max(1)).enumerate() {
            let panel = k / WIDTH * WIDTH * rows;
            for (row, &value) in column.iter().enumerate() {
                data[panel + row * WIDTH + k % WIDTH] = value;
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
        let panel = k / WIDTH * WIDTH * self.rows;
        (0..self.rows)
            .map(|row| self.data[panel + row * WIDTH + k % WIDTH])
            .collect()
    }

    /// `out[k] = column_k . row`.
    pub(crate) fn multiply(&self, row: &[f32], out: &mut [f32]) {
        assert_eq!(row.len(), self.rows, "a row of another length");
        assert_eq!(out.len(), self.columns, "an output of another length");
        if self.rows == 0 {
            out.fill(0.0);
            return;
        }
        let panels = self.data.chunks_exact(self.rows * WIDTH);
        for (panel, out) in panels.zip(out.chunks_mut(WIDTH)) {
            let sums = panel_sums(panel, row);
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
                for (p, panel) in self.data.chunks_exact(self.rows * WIDTH).enumerate() {
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
fn block_sums(panel: &[f32], rows: [&[f32]; 4]) -> [[f32; WIDTH]; 4] {
    let lines = panel.as_chunks::<WIDTH>().0;
    // One length for all, so that nothing is checked inside.
    let rows = rows.map(|row| &row[..lines.len()]);
    let mut sums = [[0.0f32; WIDTH]; 4];
    for (at, line) in lines.iter().enumerate() {
        for (sums, row) in sums.iter_mut().zip(rows) {
            for lane in 0..WIDTH {
                sums[lane] += row[at] * line[lane];
            }
        }
    }
    sums
}

/// Sixteen dot products at once, each in four running sums over a quarter of the row, so that no
/// addition waits for the one before it.
fn panel_sums(panel: &[f32], row: &[f32]) -> [f32; WIDTH] {
    let lines = &panel.as_chunks::<WIDTH>().0[..row.len()];
    let mut sums = [[0.0f32; WIDTH]; 4];
    // The sums come back through memory: added up in the same function, they would be kept as 64
    // scalars and nothing would be vectorised.
    simd::dispatch(
        #[inline(always)]
        || sums = quarter_sums(lines, row),
    );
    for (&value, line) in row.iter().zip(lines).skip(row.len() / 4 * 4) {
        for lane in 0..WIDTH {
            sums[0][lane] += value * line[lane];
        }
    }
    let mut total = [0.0; WIDTH];
    for lane in 0..WIDTH {
        total[lane] = (sums[0][lane] + sums[1][lane]) + (sums[2][lane] + sums[3][lane]);
    }
    total
}

#[inline(always)]
fn quarter_sums(lines: &[[f32; WIDTH]], row: &[f32]) -> [[f32; WIDTH]; 4] {
    let quarter = row.len() / 4;
    let values = [0, 1, 2, 3].map(|part| &row[part * quarter..][..quarter]);
    let lines = [0, 1, 2, 3].map(|part| &lines[part * quarter..][..quarter]);
    let mut sums = [[0.0f32; WIDTH]; 4];
    for at in 0..quarter {
        for ((sums, values), lines) in sums.iter_mut().zip(values).zip(lines) {
            for lane in 0..WIDTH {
                sums[lane] += values[at] * lines[at][lane];
            }
        }
    }
    sums
}
