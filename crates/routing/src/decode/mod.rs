//! Which worker generates a request's tokens.

mod domain;
mod load;
mod locality;

use serde::Serialize;

pub use self::domain::{Domain, MAX_DOMAINS};
pub use self::load::{LeastLoaded, PowerOfTwo, Random, RoundRobin};
pub use self::locality::{Locality, LocalityConfig};
use crate::{DecodeFacts, DecodePolicyName, PolicyError, WorkerFacts};
use ::locality::LocalityMap;

/// Chooses the decode worker of a request whose prompt has been computed.
pub trait DecodePolicy: Send {
    /// The policy's name.
    fn name(&self) -> DecodePolicyName;

    /// Places one request, or `None` if no worker is eligible.
    fn choose(
        &mut self,
        request: &DecodeFacts<'_>,
        workers: &[WorkerFacts],
    ) -> Option<DecodeDecision>;
}

/// Why a decode worker was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DecodeReason {
    /// It was its turn.
    Turn,
    /// The seed drew it.
    Random,
    /// It was the less loaded of two that the seed drew.
    PowerOfTwo,
    /// It had the fewest requests in flight.
    LeastLoaded,
    /// The request's domain is assigned to it.
    Domain,
    /// No worker of the request's domain is eligible: least loaded of all.
    DomainUnavailable,
    /// The request names no domain: least loaded.
    DomainMissing,
    /// The least loaded of several workers in the similarity band.
    Band,
    /// The only worker in the similarity band.
    Nearest,
    /// A nearer worker has as many requests as it may have: the best of the others.
    NearestFull,
    /// The prefill worker sent no expert counts: least loaded.
    CountsMissing,
    /// The counts cover too few of the prompt's tokens: least loaded.
    CountsIncomplete,
    /// The counts are of another model shape than the map: least loaded.
    CountsShape,
    /// Nothing of the counts is left after IDF and layer mask, so that every similarity is zero: least loaded.
    CountsEmpty,
    /// The map has another number of centroids than the pool has workers: least loaded.
    MapSize,
}

impl DecodeReason {
    /// The reason as JSON, headers and metrics spell it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Turn => "turn",
            Self::Random => "random",
            Self::PowerOfTwo => "power_of_two",
            Self::LeastLoaded => "least_loaded",
            Self::Domain => "domain",
            Self::DomainUnavailable => "domain_unavailable",
            Self::DomainMissing => "domain_missing",
            Self::Band => "band",
            Self::Nearest => "nearest",
            Self::NearestFull => "nearest_full",
            Self::CountsMissing => "counts_missing",
            Self::CountsIncomplete => "counts_incomplete",
            Self::CountsShape => "counts_shape",
            Self::CountsEmpty => "counts_empty",
            Self::MapSize => "map_size",
        }
    }

    /// Whether the policy could not do what it is named for.
    #[must_use]
    pub fn is_fallback(self) -> bool {
        matches!(
            self,
            Self::DomainUnavailable
                | Self::DomainMissing
                | Self::CountsMissing
                | Self::CountsIncomplete
                | Self::CountsShape
                | Self::CountsEmpty
                | Self::MapSize
        )
    }
}

/// A decode worker, and how it came to be chosen.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DecodeDecision {
    /// The chosen worker's position in the pool.
    pub worker: usize,
    /// The policy that chose.
    pub policy: DecodePolicyName,
    /// Why this worker.
    pub reason: DecodeReason,
    /// Cosine similarity of the request's signature to each worker's centroid, in pool order; empty where the policy
    /// computes none.
    pub similarities: Vec<f32>,
    /// The workers that were as good as each other before loads were looked at, ascending; empty where the policy
    /// knows no such set.
    pub band: Vec<usize>,
    /// Requests in flight on every worker of the pool at that moment.
    pub loads: Vec<u32>,
    /// Part of the prompt's tokens that the expert counts cover, 0 to 1; absent without counts.
    pub coverage: Option<f64>,
}

/// What a decode policy is made from. Each policy takes what it needs.
#[derive(Debug, Default)]
pub struct DecodeOptions {
    /// Decode workers in the pool.
    pub workers: usize,
    /// Seed of `random` and `power_of_two`.
    pub seed: u64,
    /// The map of `locality`, with one centroid per worker.
    pub map: Option<LocalityMap>,
    /// How `locality` uses its map.
    pub locality: LocalityConfig,
}

/// Makes a decode policy.
///
/// # Errors
/// `locality` without a map, with a map for another number of workers, or with options outside their ranges.
pub fn decode_policy(
    name: DecodePolicyName,
    options: DecodeOptions,
) -> Result<Box<dyn DecodePolicy>, PolicyError> {
    Ok(match name {
        DecodePolicyName::RoundRobin => Box::new(RoundRobin::default()),
        DecodePolicyName::Random => Box::new(Random::new(options.seed)),
        DecodePolicyName::PowerOfTwo => Box::new(PowerOfTwo::new(options.seed)),
        DecodePolicyName::LeastLoaded => Box::new(LeastLoaded::default()),
        DecodePolicyName::Domain => Box::new(Domain::default()),
        DecodePolicyName::Locality => {
            let map = options.map.ok_or(PolicyError::MapMissing)?;
            Box::new(Locality::new(map, options.workers, options.locality)?)
        }
    })
}
