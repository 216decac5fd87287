//! The policies that look at loads alone: ELDR's baselines (arXiv 2607.00466, section 5).

use super::{DecodeDecision, DecodePolicy, DecodeReason};
use crate::select::{Dice, Least, Turn, loads};
use crate::{DecodeFacts, DecodePolicyName, WorkerFacts};

/// A decision by load or turn alone.
pub(super) fn plain(
    worker: usize,
    policy: DecodePolicyName,
    reason: DecodeReason,
    workers: &[WorkerFacts],
) -> DecodeDecision {
    DecodeDecision {
        worker,
        policy,
        reason,
        similarities: Vec::new(),
        band: Vec::new(),
        loads: loads(workers),
        coverage: None,
    }
}

/// Each worker in turn.
#[derive(Debug, Default)]
pub struct RoundRobin(Turn);

impl DecodePolicy for RoundRobin {
    fn name(&self) -> DecodePolicyName {
        DecodePolicyName::RoundRobin
    }

    fn choose(
        &mut self,
        _request: &DecodeFacts<'_>,
        workers: &[WorkerFacts],
    ) -> Option<DecodeDecision> {
        let worker = self.0.pick(workers)?;
        Some(plain(worker, self.name(), DecodeReason::Turn, workers))
    }
}

/// Any worker, all equally likely.
#[derive(Debug)]
pub struct Random(Dice);

impl Random {
    /// The policy that this seed gives.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(Dice::new(seed))
    }
}

impl DecodePolicy for Random {
    fn name(&self) -> DecodePolicyName {
        DecodePolicyName::Random
    }

    fn choose(
        &mut self,
        _request: &DecodeFacts<'_>,
        workers: &[WorkerFacts],
    ) -> Option<DecodeDecision> {
        let worker = self.0.one(workers)?;
        Some(plain(worker, self.name(), DecodeReason::Random, workers))
    }
}

/// The less loaded of two different workers drawn at random; the first drawn if they are equal.
#[derive(Debug)]
pub struct PowerOfTwo(Dice);

impl PowerOfTwo {
    /// The policy that this seed gives.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(Dice::new(seed))
    }
}

impl DecodePolicy for PowerOfTwo {
    fn name(&self) -> DecodePolicyName {
        DecodePolicyName::PowerOfTwo
    }

    fn choose(
        &mut self,
        _request: &DecodeFacts<'_>,
        workers: &[WorkerFacts],
    ) -> Option<DecodeDecision> {
        let (first, second) = self.0.two(workers)?;
        let worker = if workers[second].in_flight < workers[first].in_flight {
            second
        } else {
            first
        };
        let mut band = vec![first.min(second), first.max(second)];
        band.dedup();
        Some(DecodeDecision {
            band,
            ..plain(worker, self.name(), DecodeReason::PowerOfTwo, workers)
        })
    }
}

/// The fewest requests in flight; equal ones are used in turn.
#[derive(Debug, Default)]
pub struct LeastLoaded(Least);

impl DecodePolicy for LeastLoaded {
    fn name(&self) -> DecodePolicyName {
        DecodePolicyName::LeastLoaded
    }

    fn choose(
        &mut self,
        _request: &DecodeFacts<'_>,
        workers: &[WorkerFacts],
    ) -> Option<DecodeDecision> {
        let worker = self.0.pick(workers)?;
        Some(plain(
            worker,
            self.name(),
            DecodeReason::LeastLoaded,
            workers,
        ))
    }
}
