//! Expert-locality signatures and maps: transforms, rho, layer mask, balanced K-means.
//!
//! # The problem
//!
//! A decode step of a mixture-of-experts model reads the weights of every distinct expert that any
//! token of the batch selects, so requests that use the same experts should share a batch. What a
//! request will use is not known when it must be placed, at the handoff from prefill to decode; but
//! what its prompt used is (ELDR, arXiv 2607.00466).
//!
//! **Given** `N` calibration requests, each with counts `c[l,e]` of its prompt (and `d[l,e]` of its
//! decode) over `L` layers and `E` experts, and `K` decode workers, **find**
//!
//! 1. a transform `f` and layers `S` whose unit vectors `s_i = f(c_i)[S] / |f(c_i)[S]|` foretell
//!    decode best: maximal `rho = Spearman(cosdist(s_i, s_j), cosdist(d_i, d_j))` over pairs (Eq. 1);
//! 2. unit centroids `m_1 .. m_K` and an assignment `a` that minimise
//!    `sum_i 1 - m_a(i) . s_i` **subject to** at most `ceil(N / K)` requests per cluster, so that no
//!    worker is the nearest one of too many.
//!
//! **Then**, per request: `s_k = m_k . s`, and every worker with `s_k >= max s - tau` is near enough
//! ([`Band`]); which of them is taken is a matter of load, and of the `routing` crate.
//!
//! # The parts
//!
//! [`fit()`] solves both and returns a [`LocalityMap`] with a [`FitReport`]; the map makes a
//! [`Signature`] and its similarities, goes to and from bytes, and refits itself for another `K`.
//!
//! The crate is pure: no files, no sockets, no clock; randomness comes from the seed alone, and
//! results do not depend on the number of threads or the vector width.

mod assign;
mod band;
mod calibration;
mod cells;
mod config;
mod dots;
pub mod file;
mod fit;
mod idf;
mod kmeans;
mod map;
mod pairs;
mod panels;
mod parallel;
mod random;
mod rank;
mod report;
mod rho;
mod signature;
mod simd;
mod transform;

pub use assign::{AssignError, Capacity, assign, match_rows};
pub use band::Band;
pub use config::{Clustering, FitConfig, MAX_ITERATIONS, MAX_RESTARTS, MaskChoice, Presence};
pub use file::{MAP_VERSION, MapError};
pub use fit::{FitError, MAX_PAIRS, fit};
pub use map::{LocalityMap, MatchError, SignatureError};
pub use rank::spearman;
pub use report::{FitReport, MaskStep, Phase, Progress, Quality, TransformReport};
pub use signature::Signature;
pub use transform::{Transform, UnknownTransform};
