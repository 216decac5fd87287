//! What a worker tells Prometheus.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use engine::{StepStats, Usage};
use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// Why held blocks were let go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReleaseCause {
    /// A peer pulled them, or said that it will not.
    Released,
    /// Nobody came in time.
    Expired,
    /// The request was cancelled.
    Aborted,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All of its tokens were generated.
    Finished,
    /// It was refused, or failed.
    Failed,
    /// Its client went away.
    Cancelled,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// A sum that only grows. A gauge to Prometheus, so that its name stays as it is.
type Sum = Gauge<f64, AtomicU64>;

/// All metrics of a worker. Cheap to clone; the clones share their numbers.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    registry: Arc<Mutex<Registry>>,

    ttft: Histogram,
    tpot: Histogram,
    requests: Family<OutcomeLabel, Counter>,

    running: Gauge,
    waiting: Gauge,
    blocks_used: Gauge,
    blocks_cached: Gauge,
    blocks_total: Gauge,
    blocks_pinned: Gauge,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    preemptions: Counter,

    steps: Counter,
    step_batch: Counter,
    prefill_tokens: Counter,
    generated_tokens: Counter,
    distinct: Histogram,
    distinct_token_weighted: Sum,
    distinct_steps: Sum,

    held_now: Gauge,
    held: Counter,
    released: Counter,
    expired: Counter,
    aborted: Counter,
    pulled: Counter,
    pulled_bytes: Counter,
    pull_seconds: Histogram,
    failed: Family<ReasonLabel, Counter>,
}

impl Metrics {
    /// All at zero. `experts` is the number of experts per layer, which bounds the histogram of distinct ones.
    pub(crate) fn new(experts: u32) -> Self {
        let latency = || Histogram::new(exponential_buckets(0.001, 1.5, 28));
        let metrics = Self {
            registry: Arc::default(),
            ttft: latency(),
            tpot: Histogram::new(exponential_buckets(0.000_25, 1.4, 28)),
            requests: Family::default(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            blocks_used: Gauge::default(),
            blocks_cached: Gauge::default(),
            blocks_total: Gauge::default(),
            blocks_pinned: Gauge::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            preemptions: Counter::default(),
            steps: Counter::default(),
            step_batch: Counter::default(),
            prefill_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            distinct: Histogram::new(distinct_buckets(experts)),
            distinct_token_weighted: Sum::default(),
            distinct_steps: Sum::default(),
            held_now: Gauge::default(),
            held: Counter::default(),
            released: Counter::default(),
            expired: Counter::default(),
            aborted: Counter::default(),
            pulled: Counter::default(),
            pulled_bytes: Counter::default(),
            pull_seconds: latency(),
            failed: Family::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&self) {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let r = registry.sub_registry_with_prefix("colocate");
        r.register_with_unit(
            "time_to_first_token",
            "From a request's arrival to its first token",
            Unit::Seconds,
            self.ttft.clone(),
        );
        r.register_with_unit(
            "time_per_output_token",
            "A request's mean time per token after its first",
            Unit::Seconds,
            self.tpot.clone(),
        );
        r.register(
            "requests",
            "Completions that ended, by outcome",
            self.requests.clone(),
        );

        r.register(
            "requests_running",
            "Requests in the running batch",
            self.running.clone(),
        );
        r.register(
            "requests_waiting",
            "Requests that wait for blocks or a place",
            self.waiting.clone(),
        );
        r.register(
            "kv_blocks_used",
            "KV blocks that somebody references",
            self.blocks_used.clone(),
        );
        r.register(
            "kv_blocks_cached",
            "KV blocks that nobody references and whose content is kept",
            self.blocks_cached.clone(),
        );
        r.register("kv_blocks_total", "KV blocks", self.blocks_total.clone());
        r.register(
            "kv_pins",
            "Prefixes that wait for a pull to end",
            self.blocks_pinned.clone(),
        );
        r.register(
            "prompt_tokens",
            "Prompt tokens of all requests that began to run, since the start",
            self.prompt_tokens.clone(),
        );
        r.register(
            "prefix_hit_tokens",
            "Of these, tokens from the prefix cache or a handoff",
            self.cached_tokens.clone(),
        );
        r.register(
            "preemptions",
            "Requests that lost their blocks to older ones, since the start",
            self.preemptions.clone(),
        );

        r.register("steps", "Steps of the engine", self.steps.clone());
        r.register(
            "step_batch",
            "Requests summed over steps: divided by steps, the mean batch",
            self.step_batch.clone(),
        );
        r.register(
            "prefill_tokens",
            "Prompt tokens that were computed",
            self.prefill_tokens.clone(),
        );
        r.register(
            "decode_tokens",
            "Tokens that were generated",
            self.generated_tokens.clone(),
        );
        r.register(
            "distinct_experts",
            "Distinct experts of a layer in a step, one observation per MoE layer and step",
            self.distinct.clone(),
        );
        r.register("distinct_experts_token_weighted_sum", "Sum over generated tokens of the mean over MoE layers of the distinct experts in the step that made them", self.distinct_token_weighted.clone());
        r.register(
            "distinct_experts_step_sum",
            "Sum over steps of the mean over MoE layers of the distinct experts",
            self.distinct_steps.clone(),
        );

        r.register(
            "handoffs_held_now",
            "Prefilled requests whose blocks wait for a decode worker",
            self.held_now.clone(),
        );
        r.register(
            "handoffs_held",
            "Prefilled requests whose blocks were held for a decode worker",
            self.held.clone(),
        );
        r.register(
            "handoffs_released",
            "Of these, let go because a peer had pulled them or would not",
            self.released.clone(),
        );
        r.register(
            "handoffs_expired",
            "Of these, let go because their lease ended",
            self.expired.clone(),
        );
        r.register(
            "handoffs_aborted",
            "Of these, let go because their client went away",
            self.aborted.clone(),
        );
        r.register(
            "handoffs_pulled",
            "Requests whose blocks were pulled from a prefill worker",
            self.pulled.clone(),
        );
        r.register(
            "handoffs_pulled_bytes",
            "Bytes of the blocks pulled",
            self.pulled_bytes.clone(),
        );
        r.register_with_unit(
            "handoff_pull",
            "Time to pull a request's blocks",
            Unit::Seconds,
            self.pull_seconds.clone(),
        );
        r.register(
            "handoffs_failed",
            "Pulls that failed, by reason",
            self.failed.clone(),
        );
    }

    /// A step was computed.
    pub(crate) fn step(&self, stats: &StepStats) {
        let mean = stats.distinct_experts_mean();
        self.steps.inc();
        self.step_batch.inc_by(stats.batch as u64);
        self.prefill_tokens.inc_by(stats.prefill_tokens as u64);
        self.generated_tokens.inc_by(stats.generated_tokens as u64);
        self.distinct_token_weighted
            .inc_by(mean * stats.generated_tokens as f64);
        self.distinct_steps.inc_by(mean);
        for &distinct in &stats.distinct_experts {
            self.distinct.observe(f64::from(distinct));
        }
    }

    /// Blocks are held for a peer from now on.
    pub(crate) fn held(&self) {
        self.held.inc();
        self.held_now.inc();
    }

    /// Held blocks were let go.
    pub(crate) fn released(&self, cause: ReleaseCause) {
        self.held_now.dec();
        match cause {
            ReleaseCause::Released => self.released.inc(),
            ReleaseCause::Expired => self.expired.inc(),
            ReleaseCause::Aborted => self.aborted.inc(),
        };
    }

    /// Blocks came from a peer.
    pub(crate) fn pulled(&self, bytes: usize, took: Duration) {
        self.pulled.inc();
        self.pulled_bytes.inc_by(bytes as u64);
        self.pull_seconds.observe(took.as_secs_f64());
    }

    /// Blocks did not come from a peer.
    pub(crate) fn pull_failed(&self, reason: &'static str) {
        self.failed.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// A request's first token came this long after the request.
    pub(crate) fn first_token(&self, after: Duration) {
        self.ttft.observe(after.as_secs_f64());
    }

    /// A request generated `later_tokens` tokens after its first in this time.
    pub(crate) fn last_token(&self, later_tokens: usize, took: Duration) {
        if later_tokens > 0 {
            self.tpot.observe(took.as_secs_f64() / later_tokens as f64);
        }
    }

    /// A completion ended.
    pub(crate) fn ended(&self, outcome: Outcome) {
        let outcome = match outcome {
            Outcome::Finished => "finished",
            Outcome::Failed => "failed",
            Outcome::Cancelled => "cancelled",
        };
        self.requests.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// The metrics in Prometheus' text form, with `usage` as the engine just gave it.
    pub(crate) fn render(&self, usage: &Usage) -> Result<String, std::fmt::Error> {
        let set = |gauge: &Gauge, value: u64| gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        set(&self.running, usage.running as u64);
        set(&self.waiting, usage.waiting as u64);
        set(&self.blocks_used, usage.blocks.used as u64);
        set(&self.blocks_cached, usage.blocks.cached as u64);
        set(&self.blocks_total, usage.blocks.total as u64);
        set(&self.blocks_pinned, usage.pinned as u64);
        // Under the lock, so that two readers at once do not both add what is new.
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let catch_up =
            |counter: &Counter, total: u64| counter.inc_by(total.saturating_sub(counter.get()));
        catch_up(&self.prompt_tokens, usage.prompt_tokens_total);
        catch_up(&self.cached_tokens, usage.cached_tokens_total);
        catch_up(&self.preemptions, usage.preemptions_total);
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

/// Upper bounds for a number of distinct experts: fine below, about 16 in all, the last one every expert.
fn distinct_buckets(experts: u32) -> Vec<f64> {
    let step = experts.div_ceil(16).max(1);
    let mut bounds: Vec<f64> = (1..)
        .map(|i| i * step)
        .take_while(|bound| *bound < experts)
        .map(f64::from)
        .collect();
    bounds.push(f64::from(experts.max(1)));
    bounds
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn sums_are_weighted_by_tokens() {
        let metrics = Metrics::new(64);
        for (generated, distinct) in [(2, vec![4, 6]), (1, vec![1, 3])] {
            metrics.step(&StepStats {
                batch: generated,
                rows: generated,
                generated_tokens: generated,
                distinct_experts: distinct,
                ..StepStats::default()
            });
        }
        let text = metrics.render(&Usage::default()).unwrap();
        for line in [
            "colocate_decode_tokens_total 3",
            "colocate_steps_total 2",
            "colocate_distinct_experts_token_weighted_sum 12.0",
            "colocate_distinct_experts_step_sum 7.0",
            "colocate_distinct_experts_count 4",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn buckets_end_with_all_experts() {
        assert_eq!(distinct_buckets(4), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(distinct_buckets(1), [1.0]);
        let many = distinct_buckets(128);
        assert_eq!((many.len(), many[0], many[15]), (16, 8.0, 128.0));
    }
}
