//! What every policy owes its caller, for any pool: never a worker that is out, the same decisions for the same seed,
//! an answer while anyone is left.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use routing::prefill::Ring;
use routing::{
    DecodeDecision, DecodeFacts, DecodeOptions, DecodePolicy, DecodePolicyName, PrefillFacts,
    PrefillPolicyName, WorkerFacts,
};

fn worker() -> impl Strategy<Value = WorkerFacts> {
    (
        0u32..40,
        prop::bool::weighted(0.8),
        prop::bool::weighted(0.1),
    )
        .prop_map(|(in_flight, healthy, excluded)| WorkerFacts {
            in_flight,
            healthy,
            excluded,
        })
}

/// A pool of one size whose facts change from request to request, and the requests' domains.
fn sequence() -> impl Strategy<Value = Vec<(Vec<WorkerFacts>, Option<String>)>> {
    (1usize..9).prop_flat_map(|workers| {
        let facts = prop::collection::vec(worker(), workers);
        let domain = prop::option::of("[a-f]");
        prop::collection::vec((facts, domain), 1..60)
    })
}

fn load_policies(seed: u64) -> impl Iterator<Item = Box<dyn DecodePolicy>> {
    DecodePolicyName::ALL
        .iter()
        .filter(|&&name| name != DecodePolicyName::Locality)
        .map(move |&name| {
            routing::decode_policy(
                name,
                DecodeOptions {
                    seed,
                    ..DecodeOptions::default()
                },
            )
            .unwrap()
        })
}

fn run(
    policy: &mut dyn DecodePolicy,
    requests: &[(Vec<WorkerFacts>, Option<String>)],
) -> Vec<Option<DecodeDecision>> {
    requests
        .iter()
        .map(|(workers, domain)| {
            policy.choose(
                &DecodeFacts {
                    counts: None,
                    domain: domain.as_deref(),
                },
                workers,
            )
        })
        .collect()
}

proptest! {
    #[test]
    fn decode_policies_choose_an_eligible_worker_whenever_there_is_one(requests in sequence(), seed: u64) {
        for mut policy in load_policies(seed) {
            for (decision, (workers, _)) in run(policy.as_mut(), &requests).iter().zip(&requests) {
                match decision {
                    Some(decision) => {
                        prop_assert!(workers[decision.worker].eligible(), "{:?}", decision);
                        prop_assert_eq!(decision.policy, policy.name());
                        prop_assert!(decision.band.iter().all(|&worker| workers[worker].eligible()));
                        prop_assert!(decision.band.is_empty() || decision.band.contains(&decision.worker));
                    }
                    None => prop_assert!(!workers.iter().any(WorkerFacts::eligible)),
                }
            }
        }
    }

    #[test]
    fn the_same_seed_and_facts_give_the_same_decisions(requests in sequence(), seed: u64) {
        for (mut one, mut other) in load_policies(seed).zip(load_policies(seed)) {
            prop_assert_eq!(run(one.as_mut(), &requests), run(other.as_mut(), &requests));
        }
    }

    #[test]
    fn prefill_policies_choose_an_eligible_worker_whenever_there_is_one(
        requests in sequence(),
        prompts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 60),
    ) {
        let names: Vec<String> = (0..requests[0].0.len()).map(|worker| format!("http://worker-{worker}")).collect();
        for &name in PrefillPolicyName::ALL {
            let mut policy = routing::prefill_policy(name, &names);
            for ((workers, _), prompt) in requests.iter().zip(&prompts) {
                match policy.choose(&PrefillFacts { prompt }, workers) {
                    Some(decision) => prop_assert!(workers[decision.worker].eligible(), "{:?}", decision),
                    None => prop_assert!(!workers.iter().any(WorkerFacts::eligible)),
                }
            }
        }
    }

    #[test]
    fn a_worker_that_joins_the_ring_only_takes_keys(workers in 1usize..16, keys in prop::collection::vec(any::<u64>(), 200)) {
        let names: Vec<String> = (0..=workers).map(|worker| format!("http://worker-{worker}")).collect();
        let before = Ring::new(&names[..workers]);
        let after = Ring::new(&names);
        for key in keys {
            let key = key.to_le_bytes();
            let (old, new) = (before.owner(&key).unwrap(), after.owner(&key).unwrap());
            prop_assert!(new == old || new == workers, "a key moved from {} to {}", old, new);
        }
    }

    #[test]
    fn a_worker_that_leaves_the_ring_only_loses_its_keys(
        workers in 2usize..16,
        leaver in 0usize..16,
        keys in prop::collection::vec(any::<u64>(), 200),
    ) {
        let leaver = leaver % workers;
        let names: Vec<String> = (0..workers).map(|worker| format!("http://worker-{worker}")).collect();
        let rest: Vec<&String> = names.iter().enumerate().filter(|&(worker, _)| worker != leaver).map(|(_, name)| name).collect();
        let (before, after) = (Ring::new(&names), Ring::new(&rest));
        for key in keys {
            let key = key.to_le_bytes();
            let old = before.owner(&key).unwrap();
            if old != leaver {
                prop_assert_eq!(&names[old], rest[after.owner(&key).unwrap()]);
            }
        }
    }
}

#[test]
fn a_worker_that_joins_the_ring_takes_its_share() {
    let names: Vec<String> = (0..9)
        .map(|worker| format!("http://10.0.0.{worker}:8000"))
        .collect();
    let (before, after) = (Ring::new(&names[..8]), Ring::new(&names));
    let keys = 20_000u32;
    let moved = (0..keys)
        .filter(|key| before.owner(&key.to_le_bytes()) != after.owner(&key.to_le_bytes()))
        .count();
    let part = moved as f64 / f64::from(keys);
    assert!(
        (part - 1.0 / 9.0).abs() < 0.04,
        "{part} of the keys moved, expected about 1/9"
    );
}

#[test]
fn the_ring_is_even() {
    let names: Vec<String> = (0..8)
        .map(|worker| format!("http://10.0.0.{worker}:8000"))
        .collect();
    let ring = Ring::new(&names);
    let mut keys = [0u32; 8];
    for key in 0..40_000u32 {
        keys[ring.owner(&key.to_le_bytes()).unwrap()] += 1;
    }
    for count in keys {
        assert!(
            (3_500..6_500).contains(&count),
            "{keys:?}: expected about 5,000 each"
        );
    }
}
