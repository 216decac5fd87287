//! The three ways to pick one of several workers that both sides share: in turn, by least load, and at random.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::WorkerFacts;

/// Positions of the workers that may be chosen.
pub(crate) fn eligible(workers: &[WorkerFacts]) -> impl Iterator<Item = usize> + '_ {
    workers
        .iter()
        .enumerate()
        .filter(|(_, worker)| worker.eligible())
        .map(|(index, _)| index)
}

/// Every worker's load, in pool order.
pub(crate) fn loads(workers: &[WorkerFacts]) -> Vec<u32> {
    workers.iter().map(|worker| worker.in_flight).collect()
}

/// Each worker in turn, passing over those that may not be chosen.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    next: usize,
}

impl Turn {
    pub(crate) fn pick(&mut self, workers: &[WorkerFacts]) -> Option<usize> {
        let n = workers.len();
        let start = if n == 0 { 0 } else { self.next % n };
        let chosen = (start..n)
            .chain(0..start)
            .find(|&index| workers[index].eligible())?;
        self.next = chosen + 1;
        Some(chosen)
    }
}

/// The fewest in flight; of several, the one that was picked the longest ago, so that an idle pool is used evenly.
#[derive(Debug, Default)]
pub(crate) struct Least {
    clock: u64,
    picked: Vec<u64>,
}

impl Least {
    pub(crate) fn pick(&mut self, workers: &[WorkerFacts]) -> Option<usize> {
        self.pick_among(workers, eligible(workers))
    }

    /// The same among `candidates` only, which must be positions in `workers`.
    pub(crate) fn pick_among(
        &mut self,
        workers: &[WorkerFacts],
        candidates: impl Iterator<Item = usize>,
    ) -> Option<usize> {
        if self.picked.len() < workers.len() {
            self.picked.resize(workers.len(), 0);
        }
        let chosen = candidates
            .min_by_key(|&index| (workers[index].in_flight, self.picked[index], index))?;
        self.clock += 1;
        self.picked[chosen] = self.clock;
        Some(chosen)
    }
}

/// Draws from the eligible workers by a seed.
#[derive(Debug)]
pub(crate) struct Dice {
    rng: ChaCha8Rng,
}

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
        }
    }

    /// One worker, all equally likely.
    pub(crate) fn one(&mut self, workers: &[WorkerFacts]) -> Option<usize> {
        let count = eligible(workers).count();
        if count == 0 {
            return None;
        }
        let at = self.rng.random_range(0..count);
        eligible(workers).nth(at)
    }

    /// Two different workers, all pairs equally likely; the same one twice if only one is left.
    pub(crate) fn two(&mut self, workers: &[WorkerFacts]) -> Option<(usize, usize)> {
        let count = eligible(workers).count();
        match count {
            0 => None,
            1 => eligible(workers).next().map(|only| (only, only)),
            _ => {
                let first = self.rng.random_range(0..count);
                let mut second = self.rng.random_range(0..count - 1);
                if second >= first {
                    second += 1;
                }
                Some((
                    eligible(workers).nth(first)?,
                    eligible(workers).nth(second)?,
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_pass_over_the_ineligible() {
        let workers = [
            WorkerFacts::new(0),
            WorkerFacts::new(0).unhealthy(),
            WorkerFacts::new(9),
        ];
        let mut turn = Turn::default();
        let picks: Vec<_> = (0..4).map(|_| turn.pick(&workers)).collect();
        assert_eq!(picks, [Some(0), Some(2), Some(0), Some(2)]);
        assert_eq!(turn.pick(&[]), None);
        assert_eq!(turn.pick(&[WorkerFacts::new(0).excluded()]), None);
    }

    #[test]
    fn equal_loads_are_used_evenly() {
        let workers = [
            WorkerFacts::new(1),
            WorkerFacts::new(0),
            WorkerFacts::new(0),
            WorkerFacts::new(0),
        ];
        let mut least = Least::default();
        let picks: Vec<_> = (0..6).map(|_| least.pick(&workers)).collect();
        assert_eq!(
            picks,
            [Some(1), Some(2), Some(3), Some(1), Some(2), Some(3)]
        );
    }

    #[test]
    fn two_draws_differ() {
        let workers = [
            WorkerFacts::new(0),
            WorkerFacts::new(0).unhealthy(),
            WorkerFacts::new(0),
            WorkerFacts::new(0),
        ];
        let mut dice = Dice::new(7);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..200 {
            let Some((a, b)) = dice.two(&workers) else {
                panic!("three are left")
            };
            assert_ne!(a, b);
            seen.insert((a, b));
        }
        assert_eq!(seen.len(), 6, "all ordered pairs of three workers");
    }
}
