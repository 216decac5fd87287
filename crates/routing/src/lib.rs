//! Who serves a request: prefill and decode policies.
//!
//! A policy is a small state machine of (what is known of the request, what is known of the workers) to a decision.
//! It opens no socket, reads no clock, sleeps never, and draws randomness only from a seed that its maker passed in.
//! So the gateway and the simulator run the very same code, and a recorded sequence of facts replays to the same
//! decisions.
//!
//! **What it assumes.** Worker facts come as one slice over the whole pool, in the pool's fixed order: the position is
//! the worker's index, and a locality map's centroid `k` belongs to decode worker `k`. Loads are in-flight requests as the
//! caller counts them. A worker that is unhealthy, or that this request has already tried, is marked in its facts and
//! is never chosen; a policy answers `None` only when no worker is left.
//!
//! **What it explains.** A decision carries its reason, and the similarities, band and loads that led to it, and
//! serialises to JSON as it stands.
//!
//! ```
//! use routing::{DecodeFacts, DecodeOptions, DecodePolicyName, WorkerFacts};
//!
//! let mut policy = routing::decode_policy(DecodePolicyName::LeastLoaded, DecodeOptions::default())?;
//! let workers = [WorkerFacts::new(3), WorkerFacts::new(1), WorkerFacts::new(0).excluded()];
//! let decision = policy.choose(&DecodeFacts::default(), &workers).expect("two workers are left");
//! assert_eq!(decision.worker, 1);
//! # Ok::<(), routing::PolicyError>(())
//! ```

pub mod decode;
mod facts;
mod names;
pub mod prefill;
mod select;

pub use decode::{DecodeDecision, DecodeOptions, DecodePolicy, DecodeReason, decode_policy};
pub use facts::{DecodeFacts, PREFIX_BYTES, PrefillFacts, WorkerFacts};
pub use names::{DecodePolicyName, PrefillPolicyName, UnknownPolicy};
pub use prefill::{PrefillDecision, PrefillPolicy, PrefillReason, prefill_policy};

/// Why a policy could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The locality policy was asked for without a map.
    #[error("policy locality needs a locality map, none was given")]
    MapMissing,
    /// The map has another number of centroids than the pool has decode workers.
    #[error(
        "locality map has {clusters} clusters for {workers} decode workers: refit it for that number"
    )]
    MapSize {
        /// Centroids in the map.
        clusters: usize,
        /// Decode workers in the pool.
        workers: usize,
    },
    /// The map compares gate values, which do not travel with a handoff.
    #[error(
        "locality map uses {transform} values, which requests do not carry: fit one with a transform of counts"
    )]
    MapNeedsValues {
        /// The map's transform.
        transform: locality::Transform,
    },
    /// An option lies outside its range.
    #[error("{name} is {value}, expected a number in {range}")]
    Option {
        /// The option's name.
        name: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        range: &'static str,
    },
}
