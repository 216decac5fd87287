//! The shared vocabulary of Colocate: what a mixture-of-experts (MoE) model is to a router, and how
//! much of it a request used.
//!
//! Every other crate speaks in these types, so that a worker, the gateway and the fit agree on what
//! a count is:
//!
//! - [`ModelShape`]: MoE layers, experts per layer, experts per token.
//! - [`ExpertCounts`]: how many tokens chose each expert of each layer.
//! - [`BlockCounts`]: the same per KV block, kept beside the block and living as long as it does.
//! - [`RoutedExperts`]: the raw choices, token by token.
//! - [`PromptCounts`]: counts with their coverage, and their compact form on the wire ([`wire`]).
//! - [`CalibrationRecord`], [`CalibrationHeader`], [`CalibrationFile`]: the records a locality map
//!   is fitted from, and their file.
//!
//! A count is a number of top-k selections, not a sum of gate weights. The crate is pure: no files,
//! no sockets, no clock.
//!
//! ```
//! use experts::{ExpertCounts, ModelShape, PromptCounts};
//!
//! let shape = ModelShape { layers: 2, experts: 4, top_k: 2 };
//! let mut counts = ExpertCounts::zeros(shape);
//! for layer in 0..2 {
//!     counts.record(layer, &[0, 3])?; // the first prompt token
//!     counts.record(layer, &[1, 3])?; // the second
//! }
//! let prompt = PromptCounts::new(counts, 2)?;
//! assert_eq!(PromptCounts::decode(&prompt.encode())?, prompt);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bits;
mod block;
mod calibration;
mod counts;
mod prompt;
mod routed;
mod shape;
pub mod wire;

pub use block::BlockCounts;
pub use calibration::{
    CalibrationError, CalibrationFile, CalibrationHeader, CalibrationRecord, LineError,
};
pub use counts::{CountError, ExpertCounts};
pub use prompt::{PromptCounts, PromptCountsError};
pub use routed::RoutedExperts;
pub use shape::{ModelShape, ShapeError};
pub use wire::WireError;
