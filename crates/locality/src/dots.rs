//! Dot products of record pairs, layer by layer: from these every choice of layers is a sum.

use experts::CalibrationRecord;

use crate::cells;
use crate::parallel;
use crate::simd;
use crate::transform::Transform;

/// Where a record's cells come from.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// The prompt, transformed; count x IDF takes the weights, `layers x experts`.
    Prompt(Transform, &'a [f32]),
    /// Decode counts.
    Decode,
}

impl Source<'_> {
    /// Writes one record's cells of one layer; zeros where the record has no such data.
    pub(crate) fn fill(self, record: &CalibrationRecord, layer: usize, out: &mut [f32]) {
        let experts = out.len();
        let range = layer * experts..(layer + 1) * experts;
        let copy = |values: &Option<Vec<f32>>, out: &mut [f32]| match values {
            Some(values) => out.copy_from_slice(&values[range.clone()]),
            None => out.fill(0.0),
        };
        match self {
            Self::Decode => match &record.decode {
                Some(counts) => cells::fill_row(Transform::Count, counts.row(layer), out),
                None => out.fill(0.0),
            },
            Self::Prompt(Transform::GateProbability, _) => copy(&record.gate_probabilities, out),
            Self::Prompt(Transform::GateLogit, _) => copy(&record.gate_logits, out),
            Self::Prompt(transform, weights) => {
                cells::fill_row(transform, record.prompt.counts().row(layer), out);
                if transform == Transform::CountIdf {
                    for (cell, weight) in out.iter_mut().zip(&weights[range]) {
                        *cell *= weight;
                    }
                }
            }
        }
    }
}

/// Per layer: the dot product of every pair and the squared length of every record.
pub(crate) struct PairDots {
    /// `layers x pairs`.
    dots: Vec<f32>,
    /// `layers x records`.
    squares: Vec<f32>,
    pairs: usize,
    records: usize,
}

impl PairDots {
    /// Computes them for `records`, all of `layers x experts`.
    pub(crate) fn compute(
        records: &[&CalibrationRecord],
        source: Source<'_>,
        (layers, experts): (usize, usize),
        pairs: &[[u32; 2]],
        threads: usize,
    ) -> Self {
        let mut dots = vec![0.0; layers * pairs.len()];
        let mut squares = vec![0.0; layers * records.len()];
        let tasks = dots
            .chunks_exact_mut(pairs.len().max(1))
            .zip(squares.chunks_exact_mut(records.len().max(1)))
            .enumerate()
            .collect();
        let width = experts.next_multiple_of(16);
        let matrix = || vec![0.0f32; records.len() * width];
        parallel::each(threads, tasks, matrix, |rows, (layer, (dots, squares))| {
            for (row, record) in rows.chunks_exact_mut(width).zip(records) {
                source.fill(record, layer, &mut row[..experts]);
            }
            simd::dispatch(
                #[inline(always)]
                || {
                    for (square, row) in squares.iter_mut().zip(rows.chunks_exact(width)) {
                        *square = simd::dot(row, row);
                    }
                    for (dot, &[i, j]) in dots.iter_mut().zip(pairs) {
                        let row = |i: u32| &rows[i as usize * width..(i as usize + 1) * width];
                        *dot = simd::dot(row(i), row(j));
                    }
                },
            );
        });
        Self {
            dots,
            squares,
            pairs: pairs.len(),
            records: records.len(),
        }
    }

    pub(crate) fn layers(&self) -> usize {
        self.squares.len().checked_div(self.records).unwrap_or(0)
    }

    /// One layer's dot products, one per pair.
    pub(crate) fn dots(&self, layer: usize) -> &[f32] {
        &self.dots[layer * self.pairs..(layer + 1) * self.pairs]
    }

    /// One layer's squared lengths, one per record.
    pub(crate) fn squares(&self, layer: usize) -> &[f32] {
        &self.squares[layer * self.records..(layer + 1) * self.records]
    }

    /// The sums over `layers`: dot products and squared lengths of the concatenation.
    pub(crate) fn sum(&self, layers: impl Iterator<Item = usize>) -> Sums {
        let mut sums = Sums {
            dots: vec![0.0; self.pairs],
            squares: vec![0.0; self.records],
        };
        for layer in layers {
            sums.add(self, layer);
        }
        sums
    }
}

/// Dot products and squared lengths summed over some layers.
pub(crate) struct Sums {
    /// One per pair.
    pub(crate) dots: Vec<f32>,
    /// One per record.
    pub(crate) squares: Vec<f32>,
}

impl Sums {
    pub(crate) fn add(&mut self, of: &PairDots, layer: usize) {
        for (sum, &more) in self.dots.iter_mut().zip(of.dots(layer)) {
            *sum += more;
        }
        for (sum, &more) in self.squares.iter_mut().zip(of.squares(layer)) {
            *sum += more;
        }
    }
}
