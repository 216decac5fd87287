//! The router behind HTTP: an OpenAI endpoint in front of prefill and decode workers.
//!
//! A request's way: it is read and admitted ([`Config`] says how large it may be), a prefill policy places its prompt, the
//! prefill worker answers with KV transfer parameters and expert counts, a decode policy places it again by those
//! counts, and the decode worker's tokens are relayed as they come. The client sees one OpenAI server.
//!
//! One idea per file: `registry` (who is there, what is in flight), `health` (who is up), `placement` (policies over the
//! registry), `upstream` (one request to one worker), `handoff` (prefill, then decode, and what to do when either
//! fails), `relay` (bytes as they come), `account` and `metrics` (what is counted), `routes` (the doors), `reply` and
//! `errors` (what the client gets).
//!
//! **What it promises.**
//! - A request that no byte of was answered yet is tried elsewhere when its worker fails, within bounds; afterwards the
//!   stream says what happened.
//! - When the client goes, the upstream request is dropped at once, and blocks that a prefill worker holds for it
//!   are released.
//! - In-flight counts fall back by drop guards, so no path can leak one.
//! - Workers of two kinds (embedded and vLLM) are never mixed in one handoff.
//!
//! **What it leaves out.** No tokenizer, no model, no state that outlives a request but loads and the policies' own. The
//! pools are fixed while it runs.

mod account;
mod call;
mod config;
mod errors;
mod handoff;
mod health;
mod metrics;
mod placement;
mod policies;
mod registry;
mod relay;
mod reply;
mod routes;
mod server;
mod upstream;

pub use config::{Config, DOMAIN_FIELD, DOMAIN_HEADER, MAX_DOMAIN_BYTES, Timeouts};
pub use errors::GatewayError;
pub use locality::Band;
/// Where a worker is: `http://host:port`.
pub use reqwest::Url;
pub use routing::decode::LocalityConfig;
pub use routing::{DecodePolicyName, PrefillPolicyName};
pub use server::serve;
