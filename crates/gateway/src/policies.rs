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
pub(crate) fn make(config: &mut Config) -> Result<Policies, GatewayError> {
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
            let map = fitting(map, workers, config.seed)?;
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

fn fitting(map: LocalityMap, workers: usize, seed: u64) -> Result<LocalityMap, GatewayError> {
    let clusters = map.clusters();
    if clusters == workers {
        return Ok(map);
    }
    tracing::warn!(
        clusters,
        workers,
        "the locality map has another number of clusters than there are decode workers: refitting from its calibration"
    );
    map.refit(workers, seed)
        .map_err(|error| GatewayError::Refit {
            clusters,
            workers,
            reason: error.to_string(),
        })
}
