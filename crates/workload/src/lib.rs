//! Arrivals, prompts and latency summaries, shared by the demo, the bench and the simulator.
//!
//! A workload is made of three independent choices, each a plain value that depends on a seed alone:
//!
//! - **which prompts, in which order**: [`Prompt`]s read from a JSONL file with [`read_prompts`], drawn by [`sequence`]
//!   so that every domain has the same share and the order is shuffled;
//! - **when they arrive**: [`Arrivals`], an open loop with Poisson arrivals or a closed loop with a fixed number of requests
//!   in flight;
//! - **how it went**: [`RequestTiming`] per request, [`LatencySummary`] over many, [`balance_over_time`] for the
//!   load's evenness.
//!
//! **Architecture invariant:** this crate reads no clock, opens no socket and starts no thread. Times come in as
//! durations since an origin that the caller chose; the caller sleeps, sends and measures. That is why a simulator can use the very same
//! arrivals and summaries as a run against real processes.

mod arrivals;
mod evenness;
mod latency;
mod prompts;
mod sequence;

pub use arrivals::{Arrivals, Poisson, RateError};
pub use evenness::{Interval, balance_over_time};
pub use latency::{LatencySummary, Quantiles, RequestTiming, median};
pub use prompts::{Prompt, PromptError, Workload, read_prompts};
pub use sequence::{Mix, SequenceError, output_lengths, sequence};
