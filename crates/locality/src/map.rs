//! The fitted map: from a prompt's counts to a similarity per cluster.

use experts::{ExpertCounts, ModelShape, ShapeError};
use thiserror::Error;

use crate::assign::{AssignError, match_rows};
use crate::calibration::Calibration;
use crate::cells;
use crate::config::Clustering;
use crate::panels::Panels;
use crate::report::Quality;
use crate::signature::Signature;
use crate::simd;
use crate::transform::Transform;

/// A locality map: everything a router needs to place a request, and what a refit for another
/// number of clusters needs. Its bytes are one safetensors file, see [`file`](crate::file).
#[derive(Debug, Clone)]
pub struct LocalityMap {
    pub(crate) model: String,
    pub(crate) shape: ModelShape,
    pub(crate) transform: Transform,
    /// `layers x experts`.
    pub(crate) idf: Vec<f32>,
    /// Layers kept, ascending.
    pub(crate) mask: Vec<u32>,
    /// IDF of the layers kept, for the transform that uses it.
    pub(crate) weights: Vec<f32>,
    pub(crate) centroids: Panels,
    pub(crate) clustering: Clustering,
    pub(crate) restarts: usize,
    pub(crate) max_iterations: usize,
    pub(crate) seed: u64,
    pub(crate) calibration: Calibration,
    pub(crate) quality: Quality,
}

/// A prompt whose signature this map cannot make.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SignatureError {
    /// The counts belong to another model.
    #[error("the locality map does not fit the counts: {0}")]
    Shape(#[from] ShapeError),
    /// The map compares gate values, which counts do not hold.
    #[error(
        "expected {transform} values for this locality map, got counts alone: fit one with a transform of counts"
    )]
    NeedsValues {
        /// The map's transform.
        transform: Transform,
    },
}

/// Two maps whose clusters cannot be lined up.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MatchError {
    /// They have other clusters or layers.
    #[error(
        "expected a map of {} clusters over the same {} layers, got {} over {}",
        expected.0, expected.1, got.0, got.1
    )]
    Differ {
        /// Clusters and layers kept of the previous map.
        expected: (usize, usize),
        /// Those of this one.
        got: (usize, usize),
    },
    /// They belong to different models.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The matching itself failed.
    #[error(transparent)]
    Assign(#[from] AssignError),
}

impl LocalityMap {
    /// Name of the model that the map was fitted for.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Shape of that model.
    #[must_use]
    pub fn shape(&self) -> ModelShape {
        self.shape
    }

    /// Checks that the map is for a model of `shape`.
    ///
    /// # Errors
    /// [`SignatureError::Shape`] names both shapes.
    pub fn expect_shape(&self, shape: ModelShape) -> Result<(), SignatureError> {
        Ok(self.shape.expect(shape)?)
    }

    /// Clusters, one per decode worker.
    #[must_use]
    pub fn clusters(&self) -> usize {
        self.centroids.columns()
    }

    /// How cells are made.
    #[must_use]
    pub fn transform(&self) -> Transform {
        self.transform
    }

    /// Layers kept, ascending.
    #[must_use]
    pub fn mask(&self) -> &[u32] {
        &self.mask
    }

    /// `ln((N + 1) / (df + 1))` per layer and expert, all layers, row-major.
    #[must_use]
    pub fn idf(&self) -> &[f32] {
        &self.idf
    }

    /// How requests became clusters.
    #[must_use]
    pub fn clustering(&self) -> Clustering {
        self.clustering
    }

    /// The seed of the fit or refit.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Calibration requests that the map holds.
    #[must_use]
    pub fn calibration_records(&self) -> usize {
        self.calibration.len()
    }

    /// The map's own figures.
    #[must_use]
    pub fn quality(&self) -> &Quality {
        &self.quality
    }

    /// Cells of a signature: layers kept x experts.
    #[must_use]
    pub fn dimension(&self) -> usize {
        self.mask.len() * self.shape.experts as usize
    }

    /// One cluster's centroid: [`dimension`](Self::dimension) cells of length 1 (or all zero).
    ///
    /// # Panics
    /// When there is no such cluster.
    #[must_use]
    pub fn centroid(&self, cluster: usize) -> Vec<f32> {
        self.centroids.column(cluster)
    }

    /// The same map with its clusters in the order in which they resemble `previous`'s most: so that
    /// after a refit a worker keeps the requests it had as far as can be.
    ///
    /// The sum of similarities between each cluster and the one it continues is the largest
    /// possible. The cluster sizes of [`quality`](Self::quality) follow.
    ///
    /// # Errors
    /// [`MatchError`] when the maps differ in the layers kept or the number of clusters.
    pub fn matched_to(&self, previous: &Self) -> Result<Self, MatchError> {
        let clusters = self.clusters();
        if clusters != previous.clusters() || self.mask != previous.mask {
            return Err(MatchError::Differ {
                expected: (previous.clusters(), previous.mask.len()),
                got: (clusters, self.mask.len()),
            });
        }
        self.shape.expect(previous.shape)?;
        let mut similarities = vec![0.0; clusters * clusters];
        for (old, row) in similarities.chunks_exact_mut(clusters).enumerate() {
            self.centroids.multiply(&previous.centroid(old), row);
        }
        let continues = match_rows(&similarities, clusters)?;
        let mut map = self.clone();
        let columns: Vec<f32> = continues
            .iter()
            .flat_map(|&new| self.centroid(new as usize))
            .collect();
        map.centroids = Panels::pack(self.dimension(), &columns);
        if self.quality.cluster_sizes.len() == clusters {
            let sizes = &self.quality.cluster_sizes;
            map.quality.cluster_sizes = continues.iter().map(|&k| sizes[k as usize]).collect();
        }
        Ok(map)
    }

    /// The signature of a prompt.
    ///
    /// # Errors
    /// See [`SignatureError`].
    pub fn signature(&self, counts: &ExpertCounts) -> Result<Signature, SignatureError> {
        let mut signature = Signature::default();
        self.signature_into(counts, &mut signature)?;
        Ok(signature)
    }

    /// The signature of a prompt, into one that exists: no allocation after the first call.
    ///
    /// # Errors
    /// See [`SignatureError`]; `signature` is unspecified then.
    pub fn signature_into(
        &self,
        counts: &ExpertCounts,
        signature: &mut Signature,
    ) -> Result<(), SignatureError> {
        self.shape.expect(counts.shape())?;
        if !self.transform.needs_counts_only() {
            return Err(SignatureError::NeedsValues {
                transform: self.transform,
            });
        }
        signature.values.resize(self.dimension(), 0.0);
        simd::dispatch(
            #[inline(always)]
            || {
                cells::fill(
                    self.transform,
                    &self.mask,
                    counts.as_slice(),
                    self.shape.experts as usize,
                    &self.weights,
                    &mut signature.values,
                );
                cells::normalise(&mut signature.values);
            },
        );
        Ok(())
    }

    /// The signature of gate values, `layers x experts`, for a map whose transform takes them.
    ///
    /// # Errors
    /// [`SignatureError::Shape`] when there is not one value per layer and expert.
    pub fn signature_of_values(&self, values: &[f32]) -> Result<Signature, SignatureError> {
        if values.len() != self.shape.cells() {
            return Err(ShapeError::Length {
                shape: self.shape,
                expected: self.shape.cells(),
                got: values.len(),
            }
            .into());
        }
        let experts = self.shape.experts as usize;
        let mut kept = Vec::with_capacity(self.dimension());
        for &layer in &self.mask {
            let start = layer as usize * experts;
            kept.extend_from_slice(&values[start..start + experts]);
        }
        cells::normalise(&mut kept);
        Ok(Signature { values: kept })
    }

    /// `s_k = centroid_k . signature` for every cluster: cosine similarities.
    ///
    /// # Panics
    /// When the signature is another map's, or `out` does not hold one value per cluster.
    pub fn similarities(&self, signature: &Signature, out: &mut [f32]) {
        self.centroids.multiply(&signature.values, out);
    }
}
