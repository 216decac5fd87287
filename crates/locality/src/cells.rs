//! From counts to the cells of a signature.

use crate::simd::tree_sum;
use crate::transform::Transform;

/// Writes the transformed counts of the layers in `mask` into `out` (`mask x experts`).
///
/// `counts` is `layers x experts`; `weights` is `mask x experts` and used by count x IDF alone.
/// Gate transforms have no cells in counts: they leave `out` zero.
#[inline(always)]
pub(crate) fn fill(
    transform: Transform,
    mask: &[u32],
    counts: &[u32],
    experts: usize,
    weights: &[f32],
    out: &mut [f32],
) {
    for (index, (&layer, out)) in mask.iter().zip(out.chunks_exact_mut(experts)).enumerate() {
        let start = layer as usize * experts;
        let counts = &counts[start..start + experts];
        match transform {
            Transform::CountIdf => {
                let weights = &weights[index * experts..(index + 1) * experts];
                for ((cell, &count), &weight) in out.iter_mut().zip(counts).zip(weights) {
                    *cell = to_f32(count) * weight;
                }
            }
            _ => fill_row(transform, counts, out),
        }
    }
}

/// One layer's transformed counts, IDF not applied.
#[inline(always)]
pub(crate) fn fill_row(transform: Transform, counts: &[u32], out: &mut [f32]) {
    match transform {
        Transform::CountIdf | Transform::Count => {
            for (cell, &count) in out.iter_mut().zip(counts) {
                *cell = to_f32(count);
            }
        }
        Transform::SqrtCount => {
            for (cell, &count) in out.iter_mut().zip(counts) {
                *cell = to_f32(count).sqrt();
            }
        }
        Transform::Binary => {
            for (cell, &count) in out.iter_mut().zip(counts) {
                *cell = if count > 0 { 1.0 } else { 0.0 };
            }
        }
        Transform::GateProbability | Transform::GateLogit => out.fill(0.0),
    }
}

/// Counts stay far below 2^31, where the signed conversion, which has an instruction, is the same.
#[inline(always)]
fn to_f32(count: u32) -> f32 {
    count.min(i32::MAX as u32) as i32 as f32
}

/// Scales to length 1; zero stays zero.
#[inline(always)]
pub(crate) fn normalise(values: &mut [f32]) {
    let norm = squared_norm(values).sqrt();
    if norm > 0.0 && norm.is_finite() {
        let scale = 1.0 / norm;
        for value in values {
            *value *= scale;
        }
    } else {
        values.fill(0.0);
    }
}

/// The sum of squares, in 64 interleaved partial sums: with sixteen, each addition would wait for the one before it.
#[inline(always)]
pub(crate) fn squared_norm(values: &[f32]) -> f32 {
    let mut sums = [[0.0f32; 16]; 4];
    let (blocks, rest) = values.as_chunks::<64>();
    for block in blocks {
        for (sums, chunk) in sums.iter_mut().zip(block.as_chunks::<16>().0) {
            for lane in 0..16 {
                sums[lane] += chunk[lane] * chunk[lane];
            }
        }
    }
    for (at, value) in rest.iter().enumerate() {
        sums[at / 16][at % 16] += value * value;
    }
    let [a, b, c, d] = sums;
    let mut total = [0.0; 16];
    for lane in 0..16 {
        total[lane] = (a[lane] + b[lane]) + (c[lane] + d[lane]);
    }
    tree_sum(total)
}
