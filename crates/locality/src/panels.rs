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
        self.multiply_rows(row, out);
    }

    /// `out[r,k] = column_k . row_r`: the same bits for a row, whatever rows come with it.
    pub(crate) fn multiply_rows(&self, rows: &[f32], out: &mut [f32]) {
        if self.rows == 0 || self.columns == 0 {
            out.fill(0.0);
            return;
        }
        simd::dispatch(|| {
            for (p, panel) in self.data.chunks_exact(self.rows * WIDTH).enumerate() {
                let columns = p * WIDTH..((p + 1) * WIDTH).min(self.columns);
                for (row, out) in rows
                    .chunks_exact(self.rows)
                    .zip(out.chunks_exact_mut(self.columns))
                {
                    let sums = panel_sums(panel, row);
                    out[columns.clone()].copy_from_slice(&sums[..columns.len()]);
                }
            }
        });
    }
}

/// Sixteen dot products at once, in four interleaved partial sums each.
#[inline(always)]
fn panel_sums(panel: &[f32], row: &[f32]) -> [f32; WIDTH] {
    let mut sums = [[0.0f32; WIDTH]; 4];
    let (quads, rest) = row.as_chunks::<4>();
    let (panel_quads, panel_rest) = panel.split_at(quads.len() * 4 * WIDTH);
    for (quad, lines) in quads.iter().zip(panel_quads.as_chunks::<{ 4 * WIDTH }>().0) {
        let lines = lines.as_chunks::<WIDTH>().0;
        for part in 0..4 {
            for lane in 0..WIDTH {
                sums[part][lane] += quad[part] * lines[part][lane];
            }
        }
    }
    for (&value, line) in rest.iter().zip(panel_rest.as_chunks::<WIDTH>().0) {
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
