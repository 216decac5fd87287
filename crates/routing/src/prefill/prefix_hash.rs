//! Prompts that begin alike go to one worker, whose prefix cache then serves them, unless it is busier than its share.

use super::{PrefillDecision, PrefillPolicy, PrefillReason, Ring};
use crate::select::{Least, eligible, loads};
use crate::{PREFIX_BYTES, PrefillFacts, PrefillPolicyName, WorkerFacts};

/// A worker keeps its prefixes while its load is at most this many times the mean load, the new request included.
pub const LOAD_FACTOR: f64 = 1.25;

/// Prefix-hash routing with bounded load (ELDR, arXiv 2607.00466, prefill routing): hash the prompt's first 1,024
/// bytes onto a ring, keep that worker while `load <= 1.25 * (sum of loads + 1) / workers`, else take the least loaded.
///
/// Sum and workers are over the eligible ones. If the owner is not among them, the next eligible worker on the ring
/// stands in for it, so that a worker's outage scatters its prefixes over the others and moves no other prefix.
#[derive(Debug)]
pub struct PrefixHash {
    ring: Ring,
    least: Least,
}

impl PrefixHash {
    /// The policy over workers of these names, in pool order.
    #[must_use]
    pub fn new<S: AsRef<str>>(workers: &[S]) -> Self {
        Self {
            ring: Ring::new(workers),
            least: Least::default(),
        }
    }
}

impl PrefillPolicy for PrefixHash {
    fn name(&self) -> PrefillPolicyName {
        PrefillPolicyName::PrefixHash
    }

    fn choose(
        &mut self,
        request: &PrefillFacts<'_>,
        workers: &[WorkerFacts],
    ) -> Option<PrefillDecision> {
        let key = &request.prompt[..request.prompt.len().min(PREFIX_BYTES)];
        let owner = self.ring.owner(key);
        let home = self
            .ring
            .walk(key)
            .find(|&index| workers.get(index).is_some_and(WorkerFacts::eligible));
        let (worker, reason) = match home {
            Some(home) if within_share(workers, home) => {
                let reason = if owner == Some(home) {
                    PrefillReason::PrefixOwner
                } else {
                    PrefillReason::PrefixSuccessor
                };
                (home, reason)
            }
            Some(_) => (self.least.pick(workers)?, PrefillReason::PrefixOverloaded),
            // The pool has workers that the ring does not know.
            None => (self.least.pick(workers)?, PrefillReason::LeastLoaded),
        };
        Some(PrefillDecision {
            worker,
            policy: self.name(),
            reason,
            loads: loads(workers),
        })
    }
}

fn within_share(workers: &[WorkerFacts], worker: usize) -> bool {
    let (count, sum) = eligible(workers).fold((0u32, 0f64), |(count, sum), index| {
        (count + 1, sum + f64::from(workers[index].in_flight))
    });
    f64::from(workers[worker].in_flight) <= LOAD_FACTOR * (sum + 1.0) / f64::from(count.max(1))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn check(loads: &[u32], bound_holds: bool) {
        let names: Vec<String> = (0..loads.len())
            .map(|index| format!("http://10.0.0.{index}:8000"))
            .collect();
        let mut policy = PrefixHash::new(&names);
        let owner = Ring::new(&names).owner(b"once upon a time").unwrap();
        // Put the first load on the owner.
        let mut placed = loads.to_vec();
        placed.swap(0, owner);
        let workers: Vec<_> = placed.iter().map(|&load| WorkerFacts::new(load)).collect();
        let decision = policy
            .choose(
                &PrefillFacts {
                    prompt: b"once upon a time",
                },
                &workers,
            )
            .unwrap();
        if bound_holds {
            assert_eq!(
                (decision.worker, decision.reason),
                (owner, PrefillReason::PrefixOwner)
            );
        } else {
            assert_eq!(decision.reason, PrefillReason::PrefixOverloaded);
            assert_eq!(
                workers[decision.worker].in_flight,
                *loads.iter().min().unwrap()
            );
        }
    }

    #[test]
    fn the_bound_is_one_and_a_quarter_of_the_mean_with_the_new_request() {
        check(&[0, 0, 0, 0], true);
        check(&[5, 3, 3, 4], true); // 5 <= 1.25 * 16 / 4
        check(&[5, 3, 3, 3], false); // 5 > 1.25 * 15 / 4
        check(&[1, 0], true); // 1 <= 1.25 * 2 / 2
        check(&[2, 0], false); // 2 > 1.25 * 3 / 2
    }

    #[test]
    fn only_the_first_1024_bytes_count() {
        let mut policy = PrefixHash::new(&["a", "b", "c", "d", "e"]);
        let workers = [WorkerFacts::new(0); 5];
        let mut long = vec![b'x'; PREFIX_BYTES];
        let first = policy
            .choose(&PrefillFacts { prompt: &long }, &workers)
            .unwrap()
            .worker;
        for tail in 0..20u8 {
            long.truncate(PREFIX_BYTES);
            long.push(tail);
            assert_eq!(
                policy
                    .choose(&PrefillFacts { prompt: &long }, &workers)
                    .unwrap()
                    .worker,
                first
            );
        }
    }

    #[test]
    fn an_absent_owner_is_stood_in_for_and_others_keep_theirs() {
        let mut policy = PrefixHash::new(&["a", "b", "c", "d"]);
        let all = [WorkerFacts::new(0); 4];
        let mut without = all;
        without[2] = without[2].unhealthy();
        for key in 0..200u32 {
            let prompt = key.to_le_bytes();
            let before = policy
                .choose(&PrefillFacts { prompt: &prompt }, &all)
                .unwrap();
            let after = policy
                .choose(&PrefillFacts { prompt: &prompt }, &without)
                .unwrap();
            if before.worker == 2 {
                assert_ne!(after.worker, 2);
                assert_eq!(after.reason, PrefillReason::PrefixSuccessor);
            } else {
                assert_eq!(after.worker, before.worker);
            }
        }
    }
}
