//! What a fit is asked for.

use serde::{Deserialize, Serialize};

use crate::transform::Transform;

/// Which MoE layers a signature keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MaskChoice {
    /// Greedy forward selection: at each step the layer that raises rho most, up to the peak.
    Greedy,
    /// Every layer.
    All,
    /// These layers, whatever their order here.
    Layers(Vec<u32>),
}

/// How calibration requests become clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clustering {
    /// Spherical K-means with at most `ceil(N / K)` and at least one request per cluster: the
    /// paper's. Each iteration's assignment is exact.
    Balanced,
    /// Spherical K-means, every request in its nearest cluster.
    Plain,
}

/// Which calibration requests count towards a document frequency `df[l,e]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Presence {
    /// Those that selected the expert at all: the paper's.
    Selected,
    /// Those that selected it more often than its fair share, `tokens * top_k / E`. Where every
    /// request touches nearly every expert (few experts, long prompts) this keeps IDF telling.
    FairShare,
}

/// The most runs of K-means that a fit or a refit makes. Maps come from files, and a refit must end.
pub const MAX_RESTARTS: usize = 100;

/// The most iterations of one of them.
pub const MAX_ITERATIONS: usize = 10_000;

/// A fit's settings. [`Default`] is the paper's, for 8 workers.
#[derive(Debug, Clone, PartialEq)]
pub struct FitConfig {
    /// Clusters, one per decode worker: from 1 to the number of records.
    pub clusters: usize,
    /// The transform, or `None` for the one with the highest rho among those that need counts only.
    pub transform: Option<Transform>,
    /// Plain or balanced.
    pub clustering: Clustering,
    /// Which layers to keep.
    pub mask: MaskChoice,
    /// Document frequency's notion of "selected".
    pub presence: Presence,
    /// Pairs of records that rho is computed over, `None` for all.
    pub pairs: Option<usize>,
    /// K-means runs from different seedings, the best of which is kept: from 1 to [`MAX_RESTARTS`].
    pub restarts: usize,
    /// The most iterations of one K-means run, at most [`MAX_ITERATIONS`].
    pub max_iterations: usize,
    /// Everything random follows from it: pairs and seedings.
    pub seed: u64,
    /// Threads to use, or `None` for as many as there are cores. The result does not depend on it.
    pub threads: Option<usize>,
}

impl Default for FitConfig {
    fn default() -> Self {
        Self {
            clusters: 8,
            transform: None,
            clustering: Clustering::Balanced,
            mask: MaskChoice::Greedy,
            presence: Presence::Selected,
            pairs: Some(30_000),
            restarts: 4,
            max_iterations: 100,
            seed: 0,
            threads: None,
        }
    }
}
