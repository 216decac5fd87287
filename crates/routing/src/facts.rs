//! What a policy is told: of each worker, and of the request.

use experts::PromptCounts;
use serde::Serialize;

/// How many leading bytes of a prompt the prefix hash reads (ELDR, arXiv 2607.00466, prefill routing).
pub const PREFIX_BYTES: usize = 1024;

/// What is known of one worker when a request is placed. Its index is its position in the slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct WorkerFacts {
    /// Requests in flight on this worker, as the caller counts them.
    pub in_flight: u32,
    /// Whether the worker is believed to be up.
    pub healthy: bool,
    /// Whether this request must not go there, because it has tried this worker already.
    pub excluded: bool,
}

impl WorkerFacts {
    /// A healthy worker with this load.
    #[must_use]
    pub fn new(in_flight: u32) -> Self {
        Self {
            in_flight,
            healthy: true,
            excluded: false,
        }
    }

    /// The same worker, believed to be down.
    #[must_use]
    pub fn unhealthy(self) -> Self {
        Self {
            healthy: false,
            ..self
        }
    }

    /// The same worker, not to be used for this request.
    #[must_use]
    pub fn excluded(self) -> Self {
        Self {
            excluded: true,
            ..self
        }
    }

    /// Whether a policy may choose it.
    #[must_use]
    pub fn eligible(&self) -> bool {
        self.healthy && !self.excluded
    }
}

/// What is known of a request before its prefill.
#[derive(Debug, Clone, Copy, Default)]
pub struct PrefillFacts<'a> {
    /// The prompt's bytes. Only the first [`PREFIX_BYTES`] are looked at.
    pub prompt: &'a [u8],
}

/// What is known of a request between its prefill and its decode.
#[derive(Debug, Clone, Copy, Default)]
pub struct DecodeFacts<'a> {
    /// Expert counts of the prompt, if the prefill worker sent them.
    pub counts: Option<&'a PromptCounts>,
    /// The domain that the client named, if it did.
    pub domain: Option<&'a str>,
}
