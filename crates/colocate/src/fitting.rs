//! A locality map for a running cluster: record counts through a worker, fit.

use std::time::Instant;

use anyhow::{Context, Result};
use experts::CalibrationFile;
use locality::{FitConfig, FitError, FitReport, LocalityMap};
use workload::Prompt;

use crate::{
    calibration,
    client::{Client, Sampling},
    progress::Progress,
};

/// Prompts in flight while recording.
const CONCURRENCY: usize = 32;
/// Tokens generated per prompt: enough to see which experts decoding uses.
const TOKENS: u32 = 32;

/// A map, and how it came about.
#[derive(Debug)]
pub(crate) struct Fitted {
    pub(crate) map: LocalityMap,
    pub(crate) report: FitReport,
    /// Seconds spent recording.
    pub(crate) calibrate_seconds: f64,
    /// Seconds spent fitting.
    pub(crate) fit_seconds: f64,
}

/// Records the counts of `prompts` through a worker that runs whole requests, and fits a map with
/// `clusters` clusters, with the seed of `sampling`.
pub(crate) async fn fit_live(
    solo: &Client,
    prompts: &[Prompt],
    clusters: usize,
    sampling: Sampling,
    progress: Progress,
) -> Result<Fitted> {
    let began = Instant::now();
    let bar = progress.bar("calibrating", prompts.len());
    let recorded = calibration::record(solo, prompts, TOKENS, sampling, CONCURRENCY, &bar).await?;
    drop(bar);
    if let Some((index, error)) = recorded.failures.into_iter().next() {
        return Err(error.context(format!("calibration prompt {} failed", index + 1)));
    }
    let calibrate_seconds = began.elapsed().as_secs_f64();
    let began = Instant::now();
    let _spinner = progress.step("fitting the locality map");
    let file = recorded.file;
    let config = FitConfig {
        clusters,
        seed: sampling.seed,
        ..FitConfig::default()
    };
    let (map, report) = tokio::task::spawn_blocking(move || fit(&file, &config))
        .await
        .context("the fit ended badly")?
        .context("cannot fit a locality map")?;
    Ok(Fitted {
        map,
        report,
        calibrate_seconds,
        fit_seconds: began.elapsed().as_secs_f64(),
    })
}

/// Fits a map, without saying how far it is: it takes less than a second.
pub(crate) fn fit(
    file: &CalibrationFile,
    config: &FitConfig,
) -> Result<(LocalityMap, FitReport), FitError> {
    locality::fit(file, config, &mut |_| {})
}
