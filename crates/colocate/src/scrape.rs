//! Counters read from the workers' `/metrics`.

use std::ops::{Add, Sub};

use anyhow::{Context, Result};

use crate::client::Client;

/// What decode workers have done so far, or between two readings.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Decoded {
    /// Tokens generated in decode steps.
    pub(crate) tokens: f64,
    /// Steps taken; each step of a decode worker generates.
    pub(crate) steps: f64,
    /// Sum over generated tokens of the distinct experts per layer in the step that made them.
    pub(crate) distinct_by_token: f64,
}

impl Decoded {
    /// Mean over generated tokens of the distinct experts per layer in the step that made them. None before the first token.
    pub(crate) fn distinct_experts(&self) -> Option<f64> {
        (self.tokens > 0.0).then(|| self.distinct_by_token / self.tokens)
    }

    /// Mean tokens per decode step. None before the first step.
    pub(crate) fn batch(&self) -> Option<f64> {
        (self.steps > 0.0).then(|| self.tokens / self.steps)
    }

    fn read(metrics: &str) -> Result<Self> {
        let counter = |name: &str| {
            sum(metrics, name)
                .with_context(|| format!("the worker's metrics hold no counter {name}"))
        };
        Ok(Self {
            tokens: counter("colocate_decode_tokens_total")?,
            steps: counter("colocate_steps_total")?,
            distinct_by_token: counter("colocate_distinct_experts_token_weighted_sum")?,
        })
    }
}

impl Add for Decoded {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            tokens: self.tokens + other.tokens,
            steps: self.steps + other.steps,
            distinct_by_token: self.distinct_by_token + other.distinct_by_token,
        }
    }
}

impl Sub for Decoded {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            tokens: self.tokens - earlier.tokens,
            steps: self.steps - earlier.steps,
            distinct_by_token: self.distinct_by_token - earlier.distinct_by_token,
        }
    }
}

/// The counters of all `workers` together.
pub(crate) async fn decoded(workers: &[Client]) -> Result<Decoded> {
    let texts = futures::future::try_join_all(workers.iter().map(Client::metrics)).await?;
    texts
        .iter()
        .map(|text| Decoded::read(text))
        .try_fold(Decoded::default(), |sum, next| Ok(sum + next?))
}

/// The sum of all samples of the metric `name`, over its labels. None when there is no sample.
fn sum(metrics: &str, name: &str) -> Option<f64> {
    let mut found = None;
    for line in metrics.lines() {
        let Some(rest) = line.strip_prefix(name) else {
            continue;
        };
        let value = match rest.as_bytes().first() {
            Some(b' ') => rest,
            Some(b'{') => rest.rsplit_once('}').map_or("", |(_, value)| value),
            _ => continue,
        };
        let value: f64 = value.split_whitespace().next()?.parse().ok()?;
        found = Some(found.unwrap_or(0.0) + value);
    }
    found
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const METRICS: &str = "\
# HELP colocate_decode_tokens Tokens.
# TYPE colocate_decode_tokens counter
colocate_decode_tokens_total 120
colocate_decode_tokens_total_other 7
colocate_steps_total{role=\"decode\"} 10
colocate_steps_total{role=\"both\"} 2
colocate_distinct_experts_token_weighted_sum 1.8e3
# EOF
";

    #[test]
    fn reads_and_sums() {
        let all = Decoded::read(METRICS).unwrap();
        assert_eq!(
            all,
            Decoded {
                tokens: 120.0,
                steps: 12.0,
                distinct_by_token: 1800.0
            }
        );
        assert_eq!(all.distinct_experts(), Some(15.0));
        assert_eq!(all.batch(), Some(10.0));
        assert_eq!((all - all).distinct_experts(), None);
        let missing = Decoded::read("colocate_decode_tokens_total 1\n")
            .unwrap_err()
            .to_string();
        assert!(missing.contains("colocate_steps_total"), "{missing}");
    }
}
