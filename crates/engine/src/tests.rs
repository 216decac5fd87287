//! The engine as a whole, over a small fake model whose every number depends on every token before it.

#![allow(clippy::unwrap_used)]

mod examples;
mod fake;
mod handoff;
mod random;
