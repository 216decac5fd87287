//! Choosing a token from logits.
//!
//! A choice depends on the logits, the parameters and the token's position alone: each draw has its own ChaCha stream, named by
//! (seed, position), so that neither the batch nor a preemption nor a handoff changes what a request draws.

use std::cmp::Ordering;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::request::SamplingParams;
use crate::step::TokenLogprobs;

/// Chooses tokens. Holds working memory only.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    token: u32,
    logit: f32,
}

impl Candidate {
    /// Likeliest first, then the lowest token.
    fn order(&self, other: &Self) -> Ordering {
        other
            .logit
            .total_cmp(&self.logit)
            .then(self.token.cmp(&other.token))
    }
}

impl Sampler {
    /// Chooses the token at `position` (prompt included) from `logits`, one per token of the vocabulary. Tokens in `suppressed`,
    /// in ascending order, are not chosen, unless there are no others.
    pub(crate) fn choose(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        position: usize,
        suppressed: &[u32],
    ) -> u32 {
        if params.temperature == 0.0 {
            return greedy(logits, suppressed);
        }
        self.candidates.clear();
        self.candidates.extend(usable(logits, suppressed));
        let likeliest = greedy(logits, suppressed);
        let best = logits.get(likeliest as usize).copied().unwrap_or(0.0);
        if self.candidates.is_empty() || !best.is_finite() {
            return likeliest;
        }
        let weight = |c: &Candidate| weight(c.logit, best, params.temperature);
        if params.min_p > 0.0 {
            self.candidates
                .retain(|c| weight(c) >= f64::from(params.min_p));
        }
        if params.top_k > 0 && params.top_k < self.candidates.len() {
            self.candidates
                .select_nth_unstable_by(params.top_k, Candidate::order);
            self.candidates.truncate(params.top_k);
        }
        if params.top_p < 1.0 {
            let total: f64 = {
                // The sum must not depend on the order that the selection left.
                self.candidates.sort_unstable_by_key(|c| c.token);
                self.candidates.iter().map(weight).sum()
            };
            keep_nucleus(
                &mut self.candidates,
                total * f64::from(params.top_p),
                weight,
            );
        }
        self.candidates.sort_unstable_by_key(|c| c.token);
        let total: f64 = self.candidates.iter().map(weight).sum();
        let target = total * uniform(params.seed, position);
        let mut sum = 0.0;
        for candidate in &self.candidates {
            sum += weight(candidate);
            if sum > target {
                return candidate.token;
            }
        }
        likeliest
    }
}

/// Natural logarithms of the probabilities at temperature 1 of `chosen` and of the `top` likeliest tokens.
#[must_use]
pub(crate) fn logprobs(logits: &[f32], chosen: u32, top: usize) -> TokenLogprobs {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let best = if best.is_finite() { best } else { 0.0 };
    let sum: f64 = logits.iter().map(|&l| weight(l, best, 1.0)).sum();
    let normaliser = f64::from(best) + sum.ln();
    let of = |logit: f32| (f64::from(number(logit)) - normaliser) as f32;
    let mut candidates: Vec<Candidate> = usable(logits, &[]).collect();
    let top = top.min(candidates.len());
    if top > 0 && top < candidates.len() {
        candidates.select_nth_unstable_by(top, Candidate::order);
    }
    candidates.truncate(top);
    candidates.sort_unstable_by(Candidate::order);
    TokenLogprobs {
        chosen: logits
            .get(chosen as usize)
            .map_or(f32::NEG_INFINITY, |&logit| of(logit)),
        top: candidates.iter().map(|c| (c.token, of(c.logit))).collect(),
    }
}

/// The likeliest token, the lowest on ties; suppressed tokens only when there are no others.
fn greedy(logits: &[f32], suppressed: &[u32]) -> u32 {
    if suppressed.is_empty() {
        return argmax(logits);
    }
    usable(logits, suppressed)
        .reduce(|best, c| if c.logit > best.logit { c } else { best })
        .map_or_else(|| argmax(logits), |c| c.token)
}

/// The index of the first of the largest values; 0 when there is none above minus infinity.
fn argmax(logits: &[f32]) -> u32 {
    // Lanes that do not wait for each other: this runs over the whole vocabulary for every token.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = logits.as_chunks::<16>();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    let best = lanes
        .iter()
        .chain(rest)
        .copied()
        .fold(f32::NEG_INFINITY, f32::max);
    let first = (best > f32::NEG_INFINITY)
        .then(|| logits.iter().position(|&logit| logit == best))
        .flatten();
    first.unwrap_or(0) as u32
}

/// The tokens that are not in `suppressed`, which is in ascending order: this runs over the whole vocabulary.
fn usable<'a>(logits: &'a [f32], suppressed: &'a [u32]) -> impl Iterator<Item = Candidate> + 'a {
    logits
        .iter()
        .zip(0u32..)
        .filter(|(_, token)| suppressed.binary_search(token).is_err())
        .map(|(&logit, token)| Candidate {
            token,
            // Both zeros are one to the total order.
            logit: number(logit) + 0.0,
        })
}

/// NaN is as unlikely as can be.
fn number(logit: f32) -> f32 {
    if logit.is_nan() {
        f32::NEG_INFINITY
    } else {
        logit
    }
}

/// A token's probability over the likeliest one's.
fn weight(logit: f32, best: f32, temperature: f32) -> f64 {
    ((f64::from(number(logit)) - f64::from(best)) / f64::from(temperature)).exp()
}

/// Keeps the fewest likeliest candidates whose weights sum to at least `target`.
fn keep_nucleus(candidates: &mut Vec<Candidate>, target: f64, weight: impl Fn(&Candidate) -> f64) {
    // Most nuclei are small: sort more only when the sorted part is not enough.
    let mut sorted = 64;
    loop {
        if sorted < candidates.len() {
            candidates.select_nth_unstable_by(sorted, Candidate::order);
        }
        let end = sorted.min(candidates.len());
        candidates[..end].sort_unstable_by(Candidate::order);
        let mut sum = 0.0;
        for (i, candidate) in candidates[..end].iter().enumerate() {
            sum += weight(candidate);
            if sum >= target {
                candidates.truncate(i + 1);
                return;
            }
        }
        if end == candidates.len() {
            return;
        }
        sorted *= 8;
    }
}

/// The draw of (seed, position), in [0, 1).
fn uniform(seed: u64, position: usize) -> f64 {
    let mut stream = ChaCha8Rng::seed_from_u64(seed);
    stream.set_stream(position as u64);
    (stream.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
        let mut params = SamplingParams {
            temperature: 1.0,
            ..SamplingParams::default()
        };
        change(&mut params);
        params
    }

    /// How often each token is drawn over many positions, as fractions.
    fn frequencies(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
        let draws = 4000;
        let mut counts = vec![0.0; logits.len()];
        let mut sampler = Sampler::default();
        for position in 0..draws {
            counts[sampler.choose(logits, params, position, &[]) as usize] += 1.0 / draws as f64;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_lowest_of_the_likeliest() {
        let mut sampler = Sampler::default();
        let params = SamplingParams::default();
        let choose = |s: &mut Sampler, l: &[f32], not: &[u32]| s.choose(l, &params, 0, not);
        assert_eq!(choose(&mut sampler, &[0.0, 2.0, 2.0, 1.0], &[]), 1);
        assert_eq!(choose(&mut sampler, &[-0.0, 0.0], &[]), 0);
        assert_eq!(choose(&mut sampler, &[0.0, 2.0, 2.0, 1.0], &[1]), 2);
        assert_eq!(choose(&mut sampler, &[f32::NAN, -1.0], &[]), 1);
        assert_eq!(choose(&mut sampler, &[f32::NAN, f32::NAN], &[]), 0);
        assert_eq!(choose(&mut sampler, &[1.0, 2.0], &[0, 1]), 1);
        for (at, len) in [(0, 40), (15, 40), (16, 40), (33, 40), (39, 40), (3, 5)] {
            let mut logits = vec![-2.0; len];
            logits[at] = -1.0;
            logits[len - 1] = -1.0;
            assert_eq!(choose(&mut sampler, &logits, &[]), at as u32);
        }
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        for (got, want) in frequencies(&logits, &sampling(|_| {}))
            .iter()
            .zip([0.5, 0.3, 0.2])
        {
            assert!((got - want).abs() < 0.03, "{got} {want}");
        }
        let cold = frequencies(&logits, &sampling(|p| p.temperature = 0.5));
        for (got, want) in cold.iter().zip([0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]) {
            assert!((got - want).abs() < 0.03, "{got} {want}");
        }
    }

    #[test]
    fn top_k_top_p_and_min_p_leave_tokens_out() {
        let logits = [0.2f32.ln(), 0.5f32.ln(), 0.25f32.ln(), 0.05f32.ln()];
        let drawn = |params| -> Vec<bool> {
            frequencies(&logits, &params)
                .iter()
                .map(|&f| f > 0.0)
                .collect()
        };
        assert_eq!(drawn(sampling(|p| p.top_k = 2)), [false, true, true, false]);
        assert_eq!(
            drawn(sampling(|p| p.top_p = 0.5)),
            [false, true, false, false]
        );
        assert_eq!(
            drawn(sampling(|p| p.top_p = 0.9)),
            [true, true, true, false]
        );
        assert_eq!(
            drawn(sampling(|p| p.min_p = 0.45)),
            [false, true, true, false]
        );
        let both = sampling(|p| (p.top_k, p.top_p) = (2, 0.66));
        assert_eq!(drawn(both), [false, true, false, false]);
    }

    #[test]
    fn a_wide_nucleus_is_found() {
        let logits = vec![0.0f32; 2000];
        let mut sampler = Sampler::default();
        let params = sampling(|p| p.top_p = 0.5);
        let highest = (0..500)
            .map(|i| sampler.choose(&logits, &params, i, &[]))
            .max();
        assert!(
            highest.is_some_and(|t| (900..1000).contains(&t)),
            "{highest:?}"
        );
    }

    #[test]
    fn a_draw_is_named_by_seed_and_position() {
        let logits = vec![0.0f32; 1000];
        let draw = |seed, position| {
            Sampler::default().choose(&logits, &sampling(|p| p.seed = seed), position, &[])
        };
        assert_eq!(draw(1, 5), draw(1, 5));
        assert_ne!(draw(1, 5), draw(1, 6));
        assert_ne!(draw(1, 5), draw(2, 5));
    }

    #[test]
    fn logprobs_are_of_the_untempered_softmax() {
        let logits = [0.2f32.ln() + 3.0, 0.5f32.ln() + 3.0, 0.3f32.ln() + 3.0];
        let got = logprobs(&logits, 0, 2);
        assert!((got.chosen - 0.2f32.ln()).abs() < 1e-6);
        assert_eq!(got.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2]);
        assert!((got.top[0].1 - 0.5f32.ln()).abs() < 1e-6);
        assert!(logprobs(&logits, 1, 0).top.is_empty());
        assert_eq!(logprobs(&logits, 1, 9).top.len(), 3);
    }
}
