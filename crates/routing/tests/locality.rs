//! The locality policy over a map that was really fitted: four domains of synthetic prompts, four workers.

#![allow(clippy::unwrap_used)]

use std::sync::LazyLock;

use ::locality::{Band, FitConfig, LocalityMap, MaskChoice, Transform};
use experts::{
    CalibrationFile, CalibrationHeader, CalibrationRecord, ExpertCounts, ModelShape, PromptCounts,
};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use routing::decode::{Locality, LocalityConfig};
use routing::{DecodeFacts, DecodePolicy, DecodeReason, PolicyError, WorkerFacts};

const SHAPE: ModelShape = ModelShape {
    layers: 4,
    experts: 32,
    top_k: 4,
};
const TOKENS: u32 = 48;

/// A prompt whose tokens keep to the eight experts of its domain, but for one in ten.
fn prompt(domain: u16, seed: u64) -> ExpertCounts {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut counts = ExpertCounts::zeros(SHAPE);
    for layer in 0..SHAPE.layers as usize {
        for _ in 0..TOKENS {
            let mut ids: Vec<u16> = Vec::new();
            while ids.len() < SHAPE.top_k as usize {
                let id = if rng.random_bool(0.1) {
                    rng.random_range(0..32)
                } else {
                    domain * 8 + rng.random_range(0..8)
                };
                if !ids.contains(&id) {
                    ids.push(id);
                }
            }
            counts.record(layer, &ids).unwrap();
        }
    }
    counts
}

static MAP: LazyLock<LocalityMap> = LazyLock::new(|| {
    let records = (0..80u64).map(|record| {
        CalibrationRecord::new(
            PromptCounts::complete(prompt((record % 4) as u16, record)).unwrap(),
            None,
        )
    });
    let calibration = CalibrationFile {
        header: CalibrationHeader::new("synthetic", SHAPE),
        records: records.collect(),
    };
    let config = FitConfig {
        clusters: 4,
        transform: Some(Transform::Count),
        mask: MaskChoice::All,
        ..FitConfig::default()
    };
    ::locality::fit(&calibration, &config, &mut |_| {})
        .unwrap()
        .0
});

fn policy(tau: f32, widen_single: bool) -> Locality {
    let config = LocalityConfig {
        band: Band { tau, widen_single },
        ..LocalityConfig::default()
    };
    Locality::new(MAP.clone(), 4, config).unwrap()
}

fn bounded(tau: f32, max_load: f64) -> Locality {
    let config = LocalityConfig {
        band: Band {
            tau,
            widen_single: false,
        },
        max_load: Some(max_load),
        ..LocalityConfig::default()
    };
    Locality::new(MAP.clone(), 4, config).unwrap()
}

fn complete(domain: u16, seed: u64) -> PromptCounts {
    PromptCounts::complete(prompt(domain, seed)).unwrap()
}

fn facts(counts: &PromptCounts) -> DecodeFacts<'_> {
    DecodeFacts {
        counts: Some(counts),
        domain: None,
    }
}

const IDLE: [WorkerFacts; 4] = [WorkerFacts {
    in_flight: 0,
    healthy: true,
    excluded: false,
}; 4];

#[test]
fn each_domain_has_its_worker() {
    let mut policy = policy(0.1, false);
    let mut homes = [None; 4];
    for request in 0..200u64 {
        let domain = (request % 4) as usize;
        let decision = policy
            .choose(&facts(&complete(domain as u16, 1000 + request)), &IDLE)
            .unwrap();
        assert_eq!(decision.reason, DecodeReason::Nearest);
        assert_eq!(
            (decision.similarities.len(), decision.coverage),
            (4, Some(1.0))
        );
        assert_eq!(
            *homes[domain].get_or_insert(decision.worker),
            decision.worker
        );
    }
    let mut homes: Vec<_> = homes.into_iter().flatten().collect();
    homes.sort_unstable();
    assert_eq!(homes, [0, 1, 2, 3]);
}

#[test]
fn counts_that_do_not_serve_fall_back_to_load() {
    let workers = [
        WorkerFacts::new(3),
        WorkerFacts::new(2),
        WorkerFacts::new(1),
        WorkerFacts::new(2),
    ];
    let mut policy = policy(0.1, false);
    let mut check = |counts: Option<&PromptCounts>, reason: DecodeReason| {
        let decision = policy
            .choose(
                &DecodeFacts {
                    counts,
                    domain: None,
                },
                &workers,
            )
            .unwrap();
        assert_eq!((decision.worker, decision.reason), (2, reason));
        assert!(
            decision.similarities.is_empty() && decision.band.is_empty() && reason.is_fallback()
        );
    };
    check(None, DecodeReason::CountsMissing);
    let partial = PromptCounts::new(prompt(0, 1), TOKENS * 2 + 1).unwrap();
    check(Some(&partial), DecodeReason::CountsIncomplete);
    let other = ExpertCounts::zeros(ModelShape {
        layers: 2,
        experts: 32,
        top_k: 4,
    });
    check(
        Some(&PromptCounts::new(other, 0).unwrap()),
        DecodeReason::CountsIncomplete,
    );
    let mut other = ExpertCounts::zeros(ModelShape {
        layers: 1,
        experts: 32,
        top_k: 1,
    });
    other.record(0, &[3]).unwrap();
    check(
        Some(&PromptCounts::complete(other).unwrap()),
        DecodeReason::CountsShape,
    );
}

#[test]
fn half_the_prompt_is_enough() {
    let half = PromptCounts::new(prompt(0, 1), TOKENS * 2).unwrap();
    let decision = policy(0.1, false).choose(&facts(&half), &IDLE).unwrap();
    assert_eq!(
        (decision.reason, decision.coverage),
        (DecodeReason::Nearest, Some(0.5))
    );
}

#[test]
fn a_pool_of_another_size_is_refused_or_served_by_load() {
    let made = Locality::new(MAP.clone(), 3, LocalityConfig::default());
    assert_eq!(
        made.unwrap_err(),
        PolicyError::MapSize {
            clusters: 4,
            workers: 3
        }
    );
    let decision = policy(0.1, false)
        .choose(&facts(&complete(0, 1)), &IDLE[..3])
        .unwrap();
    assert_eq!(decision.reason, DecodeReason::MapSize);
    let refit = MAP.refit(3, 0).unwrap();
    let mut policy = Locality::new(refit, 3, LocalityConfig::default()).unwrap();
    assert!(
        !policy
            .choose(&facts(&complete(0, 1)), &IDLE[..3])
            .unwrap()
            .reason
            .is_fallback()
    );
}

#[test]
fn options_have_ranges() {
    let config = LocalityConfig {
        band: Band {
            tau: 1.5,
            widen_single: false,
        },
        ..LocalityConfig::default()
    };
    let message = Locality::new(MAP.clone(), 4, config)
        .unwrap_err()
        .to_string();
    assert_eq!(message, "tau is 1.5, expected a number in 0..=1");
}

#[test]
fn a_load_factor_is_one_or_more() {
    for factor in [0.99, -1.0, f64::NAN, f64::INFINITY] {
        let config = LocalityConfig {
            max_load: Some(factor),
            ..LocalityConfig::default()
        };
        let message = Locality::new(MAP.clone(), 4, config)
            .unwrap_err()
            .to_string();
        assert_eq!(
            message,
            format!("max_load is {factor}, expected a number in 1..")
        );
    }
}

#[test]
fn a_full_worker_is_passed_over_and_said_so() {
    let counts = complete(0, 7);
    let home = policy(0.1, false)
        .choose(&facts(&counts), &IDLE)
        .unwrap()
        .worker;
    // Five requests on each of the others: with 7 or 8 at home the bound is ceil(1.25 * 23 / 4) = ceil(1.25 * 24 / 4) = 8.
    for (at_home, stays) in [(5, true), (7, true), (8, false)] {
        let mut workers = [WorkerFacts::new(5); 4];
        workers[home].in_flight = at_home;
        let decision = bounded(0.1, 1.25)
            .choose(&facts(&counts), &workers)
            .unwrap();
        assert_eq!(decision.worker == home, stays, "{at_home} at home");
        assert_eq!(
            decision.reason == DecodeReason::NearestFull,
            !stays,
            "{at_home} at home"
        );
    }
    assert_eq!(DecodeReason::NearestFull.as_str(), "nearest_full");
    assert!(!DecodeReason::NearestFull.is_fallback());
}

#[test]
fn a_band_of_one_widens_to_the_second_nearest_on_request() {
    let counts = complete(0, 7);
    let alone = policy(0.1, false).choose(&facts(&counts), &IDLE).unwrap();
    assert_eq!(alone.band.len(), 1);
    let widened = policy(0.1, true).choose(&facts(&counts), &IDLE).unwrap();
    assert_eq!((widened.band.len(), widened.worker), (2, alone.worker));
    let mut busy = IDLE;
    busy[alone.worker].in_flight = 1;
    assert_ne!(
        policy(0.1, true)
            .choose(&facts(&counts), &busy)
            .unwrap()
            .worker,
        alone.worker
    );
    assert_eq!(
        policy(0.0, true)
            .choose(&facts(&counts), &busy)
            .unwrap()
            .band,
        alone.band
    );
}

fn workers() -> impl Strategy<Value = Vec<WorkerFacts>> {
    let worker = (
        0u32..6,
        prop::bool::weighted(0.8),
        prop::bool::weighted(0.1),
    )
        .prop_map(|(in_flight, healthy, excluded)| WorkerFacts {
            in_flight,
            healthy,
            excluded,
        });
    prop::collection::vec(worker, 4)
}

proptest! {
    #[test]
    fn the_band_and_the_choice_in_it(workers in workers(), domain in 0u16..4, seed: u64, tau in 0f32..=1.0) {
        let counts = complete(domain, seed);
        let Some(decision) = policy(tau, false).choose(&facts(&counts), &workers) else {
            prop_assert!(!workers.iter().any(WorkerFacts::eligible));
            return Ok(());
        };
        let able: Vec<usize> = (0..4).filter(|&worker| workers[worker].eligible()).collect();
        let best = able.iter().map(|&worker| decision.similarities[worker]).fold(f32::MIN, f32::max).min(1.0);
        let expected: Vec<usize> =
            able.iter().copied().filter(|&worker| decision.similarities[worker].min(1.0) >= best - tau).collect();
        prop_assert_eq!(&decision.band, &expected);
        let key = |worker: usize| (workers[worker].in_flight, -decision.similarities[worker], worker);
        for &other in &decision.band {
            prop_assert!(key(decision.worker) <= key(other));
        }
    }

    #[test]
    fn tau_zero_is_nearest_and_tau_one_is_least_load(workers in workers(), domain in 0u16..4, seed: u64) {
        let counts = complete(domain, seed);
        let able: Vec<usize> = (0..4).filter(|&worker| workers[worker].eligible()).collect();
        prop_assume!(!able.is_empty());
        let nearest = policy(0.0, false).choose(&facts(&counts), &workers).unwrap();
        prop_assert!(able.iter().all(|&other| nearest.similarities[nearest.worker] >= nearest.similarities[other]));
        let idlest = policy(1.0, false).choose(&facts(&counts), &workers).unwrap();
        prop_assert_eq!(&idlest.band, &able);
        prop_assert!(able.iter().all(|&other| workers[idlest.worker].in_flight <= workers[other].in_flight));
    }

    #[test]
    fn no_full_worker_is_chosen_and_an_unreachable_bound_changes_nothing(
        workers in workers(), domain in 0u16..4, seed: u64, tau in 0f32..=1.0, factor in 1f64..3.0,
    ) {
        let counts = complete(domain, seed);
        let able: Vec<WorkerFacts> = workers.iter().copied().filter(WorkerFacts::eligible).collect();
        prop_assume!(!able.is_empty());
        let requests: u32 = able.iter().map(|worker| worker.in_flight).sum();
        let capacity = (factor * f64::from(requests + 1) / able.len() as f64).ceil();
        let decision = bounded(tau, factor).choose(&facts(&counts), &workers).unwrap();
        prop_assert!(f64::from(workers[decision.worker].in_flight) < capacity);
        prop_assert_eq!(
            bounded(tau, 1e9).choose(&facts(&counts), &workers),
            policy(tau, false).choose(&facts(&counts), &workers)
        );
    }
}
