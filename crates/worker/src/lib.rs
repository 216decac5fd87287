//! The engine behind HTTP, and the transfer of KV blocks between workers.
//!
//! A worker serves one model on OpenAI's routes and takes part in handoffs in vLLM's own dialect ([`protocol::handoff`]): a prefill worker computes a prompt
//! and holds its KV blocks under a lease, a decode worker pulls them and generates. Requests without a handoff run on one worker from end to end.
//!
//! ```text
//! client or gateway ── HTTP ──► http ── commands ──► engine_thread ── owns ──► Engine
//!                                │  ◄── tokens ─────────┘   ▲
//!                                └─ transfer::pull          └── transfer::server ◄── TCP ── a peer's pull
//! ```
//!
//! The engine is synchronous and has a thread to itself; everything else runs on tokio and never waits for a step but by a channel. Whoever
//! wants something from the engine holds a guard (a running request, a pin, a claim to a peer's blocks), and dropping the guard gives it back: that is how
//! a client that goes away, an error or a refusal leaves no block behind.

mod config;
mod engine_thread;
mod http;
mod lease;
mod metrics;
mod serve;
mod text;
pub mod transfer;

pub use config::{Config, Role};
pub use serve::{Bound, ServeError, serve, shutdown_signal};
