//! What a fit found, and how far it is.

use serde::{Deserialize, Serialize};

use crate::transform::Transform;

/// Where a fit is, for a progress bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What it is doing.
    pub phase: Phase,
    /// Steps of the phase that are done.
    pub done: usize,
    /// Steps that the phase has.
    pub total: usize,
}

/// The parts of a fit, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Rating the transforms by rho.
    Transforms,
    /// Selecting layers.
    Mask,
    /// Clustering.
    Clusters,
}

/// How well one transform of prompts foretells decode, over all layers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TransformReport {
    /// The transform.
    pub transform: Transform,
    /// Spearman's rho (Eq. 1); `None` where it could not be computed.
    pub rho: Option<f64>,
    /// Why it was left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_out: Option<String>,
}

/// One step of the greedy layer selection.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MaskStep {
    /// The layer that was added.
    pub layer: u32,
    /// rho with it and all before it.
    pub rho: f64,
}

/// The figures that a map carries about itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Quality {
    /// rho with the layers kept; `None` without decode counts.
    pub rho: Option<f64>,
    /// rho with every layer.
    pub rho_all_layers: Option<f64>,
    /// Calibration requests per cluster.
    pub cluster_sizes: Vec<u32>,
    /// Mean cosine similarity of a request to its own cluster's centroid.
    pub within_similarity: f64,
    /// Mean cosine similarity between two centroids; `None` for a single cluster.
    pub between_similarity: Option<f64>,
}

/// What a fit found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FitReport {
    /// Calibration requests.
    pub records: usize,
    /// Those with decode counts, which rho is computed over.
    pub rated_records: usize,
    /// Pairs that rho is computed over.
    pub pairs: usize,
    /// rho per transform, all six.
    pub transforms: Vec<TransformReport>,
    /// The transform taken.
    pub transform: Transform,
    /// MoE layers of the model.
    pub layers: u32,
    /// Layers kept, ascending.
    pub layers_kept: Vec<u32>,
    /// The whole greedy path, beyond the peak too; empty when the layers were given.
    pub mask_path: Vec<MaskStep>,
    /// The map's own figures.
    pub quality: Quality,
    /// Iterations of the K-means run that was kept.
    pub iterations: usize,
    /// Whether that run had come to rest.
    pub converged: bool,
}
