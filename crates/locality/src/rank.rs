//! Spearman's rank correlation, with ties.

/// Spearman's rho of two equally long samples: Pearson's correlation of their ranks, equal values
/// sharing the mean of their ranks (as `scipy.stats.spearmanr`).
///
/// `None` when it is undefined: fewer than two values, or all values of a sample equal.
///
/// # Panics
/// When the samples differ in length.
#[must_use]
pub fn spearman(x: &[f64], y: &[f64]) -> Option<f64> {
    assert_eq!(x.len(), y.len(), "samples of different lengths");
    let ranks = |values: &[f64]| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        // Adding zero makes -0 and 0 equal.
        order.sort_unstable_by(|&a, &b| (values[a] + 0.0).total_cmp(&(values[b] + 0.0)));
        let mut ranks = vec![0u32; values.len()];
        let mut start = 0;
        for group in order.chunk_by(|&a, &b| values[a] == values[b]) {
            for &index in group {
                ranks[index] = doubled_rank(start, group.len());
            }
            start += group.len();
        }
        ranks
    };
    let (x, y) = (ranks(x), ranks(y));
    let products = x
        .iter()
        .zip(&y)
        .map(|(&a, &b)| u128::from(a) * u128::from(b));
    correlation(
        x.len(),
        products.sum(),
        sum_of_squares(&x),
        sum_of_squares(&y),
    )
}

/// Twice the mean rank of `length` equal values that begin at 0-based position `start`: an integer.
fn doubled_rank(start: usize, length: usize) -> u32 {
    (2 * start + length + 1) as u32
}

fn sum_of_squares(doubled: &[u32]) -> u128 {
    doubled.iter().map(|&r| u128::from(r) * u128::from(r)).sum()
}

/// Pearson's correlation of doubled ranks, whose mean is always `length + 1`.
fn correlation(length: usize, products: u128, x_squares: u128, y_squares: u128) -> Option<f64> {
    let n = length as u128;
    let mean_part = n * (n + 1) * (n + 1);
    let x = x_squares - mean_part.min(x_squares);
    let y = y_squares - mean_part.min(y_squares);
    if x == 0 || y == 0 {
        return None;
    }
    let covariance = products as i128 - mean_part as i128;
    Some(covariance as f64 / ((x as f64).sqrt() * (y as f64).sqrt()))
}

/// Bits of a [`key`].
const KEY_BITS: u32 = 22;
const HALF_BITS: u32 = KEY_BITS / 2;
const BUCKETS: usize = 1 << HALF_BITS;

/// A cosine similarity as an integer: steps of 2^-21 from -1 to 1.
///
/// What differs by less than rounding noise compares equal, so that equal vectors tie, and two
/// counting passes sort it.
#[inline(always)]
pub(crate) fn key(cosine: f32) -> u32 {
    let half = (1 << (KEY_BITS - 1)) as f32;
    // Rounded by hand: within 22 bits, adding a half and cutting is exact enough and vectorises.
    let scaled = (cosine * half + (half + 0.5)).clamp(0.0, 2.0 * half - 1.0);
    scaled as i32 as u32
}

/// The sample that others are correlated with.
pub(crate) struct Target {
    doubled_ranks: Vec<u32>,
    squares: u128,
}

/// Buffers of [`Target::rho`], to be used again.
#[derive(Default)]
pub(crate) struct RankScratch {
    pairs: Vec<u64>,
    sorted: Vec<u64>,
}

impl Target {
    /// Ranks the target's keys.
    pub(crate) fn new(keys: &[u32]) -> Self {
        let mut scratch = RankScratch::default();
        let indices: Vec<u32> = (0..keys.len() as u32).collect();
        sort(keys, &indices, &mut scratch);
        let mut doubled_ranks = vec![0; keys.len()];
        let mut start = 0;
        for group in scratch.pairs.chunk_by(|a, b| a >> 32 == b >> 32) {
            for &pair in group {
                doubled_ranks[pair as u32 as usize] = doubled_rank(start, group.len());
            }
            start += group.len();
        }
        let squares = sum_of_squares(&doubled_ranks);
        Self {
            doubled_ranks,
            squares,
        }
    }

    /// Spearman's rho of `keys` with the target.
    pub(crate) fn rho(&self, keys: &[u32], scratch: &mut RankScratch) -> Option<f64> {
        // Each key carries the target's rank along, so that the sums need no look-up.
        sort(keys, &self.doubled_ranks, scratch);
        let (mut products, mut squares, mut start) = (0u128, 0u128, 0);
        let sorted = &scratch.pairs;
        while start < sorted.len() {
            let key = sorted[start] >> 32;
            let (mut end, mut ranks) = (start, 0u64);
            while end < sorted.len() && sorted[end] >> 32 == key {
                ranks += sorted[end] & u64::from(u32::MAX);
                end += 1;
            }
            let rank = u64::from(doubled_rank(start, end - start));
            products += u128::from(rank) * u128::from(ranks);
            squares += u128::from(rank * rank) * (end - start) as u128;
            start = end;
        }
        correlation(keys.len(), products, squares, self.squares)
    }
}

/// Sorts `keys` with their `payloads` into `scratch.pairs` (key above, payload below): two counting
/// passes of 11 bits.
fn sort(keys: &[u32], payloads: &[u32], scratch: &mut RankScratch) {
    let (mut low, mut high) = ([0u32; BUCKETS], [0u32; BUCKETS]);
    for &key in keys {
        low[key as usize % BUCKETS] += 1;
        high[key as usize / BUCKETS % BUCKETS] += 1;
    }
    for counts in [&mut low, &mut high] {
        let mut start = 0;
        for count in counts.iter_mut() {
            start += std::mem::replace(count, start);
        }
    }
    scratch.sorted.resize(keys.len(), 0);
    scratch.pairs.resize(keys.len(), 0);
    for (&key, &payload) in keys.iter().zip(payloads) {
        let place = &mut low[key as usize % BUCKETS];
        scratch.sorted[*place as usize] = u64::from(key) << 32 | u64::from(payload);
        *place += 1;
    }
    for &pair in &scratch.sorted {
        let place = &mut high[(pair >> (32 + HALF_BITS)) as usize % BUCKETS];
        scratch.pairs[*place as usize] = pair;
        *place += 1;
    }
}
