//! The gateway over loopback, in front of scripted peers: they speak a worker's dialect and fail on command, which real
//! workers do not.

#![allow(clippy::unwrap_used)]

mod admission;
mod failures;
mod handoff;
mod harness;
mod leaving;
mod other_model;
mod peer;
mod pools;
mod silence;
