//! ELDR's decode routing (arXiv 2607.00466): a request goes where its experts are already in use.

use ::locality::{Band, LocalityMap, Signature, SignatureError};

use super::load::plain;
use super::{DecodeDecision, DecodePolicy, DecodeReason};
use crate::select::Least;
use crate::{DecodeFacts, DecodePolicyName, PolicyError, WorkerFacts};

/// How the band is drawn, and which counts are good enough.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalityConfig {
    /// The similarity band: its width `tau`, from 0 (nearest centroid only) to 1 (join the shortest queue), and whether
    /// a band of one is widened.
    pub band: Band,
    /// Least part of the prompt's tokens that counts must cover to be used, 0 to 1.
    pub min_coverage: f64,
    /// Most load of a worker as a multiple (1 or more) of the mean over the eligible ones, this request included; `None`
    /// for no bound, as in the paper.
    pub max_load: Option<f64>,
}

impl Default for LocalityConfig {
    fn default() -> Self {
        Self {
            band: Band::default(),
            min_coverage: 0.5,
            max_load: None,
        }
    }
}

/// The least loaded worker among those whose centroid is about as similar to the request's signature as the nearest.
///
/// `s_k = centroid_k . signature`, band = `{ k : s_k >= max_k s_k - tau }` over the eligible workers, then the least load
/// in the band; ties go to the higher similarity, then to the lower index.
///
/// With [`LocalityConfig::max_load`] a full worker leaves before the band is drawn: one that already has
/// `ceil(max_load (requests + 1) / workers)` of the eligible workers' requests (consistent hashing with bounded loads,
/// arXiv 1608.01350). At a factor of 1 or more there is always one that is not full.
///
/// Counts that are missing, of another shape, or
/// that cover less than [`LocalityConfig::min_coverage`] of the prompt make the request go to the least loaded worker,
/// with the reason in the decision.
#[derive(Debug)]
pub struct Locality {
    map: LocalityMap,
    config: LocalityConfig,
    least: Least,
    /// Filled anew for every request.
    signature: Signature,
    able: Vec<f32>,
}

impl Locality {
    /// The policy over `workers` decode workers, where centroid `k` of the map belongs to worker `k`.
    ///
    /// # Errors
    /// A map with another number of centroids, or of gate values; `tau` or `min_coverage` outside 0 to 1; `max_load` below 1
    /// or not finite.
    pub fn new(
        map: LocalityMap,
        workers: usize,
        config: LocalityConfig,
    ) -> Result<Self, PolicyError> {
        if map.clusters() != workers {
            return Err(PolicyError::MapSize {
                clusters: map.clusters(),
                workers,
            });
        }
        if !map.transform().needs_counts_only() {
            return Err(PolicyError::MapNeedsValues {
                transform: map.transform(),
            });
        }
        for (name, value) in [
            ("tau", f64::from(config.band.tau)),
            ("min_coverage", config.min_coverage),
        ] {
            if !(0.0..=1.0).contains(&value) {
                return Err(PolicyError::Option {
                    name,
                    value: value.to_string(),
                    range: "0..=1",
                });
            }
        }
        if let Some(factor) = config.max_load
            && !(factor >= 1.0 && factor.is_finite())
        {
            return Err(PolicyError::Option {
                name: "max_load",
                value: factor.to_string(),
                range: "1..",
            });
        }
        Ok(Self {
            map,
            config,
            least: Least::default(),
            signature: Signature::default(),
            able: Vec::new(),
        })
    }

    /// The similarities of a request's signature to every centroid, or why there are none.
    fn similarities(
        &mut self,
        request: &DecodeFacts<'_>,
        workers: usize,
    ) -> Result<Vec<f32>, DecodeReason> {
        let counts = request.counts.ok_or(DecodeReason::CountsMissing)?;
        if self.map.clusters() != workers {
            return Err(DecodeReason::MapSize);
        }
        if counts.coverage() < self.config.min_coverage {
            return Err(DecodeReason::CountsIncomplete);
        }
        match self
            .map
            .signature_into(counts.counts(), &mut self.signature)
        {
            Ok(()) => {}
            Err(SignatureError::Shape(_)) => return Err(DecodeReason::CountsShape),
            // Refused when the policy was made, and there is no other way left to fail.
            Err(_) => return Err(DecodeReason::CountsMissing),
        }
        if self.signature.is_zero() {
            return Err(DecodeReason::CountsEmpty);
        }
        let mut similarities = vec![0.0; workers];
        self.map.similarities(&self.signature, &mut similarities);
        Ok(similarities)
    }

    /// The load at which a worker is full.
    fn capacity(&self, workers: &[WorkerFacts]) -> f64 {
        let Some(factor) = self.config.max_load else {
            return f64::INFINITY;
        };
        let eligible = || workers.iter().filter(|worker| worker.eligible());
        let requests: f64 = eligible().map(|worker| f64::from(worker.in_flight)).sum();
        (factor * (requests + 1.0) / eligible().count().max(1) as f64).ceil()
    }

    /// The eligible workers with room in the band of the most similar one of them, ascending.
    fn band(
        &mut self,
        similarities: &[f32],
        workers: &[WorkerFacts],
        has_room: impl Fn(&WorkerFacts) -> bool,
    ) -> Vec<usize> {
        self.able.clear();
        self.able.extend(
            similarities
                .iter()
                .zip(workers)
                .map(|(&similarity, worker)| {
                    // A cosine that rounding lifted over one must not keep a similarity of zero out of the widest band.
                    if has_room(worker) {
                        similarity.min(1.0)
                    } else {
                        f32::NEG_INFINITY
                    }
                }),
        );
        let mut band = Vec::new();
        self.config.band.members(&self.able, &mut band);
        band
    }
}

impl DecodePolicy for Locality {
    fn name(&self) -> DecodePolicyName {
        DecodePolicyName::Locality
    }

    fn choose(
        &mut self,
        request: &DecodeFacts<'_>,
        workers: &[WorkerFacts],
    ) -> Option<DecodeDecision> {
        let coverage = request.counts.map(experts::PromptCounts::coverage);
        let similarities = match self.similarities(request, workers.len()) {
            Ok(similarities) => similarities,
            Err(reason) => {
                let worker = self.least.pick(workers)?;
                return Some(DecodeDecision {
                    coverage,
                    ..plain(worker, self.name(), reason, workers)
                });
            }
        };
        let capacity = self.capacity(workers);
        let has_room =
            |worker: &WorkerFacts| worker.eligible() && f64::from(worker.in_flight) < capacity;
        let band = self.band(&similarities, workers, has_room);
        let worker = band.iter().copied().min_by(|&a, &b| {
            let by_load = workers[a].in_flight.cmp(&workers[b].in_flight);
            by_load
                .then(similarities[b].total_cmp(&similarities[a]))
                .then(a.cmp(&b))
        })?;
        let nearer_is_full = similarities
            .iter()
            .zip(workers)
            .any(|(&similarity, other)| {
                other.eligible() && !has_room(other) && similarity > similarities[worker]
            });
        let reason = match band.len() {
            _ if nearer_is_full => DecodeReason::NearestFull,
            1 => DecodeReason::Nearest,
            _ => DecodeReason::Band,
        };
        Some(DecodeDecision {
            similarities,
            band,
            coverage,
            ..plain(worker, self.name(), reason, workers)
        })
    }
}
