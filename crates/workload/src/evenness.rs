//! How evenly load lay on the workers over time.

use std::time::Duration;

/// One request's stay on one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interval {
    /// The worker's index.
    pub worker: usize,
    /// When it came.
    pub start: Duration,
    /// When it left.
    pub end: Duration,
}

/// The time-weighted mean of (most requests in flight on one worker) / (mean over workers), over the times at which any is in
/// flight. 1 is perfectly even; `workers` is everything on one. None when nothing ever ran.
///
/// Intervals on a worker outside `0..workers` are left out.
#[must_use]
pub fn balance_over_time(intervals: &[Interval], workers: usize) -> Option<f64> {
    let mut events: Vec<(Duration, bool, usize)> = intervals
        .iter()
        .filter(|interval| interval.worker < workers && interval.end > interval.start)
        .flat_map(|interval| {
            [
                (interval.start, true, interval.worker),
                (interval.end, false, interval.worker),
            ]
        })
        .collect();
    // Departures first at equal times, so that a worker never counts a request that has just left.
    events.sort_unstable();
    let mut in_flight = vec![0u32; workers];
    let (mut total, mut weighted, mut busy) = (0u32, 0.0, 0.0);
    let mut since = Duration::ZERO;
    for (at, arrives, worker) in events {
        if total > 0 {
            let span = (at - since).as_secs_f64();
            let most = in_flight.iter().copied().max().unwrap_or(0);
            weighted += span * f64::from(most) * workers as f64 / f64::from(total);
            busy += span;
        }
        since = at;
        if arrives {
            in_flight[worker] += 1;
            total += 1;
        } else {
            in_flight[worker] -= 1;
            total -= 1;
        }
    }
    (busy > 0.0).then(|| weighted / busy)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn interval(worker: usize, start: u64, end: u64) -> Interval {
        Interval {
            worker,
            start: Duration::from_millis(start),
            end: Duration::from_millis(end),
        }
    }

    #[test]
    fn known_cases() {
        let cases: [(&[Interval], usize, Option<f64>); 6] = [
            (&[], 2, None),
            (&[interval(0, 5, 5)], 2, None),
            (&[interval(0, 0, 10), interval(1, 0, 10)], 2, Some(1.0)),
            (&[interval(0, 0, 10), interval(0, 0, 10)], 4, Some(4.0)),
            // Half of the busy time 2 on one of two workers, half of it even; the idle gap does not count.
            (
                &[
                    interval(0, 0, 10),
                    interval(0, 0, 5),
                    interval(1, 5, 10),
                    interval(7, 0, 10),
                ],
                2,
                Some(1.5),
            ),
            (&[interval(0, 0, 5), interval(1, 20, 25)], 2, Some(2.0)),
        ];
        for (intervals, workers, expected) in cases {
            let got = balance_over_time(intervals, workers);
            match (got, expected) {
                (Some(got), Some(expected)) => {
                    assert!((got - expected).abs() < 1e-9, "{got} {expected}")
                }
                (got, expected) => assert_eq!(got, expected),
            }
        }
    }

    proptest! {
        #[test]
        fn lies_between_even_and_all_on_one(
            raw in prop::collection::vec((0usize..4, 0u64..100, 1u64..50), 1..40),
        ) {
            let intervals: Vec<_> =
                raw.iter().map(|&(worker, start, length)| interval(worker, start, start + length)).collect();
            let got = balance_over_time(&intervals, 4).unwrap();
            prop_assert!((1.0..=4.0 + 1e-9).contains(&got), "{}", got);
        }
    }
}
