//! The oracle baseline: the client names the request's domain, and each domain has its own workers.

use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::xxh3_64;

use super::load::plain;
use super::{DecodeDecision, DecodePolicy, DecodeReason};
use crate::select::{Least, eligible};
use crate::{DecodeFacts, DecodePolicyName, WorkerFacts};

/// Labels that are remembered. Further ones are placed by their hash, so that clients cannot fill the memory; how long a
/// label may be is the caller's to bound.
pub const MAX_DOMAINS: usize = 1024;

/// Requests go to the workers of their domain, the least loaded of them.
///
/// The assignment follows from the order in which domains first appear, `D` of them so far over `W` workers:
///
/// - While `D <= W`, worker `w` serves domain `w mod D`: every worker is used, and no two domains share one. A new
///   domain takes its workers from the others.
/// - From then on the first `W` domains keep a worker each, and every further domain joins for good the worker that has
///   the fewest domains, then the fewest requests so far, then the lowest index.
///
/// A request without a label, or whose domain has no eligible worker, goes to the least loaded of all.
#[derive(Debug, Default)]
pub struct Domain {
    /// Label to order of first appearance.
    order: FxHashMap<String, usize>,
    /// Worker of the domains beyond the first `W`, in order of appearance.
    joined: Vec<usize>,
    /// Requests so far by worker.
    served: Vec<u64>,
    least: Least,
}

impl Domain {
    /// The workers that a label is assigned to, which remembers the label if it is new.
    fn workers_of(&mut self, label: &str, workers: usize) -> Assigned {
        let domain = match self.order.get(label) {
            Some(&domain) => domain,
            None if self.order.len() < MAX_DOMAINS => {
                let domain = self.order.len();
                self.order.insert(label.to_owned(), domain);
                domain
            }
            None => {
                let hash = xxh3_64(label.as_bytes()) % workers as u64;
                return Assigned::One(usize::try_from(hash).unwrap_or_default());
            }
        };
        if self.order.len() <= workers {
            return Assigned::Every {
                domain,
                domains: self.order.len(),
            };
        }
        if domain < workers {
            return Assigned::One(domain);
        }
        while self.joined.len() <= domain - workers {
            let next = self.emptiest(workers);
            self.joined.push(next);
        }
        // A pool that shrank may have lost the worker.
        Assigned::One(self.joined[domain - workers] % workers)
    }

    fn emptiest(&self, workers: usize) -> usize {
        let mut domains = vec![1usize; workers];
        for &worker in self.joined.iter().filter(|&&worker| worker < workers) {
            domains[worker] += 1;
        }
        (0..workers)
            .min_by_key(|&worker| {
                (
                    domains[worker],
                    self.served.get(worker).copied().unwrap_or(0),
                    worker,
                )
            })
            .unwrap_or(0)
    }
}

/// Which workers serve a domain.
#[derive(Debug, Clone, Copy)]
enum Assigned {
    /// This one.
    One(usize),
    /// Every worker whose index is `domain` modulo `domains`.
    Every { domain: usize, domains: usize },
}

impl Assigned {
    fn includes(self, worker: usize) -> bool {
        match self {
            Self::One(only) => worker == only,
            Self::Every { domain, domains } => worker % domains == domain,
        }
    }
}

impl DecodePolicy for Domain {
    fn name(&self) -> DecodePolicyName {
        DecodePolicyName::Domain
    }

    fn choose(
        &mut self,
        request: &DecodeFacts<'_>,
        workers: &[WorkerFacts],
    ) -> Option<DecodeDecision> {
        if workers.is_empty() {
            return None;
        }
        let (worker, reason, band) = match request.domain.filter(|label| !label.is_empty()) {
            None => (
                self.least.pick(workers)?,
                DecodeReason::DomainMissing,
                Vec::new(),
            ),
            Some(label) => {
                let assigned = self.workers_of(label, workers.len());
                let band: Vec<usize> = eligible(workers)
                    .filter(|&worker| assigned.includes(worker))
                    .collect();
                match self.least.pick_among(workers, band.iter().copied()) {
                    Some(worker) => (worker, DecodeReason::Domain, band),
                    None => (
                        self.least.pick(workers)?,
                        DecodeReason::DomainUnavailable,
                        band,
                    ),
                }
            }
        };
        if self.served.len() < workers.len() {
            self.served.resize(workers.len(), 0);
        }
        self.served[worker] += 1;
        Some(DecodeDecision {
            band,
            ..plain(worker, self.name(), reason, workers)
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn ask(policy: &mut Domain, label: &str, workers: &[WorkerFacts]) -> DecodeDecision {
        policy
            .choose(
                &DecodeFacts {
                    domain: Some(label),
                    counts: None,
                },
                workers,
            )
            .unwrap()
    }

    #[test]
    fn fewer_domains_than_workers_share_all_workers() {
        let workers = [WorkerFacts::new(0); 8];
        let mut policy = Domain::default();
        for label in ["code", "law", "medicine"] {
            ask(&mut policy, label, &workers);
        }
        assert_eq!(ask(&mut policy, "code", &workers).band, [0, 3, 6]);
        assert_eq!(ask(&mut policy, "law", &workers).band, [1, 4, 7]);
        assert_eq!(ask(&mut policy, "medicine", &workers).band, [2, 5]);
    }

    #[test]
    fn more_domains_than_workers_are_spread_and_stay() {
        let workers = [WorkerFacts::new(0); 3];
        let labels: Vec<String> = (0..8).map(|domain| format!("domain {domain}")).collect();
        let mut policy = Domain::default();
        for label in &labels {
            ask(&mut policy, label, &workers);
        }
        let first: Vec<usize> = labels
            .iter()
            .map(|label| ask(&mut policy, label, &workers).worker)
            .collect();
        let second: Vec<usize> = labels
            .iter()
            .map(|label| ask(&mut policy, label, &workers).worker)
            .collect();
        assert_eq!(first, second);
        let mut per_worker = [0; 3];
        for worker in first {
            per_worker[worker] += 1;
        }
        per_worker.sort_unstable();
        assert_eq!(per_worker, [2, 3, 3]);
    }

    #[test]
    fn without_label_or_worker_the_least_loaded_serves() {
        let workers = [WorkerFacts::new(5), WorkerFacts::new(1)];
        let mut policy = Domain::default();
        let none = policy.choose(&DecodeFacts::default(), &workers).unwrap();
        assert_eq!((none.worker, none.reason), (1, DecodeReason::DomainMissing));
        ask(&mut policy, "code", &workers);
        ask(&mut policy, "law", &workers);
        let down = [WorkerFacts::new(5), WorkerFacts::new(1).unhealthy()];
        let decision = ask(&mut policy, "law", &down);
        assert_eq!(
            (decision.worker, decision.reason),
            (0, DecodeReason::DomainUnavailable)
        );
    }

    #[test]
    fn labels_are_bounded() {
        let workers = [WorkerFacts::new(0); 4];
        let mut policy = Domain::default();
        for label in 0..MAX_DOMAINS + 100 {
            ask(&mut policy, &label.to_string(), &workers);
        }
        assert_eq!(policy.order.len(), MAX_DOMAINS);
        let late = ask(&mut policy, "late", &workers);
        assert_eq!(ask(&mut policy, "late", &workers).worker, late.worker);
    }
}
