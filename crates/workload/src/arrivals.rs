//! When requests arrive.

use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// How load is offered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// Open loop: requests come as a Poisson process, whether or not earlier ones have been answered.
    Open {
        /// Mean arrivals per second.
        rate: f64,
    },
    /// Closed loop: a fixed number of requests is in flight; the next is sent when one ends.
    Closed {
        /// How many.
        concurrency: usize,
    },
}

/// The rate of a Poisson process must be finite and above 0.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("expected a rate above 0 requests per second, got {0}")]
pub struct RateError(
    /// The rate given.
    pub f64,
);

/// The arrival times of a Poisson process, as offsets from its start; never ends.
#[derive(Debug, Clone)]
pub struct Poisson {
    rate: f64,
    elapsed_seconds: f64,
    rng: ChaCha8Rng,
}

impl Poisson {
    /// A process with `rate` arrivals per second on average.
    ///
    /// # Errors
    /// When the rate is not finite or not above 0.
    pub fn new(rate: f64, seed: u64) -> Result<Self, RateError> {
        if !rate.is_finite() || rate <= 0.0 {
            return Err(RateError(rate));
        }
        let rng = ChaCha8Rng::seed_from_u64(seed);
        Ok(Self {
            rate,
            elapsed_seconds: 0.0,
            rng,
        })
    }
}

impl Iterator for Poisson {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        // 1 - u lies in (0, 1], so the logarithm is finite.
        let gap = -(1.0 - self.rng.random::<f64>()).ln() / self.rate;
        self.elapsed_seconds += gap;
        Some(Duration::try_from_secs_f64(self.elapsed_seconds).unwrap_or(Duration::MAX))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn gaps_have_the_mean_and_the_spread_of_an_exponential() {
        let times: Vec<f64> = Poisson::new(50.0, 7)
            .unwrap()
            .take(20_000)
            .map(|at| at.as_secs_f64())
            .collect();
        let gaps: Vec<f64> = std::iter::once(times[0])
            .chain(times.windows(2).map(|pair| pair[1] - pair[0]))
            .collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((mean - 0.02).abs() < 0.0005, "{mean}");
        assert!(
            (variance.sqrt() / mean - 1.0).abs() < 0.05,
            "{}",
            variance.sqrt()
        );
        assert!(times.is_sorted());
    }

    #[test]
    fn seeded() {
        let take = |seed| Poisson::new(1.0, seed).unwrap().take(5).collect::<Vec<_>>();
        assert_eq!(take(1), take(1));
        assert_ne!(take(1), take(2));
    }

    #[test]
    fn refuses_rates_that_mean_nothing() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(Poisson::new(rate, 1).is_err(), "{rate}");
        }
    }
}
