//! From the configuration to the two policies; a locality map for another number of workers is refitted here.

use experts::ModelShape;
use locality::LocalityMap;
use routing::{DecodeOptions, DecodePolicy, DecodePolicyName, PrefillPolicy};
use serde::Serialize;

use crate::config::Config;
use crate::errors::GatewayError;

/// What `/health` says about the locality map.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct MapNote {
    /// Centroids in use, one per decode worker.
    pub(crate) clusters: usize,
    /// Centroids in the file, where they were another number.
    pub(crate) refitted_from: Option<usize>,
    /// Width of the similarity band.
    pub(crate) tau: f32,
    /// The model that it was fitted for.
    #[serde(skip)]
    pub(crate) shape: ModelShape,
}

/// Both policies, and what is to be said about the map.
pub(crate) struct Policies {
    pub(crate) prefill: Box<dyn PrefillPolicy>,
    pub(crate) decode: Box<dyn DecodePolicy>,
    pub(crate) map: Option<MapNote>,
}

/// Makes the policies, taking the map out of the configuration.
pub(crate) async fn make(config: &mut Config) -> Result<Policies, GatewayError> {
    let names: Vec<&str> = config.prefill.iter().map(reqwest::Url::as_str).collect();
    let prefill = routing::prefill_policy(config.prefill_policy, &names);
    let workers = config.decode.len();
    let name = config.decode_policy.unwrap_or(match config.locality_map {
        Some(_) => DecodePolicyName::Locality,
        None => DecodePolicyName::LeastLoaded,
    });
    let (map, note) = match config.locality_map.take() {
        Some(map) if name == DecodePolicyName::Locality => {
            let from = map.clusters();
            let map = fitting(map, workers, config.seed).await?;
            let note = MapNote {
                clusters: workers,
                refitted_from: (from != workers).then_some(from),
                tau: config.locality.band.tau,
                shape: map.shape(),
            };
            (Some(map), Some(note))
        }
        Some(_) => {
            tracing::warn!(
                policy = name.as_str(),
                "a locality map is given that the decode policy does not use"
            );
            (None, None)
        }
        None => (None, None),
    };
    let options = DecodeOptions {
        workers,
        seed: config.seed,
        map,
        locality: config.locality,
    };
    Ok(Policies {
        prefill,
        decode: routing::decode_policy(name, options)?,
        map: note,
    })
}

/// The map for this many workers. A refit computes for seconds, so it runs beside the runtime.
async fn fitting(map: LocalityMap, workers: usize, seed: u64) -> Result<LocalityMap, GatewayError> {
    let clusters = map.clusters();
    if clusters == workers {
        return Ok(map);
    }
    tracing::warn!(
        clusters,
        workers,
        "the locality map has another number of clusters than there are decode workers: refitting from its calibration"
    );
    let failed = |reason: String| GatewayError::Refit {
        clusters,
        workers,
        reason,
    };
    tokio::task::spawn_blocking(move || map.refit(workers, seed))
        .await
        .map_err(|error| failed(error.to_string()))?
        .map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use experts::{
        CalibrationFile, CalibrationHeader, CalibrationRecord, ExpertCounts, PromptCounts,
    };
    use locality::{FitConfig, MaskChoice, Transform};

    fn map(records: u16, clusters: usize) -> LocalityMap {
        let shape = ModelShape {
            layers: 1,
            experts: 8,
            top_k: 1,
        };
        let records = (0..records).map(|record| {
            let mut counts = ExpertCounts::zeros(shape);
            counts.record(0, &[record % 8]).unwrap();
            CalibrationRecord::new(PromptCounts::complete(counts).unwrap(), None)
        });
        let file = CalibrationFile {
            header: CalibrationHeader::new("m", shape),
            records: records.collect(),
        };
        let config = FitConfig {
            clusters,
            transform: Some(Transform::Count),
            mask: MaskChoice::All,
            ..FitConfig::default()
        };
        locality::fit(&file, &config, &mut |_| {}).unwrap().0
    }

    #[tokio::test]
    async fn a_refit_does_not_hold_the_runtime_up() {
        let mut refit = Box::pin(fitting(map(16, 2), 4, 0));
        // Done in place, it would be over at the first look.
        assert!(futures::poll!(&mut refit).is_pending());
        assert_eq!(refit.await.unwrap().clusters(), 4);
        let mut as_it_is = Box::pin(fitting(map(16, 2), 2, 0));
        assert!(futures::poll!(&mut as_it_is).is_ready());
    }

    #[tokio::test]
    async fn a_map_that_cannot_be_refitted_says_why() {
        let error = fitting(map(3, 2), 4, 0).await.unwrap_err().to_string();
        assert!(
            error.contains("2 clusters for 4 decode workers and cannot be refitted"),
            "{error}"
        );
    }
}
