//! Moving a prompt's KV blocks from a prefill to a decode worker, over TCP.
//!
//! The decode worker pulls: `pull` asks the worker named in the transfer parameters for the blocks it lacks, checks what comes,
//! and acknowledges, whereupon `server` frees them. A `Claim` makes sure that blocks that will not be pulled are freed at once: dropped
//! unused, it sends a release. What neither pull nor release reaches, the lease frees.

pub(crate) mod claim;
pub(crate) mod pull;
pub(crate) mod server;
pub mod wire;

pub(crate) use claim::Claim;
