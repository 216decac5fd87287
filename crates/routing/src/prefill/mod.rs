//! Which worker computes a request's prompt.

mod prefix_hash;
mod ring;

use serde::Serialize;

pub use self::prefix_hash::{LOAD_FACTOR, PrefixHash};
pub use self::ring::{Ring, VIRTUAL_NODES};
use crate::select::{Least, Turn, loads};
use crate::{PrefillFacts, PrefillPolicyName, WorkerFacts};

/// Chooses the prefill worker of a request.
pub trait PrefillPolicy: Send {
    /// The policy's name.
    fn name(&self) -> PrefillPolicyName;

    /// Places one request, or `None` if no worker is eligible.
    fn choose(
        &mut self,
        request: &PrefillFacts<'_>,
        workers: &[WorkerFacts],
    ) -> Option<PrefillDecision>;
}

/// Why a prefill worker was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PrefillReason {
    /// It was its turn.
    Turn,
    /// It had the fewest requests in flight.
    LeastLoaded,
    /// The ring gives it this prefix.
    PrefixOwner,
    /// The ring's owner of this prefix is down or excluded; this one follows it on the ring.
    PrefixSuccessor,
    /// The ring's owner of this prefix carries too much load; this one carries the least.
    PrefixOverloaded,
}

impl PrefillReason {
    /// The reason as JSON, headers and metrics spell it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Turn => "turn",
            Self::LeastLoaded => "least_loaded",
            Self::PrefixOwner => "prefix_owner",
            Self::PrefixSuccessor => "prefix_successor",
            Self::PrefixOverloaded => "prefix_overloaded",
        }
    }
}

/// A prefill worker, and how it came to be chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PrefillDecision {
    /// The chosen worker's position in the pool.
    pub worker: usize,
    /// The policy that chose.
    pub policy: PrefillPolicyName,
    /// Why this worker.
    pub reason: PrefillReason,
    /// Requests in flight on every worker of the pool at that moment.
    pub loads: Vec<u32>,
}

/// Makes a prefill policy for a pool whose workers have these names (their URLs, say): the ring hashes the names, so
/// that a worker keeps its prefixes when others come and go.
#[must_use]
pub fn prefill_policy<S: AsRef<str>>(
    name: PrefillPolicyName,
    workers: &[S],
) -> Box<dyn PrefillPolicy> {
    match name {
        PrefillPolicyName::PrefixHash => Box::new(PrefixHash::new(workers)),
        PrefillPolicyName::RoundRobin => Box::new(RoundRobin::default()),
        PrefillPolicyName::LeastLoaded => Box::new(LeastLoaded::default()),
    }
}

/// Each worker in turn.
#[derive(Debug, Default)]
pub struct RoundRobin(Turn);

impl PrefillPolicy for RoundRobin {
    fn name(&self) -> PrefillPolicyName {
        PrefillPolicyName::RoundRobin
    }

    fn choose(
        &mut self,
        _request: &PrefillFacts<'_>,
        workers: &[WorkerFacts],
    ) -> Option<PrefillDecision> {
        let worker = self.0.pick(workers)?;
        Some(PrefillDecision {
            worker,
            policy: self.name(),
            reason: PrefillReason::Turn,
            loads: loads(workers),
        })
    }
}

/// The fewest requests in flight; equal ones are used in turn.
#[derive(Debug, Default)]
pub struct LeastLoaded(Least);

impl PrefillPolicy for LeastLoaded {
    fn name(&self) -> PrefillPolicyName {
        PrefillPolicyName::LeastLoaded
    }

    fn choose(
        &mut self,
        _request: &PrefillFacts<'_>,
        workers: &[WorkerFacts],
    ) -> Option<PrefillDecision> {
        let worker = self.0.pick(workers)?;
        Some(PrefillDecision {
            worker,
            policy: self.name(),
            reason: PrefillReason::LeastLoaded,
            loads: loads(workers),
        })
    }
}
