//! What is counted, for Prometheus. Labels are bounded: routes, statuses, reasons and the configured workers.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use routing::{DecodeDecision, PrefillDecision};

use crate::registry::Worker;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    route: &'static str,
    status: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    route: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SideLabels {
    side: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkerLabels {
    side: &'static str,
    worker: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    side: &'static str,
    worker: String,
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DecisionLabels {
    side: &'static str,
    policy: &'static str,
    reason: &'static str,
    worker: String,
}

type Seconds<L> = Family<L, Histogram, fn() -> Histogram>;

/// Every counter of the gateway.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    request_seconds: Seconds<RouteLabels>,
    ttft: Seconds<RouteLabels>,
    tpot: Histogram,
    itl: Histogram,
    prefill: Histogram,
    handoff: Histogram,
    decision_seconds: Seconds<SideLabels>,
    decisions: Family<DecisionLabels, Counter>,
    failures: Family<FailureLabels, Counter>,
    prefilled_again: Counter,
    released: Counter,
    coverage: Histogram,
    in_flight: Family<WorkerLabels, Gauge>,
    healthy: Family<WorkerLabels, Gauge>,
}

/// 1 ms to about two minutes.
fn of_requests() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 18))
}

/// 0.25 ms to about half a second, finer.
fn of_tokens() -> Histogram {
    Histogram::new(exponential_buckets(0.000_25, 1.5, 20))
}

/// 1 us to about 30 ms.
fn of_decisions() -> Histogram {
    Histogram::new(exponential_buckets(0.000_001, 2.0, 16))
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("colocate_gateway"),
            requests: Family::default(),
            request_seconds: Family::new_with_constructor(of_requests),
            ttft: Family::new_with_constructor(of_requests),
            tpot: of_tokens(),
            itl: of_tokens(),
            prefill: of_requests(),
            handoff: of_requests(),
            decision_seconds: Family::new_with_constructor(of_decisions),
            decisions: Family::default(),
            failures: Family::default(),
            prefilled_again: Counter::default(),
            released: Counter::default(),
            coverage: Histogram::new([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0]),
            in_flight: Family::default(),
            healthy: Family::default(),
        };
        let r = &mut metrics.registry;
        r.register(
            "requests",
            "Requests by route and final status; 499 is a client that went away",
            metrics.requests.clone(),
        );
        let seconds = |r: &mut Registry, name: &str, help: &str, metric: Seconds<RouteLabels>| {
            r.register_with_unit(name, help, Unit::Seconds, metric);
        };
        seconds(
            r,
            "request",
            "Whole requests, arrival to last byte",
            metrics.request_seconds.clone(),
        );
        seconds(
            r,
            "ttft",
            "Arrival to the first streamed token",
            metrics.ttft.clone(),
        );
        let plain = |r: &mut Registry, name: &str, help: &str, metric: &Histogram| {
            r.register_with_unit(name, help, Unit::Seconds, metric.clone());
        };
        plain(
            r,
            "tpot",
            "Mean time per token after the first of a stream",
            &metrics.tpot,
        );
        plain(r, "itl", "Gap between two pieces of a stream", &metrics.itl);
        plain(r, "prefill", "Time a prefill took", &metrics.prefill);
        plain(
            r,
            "handoff",
            "Prefill reply to the decode worker's first byte or whole reply",
            &metrics.handoff,
        );
        r.register_with_unit(
            "decision",
            "Time a placement took, waiting for its turn included",
            Unit::Seconds,
            metrics.decision_seconds.clone(),
        );
        r.register(
            "decisions",
            "Placements by policy, reason and worker",
            metrics.decisions.clone(),
        );
        r.register(
            "failures",
            "Failed requests to a worker by kind",
            metrics.failures.clone(),
        );
        r.register(
            "prefilled_again",
            "Requests that went through prefill again because their decode worker failed",
            metrics.prefilled_again.clone(),
        );
        r.register(
            "released",
            "Handoffs whose blocks were given back unused",
            metrics.released.clone(),
        );
        r.register(
            "counts_coverage",
            "Part of a prompt's tokens that its expert counts cover",
            metrics.coverage.clone(),
        );
        r.register(
            "in_flight",
            "Requests in flight on a worker",
            metrics.in_flight.clone(),
        );
        r.register(
            "worker_healthy",
            "1 while a worker is believed to be up",
            metrics.healthy.clone(),
        );
        metrics
    }

    pub(crate) fn request(&self, route: &'static str, status: u16, took: Duration) {
        self.requests
            .get_or_create(&RequestLabels {
                route,
                status: u32::from(status),
            })
            .inc();
        self.request_seconds
            .get_or_create(&RouteLabels { route })
            .observe(took.as_secs_f64());
    }

    pub(crate) fn ttft(&self, route: &'static str, took: Duration) {
        self.ttft
            .get_or_create(&RouteLabels { route })
            .observe(took.as_secs_f64());
    }

    pub(crate) fn itl(&self, gap: Duration) {
        self.itl.observe(gap.as_secs_f64());
    }

    pub(crate) fn tpot(&self, mean: Duration) {
        self.tpot.observe(mean.as_secs_f64());
    }

    pub(crate) fn prefill(&self, took: Duration) {
        self.prefill.observe(took.as_secs_f64());
    }

    pub(crate) fn handoff(&self, took: Duration) {
        self.handoff.observe(took.as_secs_f64());
    }

    pub(crate) fn prefill_decision(
        &self,
        worker: &Worker,
        decision: &PrefillDecision,
        took: Duration,
    ) {
        self.decision(
            worker,
            decision.policy.as_str(),
            decision.reason.as_str(),
            took,
        );
    }

    pub(crate) fn decode_decision(
        &self,
        worker: &Worker,
        decision: &DecodeDecision,
        took: Duration,
    ) {
        self.decision(
            worker,
            decision.policy.as_str(),
            decision.reason.as_str(),
            took,
        );
        if let Some(coverage) = decision.coverage {
            self.coverage.observe(coverage);
        }
    }

    fn decision(
        &self,
        worker: &Worker,
        policy: &'static str,
        reason: &'static str,
        took: Duration,
    ) {
        let side = worker.side.as_str();
        self.decision_seconds
            .get_or_create(&SideLabels { side })
            .observe(took.as_secs_f64());
        let labels = DecisionLabels {
            side,
            policy,
            reason,
            worker: worker.name.clone(),
        };
        self.decisions.get_or_create(&labels).inc();
    }

    pub(crate) fn failure(&self, worker: &Worker, kind: &'static str) {
        let labels = FailureLabels {
            side: worker.side.as_str(),
            worker: worker.name.clone(),
            kind,
        };
        self.failures.get_or_create(&labels).inc();
    }

    pub(crate) fn prefilled_again(&self) {
        self.prefilled_again.inc();
    }

    pub(crate) fn released(&self) {
        self.released.inc();
    }

    /// Everything in the text format, loads and health as they are now.
    pub(crate) fn encode<'a>(
        &self,
        workers: impl Iterator<Item = &'a Worker>,
    ) -> Result<String, std::fmt::Error> {
        for worker in workers {
            let labels = WorkerLabels {
                side: worker.side.as_str(),
                worker: worker.name.clone(),
            };
            self.in_flight
                .get_or_create(&labels)
                .set(i64::from(worker.in_flight()));
            self.healthy
                .get_or_create(&labels)
                .set(i64::from(worker.healthy()));
        }
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
