//! rho (Eq. 1): how well the distances between prompts order the distances between decodes.

use crate::dots::{PairDots, Sums};
use crate::parallel;
use crate::rank::{RankScratch, Target, key};
use crate::report::MaskStep;
use crate::simd;

/// Keys of the pairs' cosines, from sums over layers. Zero vectors are at cosine 0 to everything.
///
/// rho is taken between similarities instead of distances: it is the same, as both sides turn. The
/// inverse lengths are multiplied first, so that equal lengths and dots give equal bits, either way
/// round.
fn cosine_keys(
    pairs: &[[u32; 2]],
    sums: &Sums,
    more: Option<(&[f32], &[f32])>,
    buffers: &mut Buffers,
) {
    let Buffers { inverse, keys, .. } = buffers;
    let inverse_root = |square: f32| {
        if square > 0.0 && square.is_finite() {
            1.0 / square.sqrt()
        } else {
            0.0
        }
    };
    inverse.clear();
    keys.resize(pairs.len(), 0);
    match more {
        Some((dots, squares)) => {
            let sum = sums.squares.iter().zip(squares);
            inverse.extend(sum.map(|(&a, &b)| inverse_root(a + b)));
            let inputs = pairs.iter().zip(&sums.dots).zip(dots);
            simd::dispatch(
                #[inline(always)]
                || {
                    for (key_out, ((&[i, j], &dot), &more)) in keys.iter_mut().zip(inputs) {
                        *key_out = key((dot + more) * (inverse[i as usize] * inverse[j as usize]));
                    }
                },
            );
        }
        None => {
            inverse.extend(sums.squares.iter().map(|&square| inverse_root(square)));
            let inputs = pairs.iter().zip(&sums.dots);
            for (key_out, (&[i, j], &dot)) in keys.iter_mut().zip(inputs) {
                *key_out = key(dot * (inverse[i as usize] * inverse[j as usize]));
            }
        }
    }
}

#[derive(Default)]
struct Buffers {
    inverse: Vec<f32>,
    keys: Vec<u32>,
    ranks: RankScratch,
}

/// Rates prompts' pair dots against those of decode.
pub(crate) struct Rater<'a> {
    pairs: &'a [[u32; 2]],
    target: Target,
}

impl<'a> Rater<'a> {
    /// `decode` holds the dots of decode counts; all its layers are taken.
    pub(crate) fn new(pairs: &'a [[u32; 2]], decode: &PairDots) -> Self {
        let mut buffers = Buffers::default();
        let sums = decode.sum(0..decode.layers());
        cosine_keys(pairs, &sums, None, &mut buffers);
        Self {
            pairs,
            target: Target::new(&buffers.keys),
        }
    }

    /// rho with the given layers; `None` when all distances of a side are equal.
    pub(crate) fn rho(
        &self,
        prompts: &PairDots,
        layers: impl Iterator<Item = usize>,
    ) -> Option<f64> {
        let mut buffers = Buffers::default();
        cosine_keys(self.pairs, &prompts.sum(layers), None, &mut buffers);
        self.target.rho(&buffers.keys, &mut buffers.ranks)
    }

    /// Greedy forward selection: at each step the layer that raises rho most (or lowers it least),
    /// lower layers first among equals, until none is left. Each step costs pairs x layers left.
    pub(crate) fn greedy(
        &self,
        prompts: &PairDots,
        threads: usize,
        progress: &mut dyn FnMut(usize),
    ) -> Vec<MaskStep> {
        let mut left: Vec<usize> = (0..prompts.layers()).collect();
        let mut sums = prompts.sum(std::iter::empty());
        let mut path = Vec::with_capacity(left.len());
        while !left.is_empty() {
            let mut rhos = vec![None; left.len()];
            let tasks = rhos.iter_mut().zip(&left).collect();
            parallel::each(
                threads,
                tasks,
                Buffers::default,
                |buffers, (rho, &layer)| {
                    let more = (prompts.dots(layer), prompts.squares(layer));
                    cosine_keys(self.pairs, &sums, Some(more), buffers);
                    *rho = self.target.rho(&buffers.keys, &mut buffers.ranks);
                },
            );
            let value = |at: usize| rhos[at].unwrap_or(-2.0);
            let best = (0..left.len())
                .reduce(|best, at| if value(at) > value(best) { at } else { best })
                .unwrap_or(0);
            let layer = left.remove(best);
            sums.add(prompts, layer);
            path.push(MaskStep {
                layer: layer as u32,
                rho: rhos[best].unwrap_or(f64::NAN),
            });
            progress(path.len());
        }
        path
    }
}

/// The layers up to the path's peak, ascending, with the peak's rho; the shortest among equals.
pub(crate) fn peak(path: &[MaskStep]) -> Option<(Vec<u32>, f64)> {
    let best = (0..path.len())
        .filter(|&at| !path[at].rho.is_nan())
        .reduce(|best, at| {
            if path[at].rho > path[best].rho {
                at
            } else {
                best
            }
        })?;
    let mut layers: Vec<u32> = path[..=best].iter().map(|step| step.layer).collect();
    layers.sort_unstable();
    Some((layers, path[best].rho))
}
