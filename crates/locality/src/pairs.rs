//! Which pairs of records are compared.

use std::collections::HashSet;

use crate::random::Random;

/// Pairs `i < j` of `records` records, ascending: `wanted` of them drawn without replacement, or
/// all when there are no more than that.
pub(crate) fn choose(records: usize, wanted: Option<usize>, random: &mut Random) -> Vec<[u32; 2]> {
    let total = count(records);
    let wanted = wanted.map_or(total, |wanted| (wanted as u64).min(total));
    if wanted == total {
        return (0..records as u32)
            .flat_map(|i| (i + 1..records as u32).map(move |j| [i, j]))
            .collect();
    }
    // Floyd: each step draws one number not yet drawn.
    let mut drawn = HashSet::with_capacity(wanted as usize);
    for top in total - wanted..total {
        let draw = random.below(top + 1);
        if !drawn.insert(draw) {
            drawn.insert(top);
        }
    }
    let mut numbers: Vec<u64> = drawn.into_iter().collect();
    numbers.sort_unstable();
    let mut pairs = Vec::with_capacity(numbers.len());
    // Pairs are numbered row by row: row i begins with (i, i + 1).
    let (mut i, mut row_end) = (0u64, records as u64 - 1);
    for number in numbers {
        while number >= row_end {
            i += 1;
            row_end += records as u64 - 1 - i;
        }
        pairs.push([i as u32, (records as u64 - (row_end - number)) as u32]);
    }
    pairs
}

/// How many pairs `records` records have.
pub(crate) fn count(records: usize) -> u64 {
    let records = records as u64;
    records * records.saturating_sub(1) / 2
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn all_pairs_when_there_are_no_more() {
        let mut random = Random::new(1, 0);
        assert!(choose(0, None, &mut random).is_empty());
        assert!(choose(1, Some(5), &mut random).is_empty());
        assert_eq!(choose(3, Some(3), &mut random), [[0, 1], [0, 2], [1, 2]]);
    }

    #[test]
    fn sampled_pairs_are_distinct_ordered_and_even() {
        let mut hits = [[0u32; 12]; 12];
        for seed in 0..2000 {
            let pairs = choose(12, Some(20), &mut Random::new(seed, 0));
            assert_eq!(pairs.len(), 20);
            assert!(pairs.is_sorted() && pairs.windows(2).all(|two| two[0] != two[1]));
            for [i, j] in pairs {
                assert!(i < j && j < 12);
                hits[i as usize][j as usize] += 1;
            }
        }
        // 20 of 66 pairs, 2000 times: 606 each, standard deviation 21.
        for (i, row) in hits.iter().enumerate() {
            for &hit in &row[i + 1..] {
                assert!((500..720).contains(&hit), "{hit}");
            }
        }
    }
}
