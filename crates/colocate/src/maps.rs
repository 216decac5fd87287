//! Locality maps on disk, and how their figures read.

use std::path::Path;

use anyhow::{Context, Result};
use locality::{Clustering, LocalityMap, Quality};

use crate::files;

/// Reads a locality map.
pub(crate) fn read(path: &Path) -> Result<LocalityMap> {
    let bytes = std::fs::read(path)
        .with_context(|| format!("cannot read locality map {}", path.display()))?;
    LocalityMap::from_bytes(&bytes)
        .with_context(|| format!("cannot use locality map {}", path.display()))
}

/// Writes a locality map.
pub(crate) fn write(map: &LocalityMap, path: &Path) -> Result<()> {
    let bytes = map
        .to_bytes()
        .context("cannot put the locality map into bytes")?;
    files::write(path, &bytes)
}

/// The lines that `fit` and `inspect` share: layers, clusters, similarities.
pub(crate) fn quality_text(
    quality: &Quality,
    kept: &[u32],
    layers: u32,
    clustering: Clustering,
) -> String {
    let kept: Vec<String> = kept.iter().map(u32::to_string).collect();
    let sizes: Vec<String> = quality.cluster_sizes.iter().map(u32::to_string).collect();
    let clustering = match clustering {
        Clustering::Balanced => "balanced",
        Clustering::Plain => "plain",
    };
    format!(
        "layers kept: {} of {layers} ({}); rho {} with them, {} with all\n\
         clusters: {} ({clustering}), sizes {}\n\
         similarity: {:.3} within clusters, {} between\n",
        kept.len(),
        kept.join(" "),
        figure(quality.rho),
        figure(quality.rho_all_layers),
        sizes.len(),
        sizes.join(" "),
        quality.within_similarity,
        figure(quality.between_similarity),
    )
}

/// A figure to three digits, or a dash where there is none.
pub(crate) fn figure(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value:.3}"))
}
