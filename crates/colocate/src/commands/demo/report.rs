//! The demo's result: medians over rounds, comparisons, a table.

use comfy_table::{CellAlignment, Table};
use routing::DecodePolicyName;
use serde::Serialize;
use workload::median;

use crate::output;

/// What one policy did in one round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Round {
    /// Requests that failed.
    pub(super) failed: usize,
    /// Median time to first token.
    pub(super) ttft_p50_ms: f64,
    /// Median time per output token.
    pub(super) tpot_p50_ms: f64,
    /// 99th percentile of the time per output token.
    pub(super) tpot_p99_ms: f64,
    /// Mean over generated tokens of the distinct experts per layer in the step that made them.
    pub(super) distinct_experts: f64,
    /// Mean tokens per decode step.
    pub(super) batch: f64,
    /// Time-weighted mean of the most loaded decode worker's requests in flight over the mean worker's.
    pub(super) max_over_mean: f64,
    /// Generated tokens per second, all workers together.
    pub(super) tokens_per_second: f64,
}

/// One policy's line: medians over its rounds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct PolicyReport {
    pub(super) policy: DecodePolicyName,
    /// Requests sent, all rounds together.
    pub(super) requests: usize,
    /// Requests that failed, all rounds together.
    pub(super) failed: usize,
    pub(super) ttft_p50_ms: f64,
    pub(super) tpot_p50_ms: f64,
    pub(super) tpot_p99_ms: f64,
    pub(super) distinct_experts_per_layer_step: f64,
    /// Change against round-robin in percent; absent when round-robin was not run.
    pub(super) distinct_experts_vs_round_robin_pct: Option<f64>,
    pub(super) tpot_p50_vs_round_robin_pct: Option<f64>,
    pub(super) decode_batch_mean: f64,
    pub(super) in_flight_max_over_mean: f64,
    pub(super) output_tokens_per_second: f64,
}

/// Locality against the load balancer with the lowest median TPOT.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct AgainstBest {
    pub(super) policy: DecodePolicyName,
    pub(super) tpot_p50_pct: f64,
    pub(super) tpot_p99_pct: f64,
    pub(super) distinct_experts_pct: f64,
}

/// The whole result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Report {
    pub(super) policies: Vec<PolicyReport>,
    /// Whether every request got the same tokens under every policy, in every round, and from one worker alone.
    pub(super) outputs_identical: bool,
    pub(super) decode_workers: usize,
    pub(super) expert_padding: usize,
    /// Requests in one round of one policy.
    pub(super) requests: usize,
    pub(super) model: String,
    pub(super) seed: u64,
    /// `task`, `language` or `mixed`.
    pub(super) workload: String,
    pub(super) rounds: usize,
    /// Requests in flight in a closed loop; absent in an open one.
    pub(super) concurrency: Option<usize>,
    /// Arrivals per second in an open loop; absent in a closed one.
    pub(super) rate: Option<f64>,
    pub(super) max_tokens: u32,
    /// Temperature at which tokens were drawn; 0 takes the likeliest.
    pub(super) temperature: f64,
    /// Absent when locality or every load balancer was left out.
    pub(super) locality_vs_best_load_balancer: Option<AgainstBest>,
    pub(super) map: MapReport,
    pub(super) seconds: Seconds,
}

/// Where the locality map came from.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct MapReport {
    pub(super) calibration_prompts: usize,
    pub(super) transform: locality::Transform,
    /// Rank correlation of prompt signatures with decode-time expert use (ELDR Eq. 1).
    pub(super) rho: Option<f64>,
    pub(super) layers_kept: usize,
    pub(super) layers: u32,
}

/// Where the time went, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Seconds {
    pub(super) start: f64,
    pub(super) calibrate: f64,
    pub(super) fit: f64,
    pub(super) rounds: f64,
    pub(super) total: f64,
}

/// Medians over each policy's rounds, and the changes against round-robin.
pub(super) fn summarise(
    rounds: &[(DecodePolicyName, Vec<Round>)],
    requests: usize,
) -> Vec<PolicyReport> {
    let mut policies: Vec<PolicyReport> = rounds
        .iter()
        .map(|(policy, rounds)| {
            let of = |field: fn(&Round) -> f64| {
                median(&rounds.iter().map(field).collect::<Vec<_>>()).unwrap_or(0.0)
            };
            PolicyReport {
                policy: *policy,
                requests: requests * rounds.len(),
                failed: rounds.iter().map(|round| round.failed).sum(),
                ttft_p50_ms: of(|round| round.ttft_p50_ms),
                tpot_p50_ms: of(|round| round.tpot_p50_ms),
                tpot_p99_ms: of(|round| round.tpot_p99_ms),
                distinct_experts_per_layer_step: of(|round| round.distinct_experts),
                distinct_experts_vs_round_robin_pct: None,
                tpot_p50_vs_round_robin_pct: None,
                decode_batch_mean: of(|round| round.batch),
                in_flight_max_over_mean: of(|round| round.max_over_mean),
                output_tokens_per_second: of(|round| round.tokens_per_second),
            }
        })
        .collect();
    let base = policies
        .iter()
        .find(|line| line.policy == DecodePolicyName::RoundRobin)
        .map(|line| (line.distinct_experts_per_layer_step, line.tpot_p50_ms));
    if let Some((distinct, tpot)) = base {
        for line in &mut policies {
            line.distinct_experts_vs_round_robin_pct =
                change(line.distinct_experts_per_layer_step, distinct);
            line.tpot_p50_vs_round_robin_pct = change(line.tpot_p50_ms, tpot);
        }
    }
    policies
}

/// Locality against the best load balancer: the policy with the lowest median TPOT of those that look at neither experts nor labels.
pub(super) fn against_best(policies: &[PolicyReport]) -> Option<AgainstBest> {
    let locality = policies
        .iter()
        .find(|line| line.policy == DecodePolicyName::Locality)?;
    let best = policies
        .iter()
        .filter(|line| {
            !matches!(
                line.policy,
                DecodePolicyName::Locality | DecodePolicyName::Domain
            )
        })
        .min_by(|a, b| a.tpot_p50_ms.total_cmp(&b.tpot_p50_ms))?;
    Some(AgainstBest {
        policy: best.policy,
        tpot_p50_pct: change(locality.tpot_p50_ms, best.tpot_p50_ms)?,
        tpot_p99_pct: change(locality.tpot_p99_ms, best.tpot_p99_ms)?,
        distinct_experts_pct: change(
            locality.distinct_experts_per_layer_step,
            best.distinct_experts_per_layer_step,
        )?,
    })
}

/// The change from `base` to `value` in percent, or none where `base` is 0.
fn change(value: f64, base: f64) -> Option<f64> {
    (base > 0.0).then(|| (value / base - 1.0) * 100.0)
}

impl Report {
    /// Whether all requests were answered, and answered alike.
    pub(super) fn passed(&self) -> bool {
        self.outputs_identical && self.policies.iter().all(|line| line.failed == 0)
    }

    /// The report for people.
    pub(super) fn text(&self) -> String {
        let load = match (self.concurrency, self.rate) {
            (Some(concurrency), _) => format!("{concurrency} in flight"),
            (_, Some(rate)) => format!("{rate} arriving per second"),
            _ => String::new(),
        };
        let mut text = format!(
            "\n1 prefill and {} decode workers serving {}; {} workload, {} requests a round, {load}, {}; temperature {}, seed {}\n",
            self.decode_workers,
            self.model,
            self.workload,
            self.requests,
            count(self.rounds, "round"),
            self.temperature,
            self.seed,
        );
        if self.expert_padding > 1 {
            text.push_str(&format!(
                "Each expert is padded with zeros to {} times its size: the same outputs, {} times the bytes, as in a larger model.\n",
                self.expert_padding, self.expert_padding
            ));
        }
        text.push_str(&self.table().to_string());
        text.push_str("\nFigures are medians over rounds; experts are distinct experts per layer and decode step, averaged over generated tokens.\n");
        if let Some(best) = &self.locality_vs_best_load_balancer {
            text.push_str(&format!(
                "Locality against the best load balancer ({}): TPOT p50 {}, p99 {}, distinct experts {}.\n",
                best.policy,
                percent(Some(best.tpot_p50_pct)),
                percent(Some(best.tpot_p99_pct)),
                percent(Some(best.distinct_experts_pct)),
            ));
        }
        let failed: usize = self.policies.iter().map(|line| line.failed).sum();
        text.push_str(match (self.outputs_identical, failed) {
            (true, 0) => "Outputs: identical, token by token, under every policy and from one worker alone.\n",
            (true, _) => "Outputs: identical where requests were answered.\n",
            (false, _) => "Outputs: DIFFERENT between policies or from one worker alone.\n",
        });
        if failed > 0 {
            text.push_str(&format!("Failed: {}.\n", count(failed, "request")));
        }
        let rho = self
            .map
            .rho
            .map_or_else(String::new, |rho| format!(", rho {rho:.2}"));
        text.push_str(&format!(
            "Map: {} of {} calibration prompts{rho}, {} of {} layers. {:.0} s in all: {:.1} s starting, {:.1} s calibrating, {:.2} s fitting, {:.0} s serving.\n",
            self.map.transform,
            self.map.calibration_prompts,
            self.map.layers_kept,
            self.map.layers,
            self.seconds.total,
            self.seconds.start,
            self.seconds.calibrate,
            self.seconds.fit,
            self.seconds.rounds,
        ));
        text
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(output::TABLE);
        table.set_header([
            "policy",
            "TTFT p50\nms",
            "TPOT p50\nms",
            "TPOT p99\nms",
            "experts\nper layer",
            "against\nround-robin",
            "TPOT p50 against\nround-robin",
            "decode\nbatch",
            "load\nmax/mean",
            "failed",
        ]);
        for line in &self.policies {
            table.add_row([
                line.policy.to_string(),
                format!("{:.1}", line.ttft_p50_ms),
                format!("{:.2}", line.tpot_p50_ms),
                format!("{:.2}", line.tpot_p99_ms),
                format!("{:.2}", line.distinct_experts_per_layer_step),
                percent(line.distinct_experts_vs_round_robin_pct),
                percent(line.tpot_p50_vs_round_robin_pct),
                format!("{:.1}", line.decode_batch_mean),
                format!("{:.2}", line.in_flight_max_over_mean),
                line.failed.to_string(),
            ]);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }
}

fn percent(change: Option<f64>) -> String {
    // Adding 0 turns -0.0 into 0.0.
    change.map_or_else(
        || "-".into(),
        |change| format!("{:+.1} %", (change * 10.0).round() / 10.0 + 0.0),
    )
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use DecodePolicyName::{Domain, LeastLoaded, Locality, RoundRobin};

    fn round(tpot: f64, distinct: f64) -> Round {
        Round {
            failed: 0,
            ttft_p50_ms: 50.0,
            tpot_p50_ms: tpot,
            tpot_p99_ms: 2.0 * tpot,
            distinct_experts: distinct,
            batch: 9.0,
            max_over_mean: 1.1,
            tokens_per_second: 1000.0,
        }
    }

    fn report(rounds: &[(DecodePolicyName, Vec<Round>)], identical: bool) -> Report {
        let policies = summarise(rounds, 100);
        Report {
            locality_vs_best_load_balancer: against_best(&policies),
            policies,
            outputs_identical: identical,
            decode_workers: 8,
            expert_padding: 1,
            requests: 100,
            model: "demo".into(),
            seed: 1,
            workload: "mixed".into(),
            rounds: 3,
            concurrency: Some(96),
            rate: None,
            max_tokens: 64,
            temperature: 0.8,
            map: MapReport {
                calibration_prompts: 200,
                transform: locality::Transform::Count,
                rho: Some(0.7),
                layers_kept: 3,
                layers: 8,
            },
            seconds: Seconds::default(),
        }
    }

    #[test]
    fn medians_and_changes() {
        let rounds = [
            (
                RoundRobin,
                vec![round(10.0, 20.0), round(30.0, 20.0), round(12.0, 20.0)],
            ),
            (LeastLoaded, vec![round(11.0, 19.0); 3]),
            (Domain, vec![round(5.0, 10.0); 3]),
            (Locality, vec![round(9.0, 16.0); 3]),
        ];
        let report = report(&rounds, true);
        let locality = &report.policies[3];
        assert_eq!(report.policies[0].tpot_p50_ms, 12.0);
        assert_eq!(report.policies[0].requests, 300);
        assert!((locality.distinct_experts_vs_round_robin_pct.unwrap() + 20.0).abs() < 1e-9);
        assert!((locality.tpot_p50_vs_round_robin_pct.unwrap() + 25.0).abs() < 1e-9);
        let best = report.locality_vs_best_load_balancer.as_ref().unwrap();
        assert_eq!(best.policy, LeastLoaded);
        assert!(report.passed());
        assert!(report.text().contains("locality"), "{}", report.text());
        assert!(!report.text().contains("padded"));
    }

    #[test]
    fn without_round_robin_there_is_nothing_to_compare_with() {
        let report = report(&[(Locality, vec![round(9.0, 16.0)])], true);
        assert_eq!(report.policies[0].tpot_p50_vs_round_robin_pct, None);
        assert_eq!(report.locality_vs_best_load_balancer, None);
    }

    #[test]
    fn a_failed_request_or_another_output_fails_the_run() {
        assert!(!report(&[(RoundRobin, vec![round(1.0, 1.0)])], false).passed());
        let failed = Round {
            failed: 2,
            ..round(1.0, 1.0)
        };
        let report = report(&[(RoundRobin, vec![round(1.0, 1.0), failed])], true);
        assert!(!report.passed());
        assert!(report.text().contains("Failed: 2 requests."));
    }

    #[test]
    fn the_documented_fields_are_there() {
        let json =
            serde_json::to_value(report(&[(RoundRobin, vec![round(1.0, 1.0)])], true)).unwrap();
        for field in [
            "policies",
            "outputs_identical",
            "decode_workers",
            "expert_padding",
            "requests",
            "model",
            "seed",
        ] {
            assert!(json.get(field).is_some(), "{field}");
        }
        for field in [
            "policy",
            "requests",
            "failed",
            "ttft_p50_ms",
            "tpot_p50_ms",
            "tpot_p99_ms",
            "distinct_experts_per_layer_step",
            "distinct_experts_vs_round_robin_pct",
            "tpot_p50_vs_round_robin_pct",
            "decode_batch_mean",
            "in_flight_max_over_mean",
        ] {
            assert!(json["policies"][0].get(field).is_some(), "{field}");
        }
        assert_eq!(json["policies"][0]["policy"], "round_robin");
    }
}
