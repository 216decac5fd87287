//! Policies over the registry: the choice of a worker and the count of its new request are one step, so that requests
//! that arrive together see each other.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use experts::PromptCounts;
use routing::{
    DecodeDecision, DecodeFacts, DecodePolicy, PrefillDecision, PrefillFacts, PrefillPolicy,
};
use serde::Serialize;

use crate::metrics::Metrics;
use crate::registry::{InFlight, Pool, Tried};

/// Decisions that are kept to be looked at.
const RECENT: usize = 32;

/// Both pools with their policies.
pub(crate) struct Placement {
    pub(crate) prefill: Pool,
    pub(crate) decode: Pool,
    prefill_policy: Mutex<Box<dyn PrefillPolicy>>,
    decode_policy: Mutex<Box<dyn DecodePolicy>>,
    recent: Mutex<VecDeque<Recent>>,
    metrics: Arc<Metrics>,
}

/// A decode decision that was made, and for whom.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Recent {
    pub(crate) request_id: String,
    #[serde(flatten)]
    pub(crate) decision: DecodeDecision,
}

impl Placement {
    pub(crate) fn new(
        prefill: Pool,
        decode: Pool,
        prefill_policy: Box<dyn PrefillPolicy>,
        decode_policy: Box<dyn DecodePolicy>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            prefill,
            decode,
            prefill_policy: Mutex::new(prefill_policy),
            decode_policy: Mutex::new(decode_policy),
            recent: Mutex::new(VecDeque::with_capacity(RECENT)),
            metrics,
        }
    }

    /// Places a prompt, or `None` if no worker is left for it.
    pub(crate) fn place_prefill(
        &self,
        prompt: &[u8],
        tried: &Tried,
    ) -> Option<(InFlight, PrefillDecision)> {
        let begun = Instant::now();
        let mut policy = lock(&self.prefill_policy);
        let decision = policy.choose(&PrefillFacts { prompt }, &self.prefill.facts(tried))?;
        let guard = InFlight::open(self.prefill.get(decision.worker)?);
        drop(policy);
        self.metrics
            .prefill_decision(&guard, &decision, begun.elapsed());
        Some((guard, decision))
    }

    /// Places a request whose prompt is computed, or `None` if no worker is left for it.
    pub(crate) fn place_decode(
        &self,
        request_id: &str,
        counts: Option<&PromptCounts>,
        domain: Option<&str>,
        tried: &Tried,
    ) -> Option<(InFlight, DecodeDecision)> {
        let begun = Instant::now();
        let mut policy = lock(&self.decode_policy);
        let decision = policy.choose(&DecodeFacts { counts, domain }, &self.decode.facts(tried))?;
        let guard = InFlight::open(self.decode.get(decision.worker)?);
        drop(policy);
        self.metrics
            .decode_decision(&guard, &decision, begun.elapsed());
        let mut recent = lock(&self.recent);
        if recent.len() == RECENT {
            recent.pop_front();
        }
        recent.push_back(Recent {
            request_id: request_id.to_owned(),
            decision: decision.clone(),
        });
        Some((guard, decision))
    }

    /// The last decode decisions, oldest first.
    pub(crate) fn recent(&self) -> Vec<Recent> {
        lock(&self.recent).iter().cloned().collect()
    }

    pub(crate) fn policy_names(&self) -> (&'static str, &'static str) {
        let prefill = lock(&self.prefill_policy).name().as_str();
        let decode = lock(&self.decode_policy).name().as_str();
        (prefill, decode)
    }
}

/// A policy stays usable after a panic elsewhere: its worst state is an uneven one.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
