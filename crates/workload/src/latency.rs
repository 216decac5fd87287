//! Latencies of requests, and their quantiles.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// When a streamed request was sent and its tokens came, as durations since one origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestTiming {
    /// When it was sent.
    pub sent: Duration,
    /// When its first token came.
    pub first_token: Duration,
    /// When its last token came.
    pub last_token: Duration,
    /// How many tokens came.
    pub tokens: u32,
}

impl RequestTiming {
    /// Time to first token.
    #[must_use]
    pub fn ttft(&self) -> Duration {
        self.first_token.saturating_sub(self.sent)
    }

    /// Time per output token after the first: (last - first) / (tokens - 1). None for fewer than 2 tokens.
    #[must_use]
    pub fn tpot(&self) -> Option<Duration> {
        let steps = self.tokens.checked_sub(1).filter(|&steps| steps > 0)?;
        Some(self.last_token.saturating_sub(self.first_token) / steps)
    }
}

/// Quantiles of one latency, in milliseconds; 0 when nothing was recorded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// How many were recorded.
    pub count: u64,
    /// The median.
    pub p50_ms: f64,
    /// The 90th percentile.
    pub p90_ms: f64,
    /// The 99th percentile.
    pub p99_ms: f64,
    /// The arithmetic mean.
    pub mean_ms: f64,
}

/// TTFT and TPOT of many requests, kept in histograms of microseconds with three significant digits (0.1 %).
#[derive(Debug, Clone)]
pub struct LatencySummary {
    ttft: Histogram<u64>,
    tpot: Histogram<u64>,
}

/// Latencies are kept up to this; longer ones are recorded as this long.
const LONGEST: Duration = Duration::from_secs(3600);

impl LatencySummary {
    /// A summary of nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            ttft: microseconds(),
            tpot: microseconds(),
        }
    }

    /// Adds one request.
    pub fn record(&mut self, timing: &RequestTiming) {
        record(&mut self.ttft, timing.ttft());
        if let Some(tpot) = timing.tpot() {
            record(&mut self.tpot, tpot);
        }
    }

    /// Time to first token.
    #[must_use]
    pub fn ttft(&self) -> Quantiles {
        quantiles(&self.ttft)
    }

    /// Time per output token after the first, one value per request.
    #[must_use]
    pub fn tpot(&self) -> Quantiles {
        quantiles(&self.tpot)
    }
}

impl Default for LatencySummary {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a> FromIterator<&'a RequestTiming> for LatencySummary {
    fn from_iter<T: IntoIterator<Item = &'a RequestTiming>>(timings: T) -> Self {
        let mut summary = Self::new();
        for timing in timings {
            summary.record(timing);
        }
        summary
    }
}

#[allow(clippy::expect_used)]
fn microseconds() -> Histogram<u64> {
    // Fails only for bounds that make no sense or more than 5 digits.
    Histogram::new_with_bounds(1, LONGEST.as_micros() as u64, 3).expect("the bounds are constants")
}

fn record(histogram: &mut Histogram<u64>, latency: Duration) {
    histogram.saturating_record(latency.min(LONGEST).as_micros() as u64);
}

fn quantiles(histogram: &Histogram<u64>) -> Quantiles {
    if histogram.is_empty() {
        return Quantiles::default();
    }
    let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1000.0;
    Quantiles {
        count: histogram.len(),
        p50_ms: at(0.5),
        p90_ms: at(0.9),
        p99_ms: at(0.99),
        mean_ms: histogram.mean() / 1000.0,
    }
}

/// The median: the middle value, or the mean of the two middle ones. None for an empty slice; NaNs sort last.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    if sorted.len() % 2 == 1 {
        return Some(upper);
    }
    Some(f64::midpoint(sorted[sorted.len() / 2 - 1], upper))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn timing(sent: u64, first: u64, last: u64, tokens: u32) -> RequestTiming {
        RequestTiming {
            sent: Duration::from_millis(sent),
            first_token: Duration::from_millis(first),
            last_token: Duration::from_millis(last),
            tokens,
        }
    }

    #[test]
    fn ttft_and_tpot_of_one_request() {
        let one = timing(100, 150, 350, 11);
        assert_eq!(one.ttft(), Duration::from_millis(50));
        assert_eq!(one.tpot(), Some(Duration::from_millis(20)));
        assert_eq!(timing(0, 5, 5, 1).tpot(), None);
        assert_eq!(timing(0, 5, 5, 0).tpot(), None);
    }

    #[test]
    fn quantiles_of_many() {
        let timings: Vec<_> = (1..=1000)
            .map(|ms| timing(0, ms, ms + 10 * ms, 11))
            .collect();
        let summary: LatencySummary = timings.iter().collect();
        for quantiles in [summary.ttft(), summary.tpot()] {
            assert_eq!(quantiles.count, 1000);
            for (got, expected) in [
                (quantiles.p50_ms, 500.0),
                (quantiles.p90_ms, 900.0),
                (quantiles.p99_ms, 990.0),
                (quantiles.mean_ms, 500.5),
            ] {
                assert!(
                    (got / expected - 1.0).abs() < 0.002,
                    "{got} is not about {expected}"
                );
            }
        }
    }

    #[test]
    fn nothing_recorded_is_all_zero_and_too_long_is_clamped() {
        assert_eq!(LatencySummary::new().tpot(), Quantiles::default());
        let mut summary = LatencySummary::new();
        summary.record(&timing(0, 100_000_000, 100_000_000, 1));
        assert!((summary.ttft().p50_ms / 3_600_000.0 - 1.0).abs() < 0.002);
        assert_eq!(summary.tpot().count, 0);
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
