//! A map as one safetensors file.
//!
//! # Tensors
//!
//! | name | type | shape | holds |
//! |---|---|---|---|
//! | `idf` | F32 | layers x experts | `ln((N + 1) / (df + 1))`, all layers |
//! | `mask` | U32 | kept | layers kept, ascending |
//! | `centroids` | F32 | clusters x (kept * experts) | unit rows, or zero ones |
//! | `calibration` | U8 | bytes | counts of the kept layers per record, `experts::wire` form without base64, one after another |
//! | `calibration_ends` | U64 | records | where each record ends in `calibration` |
//! | `calibration_values` | F32 | records x (kept * experts) | instead of both, for gate transforms |
//!
//! # Metadata
//!
//! One entry, `colocate_locality_map`, of JSON, so that the same map gives the same bytes:
//!
//! | field | holds |
//! |---|---|
//! | `version` | 1; a reader refuses a greater one |
//! | `model` | the model's name |
//! | `shape` | `{"layers","experts","top_k"}` |
//! | `transform` | `count_idf`, `count`, `sqrt_count`, `gate_probability`, `gate_logit`, `binary` |
//! | `clustering` | `balanced` or `plain`; with `restarts` (at most 100), `max_iterations` (at most 10,000) and `seed` it repeats a refit |
//! | `quality` | `rho`, `rho_all_layers`, `cluster_sizes`, `within_similarity`, `between_similarity` |
//! | `checksum` | XXH3-64 in hex over this JSON with an empty `checksum`, then all tensors in the table's order, each as its length (u64, little-endian) and its bytes |

use std::collections::HashMap;

use experts::{ModelShape, ShapeError, WireError};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use xxhash_rust::xxh3::Xxh3Default;

use crate::calibration::Calibration;
use crate::config::Clustering;
use crate::fit::{FitError, check_work, kept_shape, weights};
use crate::map::LocalityMap;
use crate::panels::Panels;
use crate::report::Quality;
use crate::transform::Transform;

const KEY: &str = "colocate_locality_map";

/// The version of the file's form that this build writes, and the latest that it reads.
pub const MAP_VERSION: u32 = 1;

/// Bytes that are no map this build can use.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MapError {
    /// Not a safetensors file, or one cut short.
    #[error(
        "expected a locality map (a safetensors file), got something else or a part of one: {0}"
    )]
    Safetensors(#[from] safetensors::SafeTensorError),
    /// A safetensors file of another kind.
    #[error("expected a locality map, got a safetensors file without {KEY:?} in its metadata")]
    NotAMap,
    /// The metadata is not what the schema says.
    #[error("metadata of the locality map: {0}")]
    Metadata(#[from] serde_json::Error),
    /// Written by a later build.
    #[error(
        "expected a locality map of version {MAP_VERSION} at most, got {got}: made by a newer colocate"
    )]
    Newer {
        /// The file's version.
        got: u32,
    },
    /// A shape that is no model's.
    #[error("locality map: {0}")]
    Shape(#[from] ShapeError),
    /// A tensor is missing or not what the schema says.
    #[error("tensor {name:?} of the locality map: expected {expected}, got {got}")]
    Tensor {
        /// The tensor.
        name: &'static str,
        /// What it should be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// The data is not what was written.
    #[error("damaged locality map: expected checksum {expected}, got {got}")]
    Checksum {
        /// What the metadata says.
        expected: String,
        /// What the data gives.
        got: String,
    },
    /// A refit of it would do more than any fit does.
    #[error("locality map: {0}")]
    Work(FitError),
    /// The calibration counts cannot be read.
    #[error("calibration counts of the locality map: {0}")]
    Calibration(#[from] WireError),
}

#[derive(Serialize, Deserialize)]
struct Metadata {
    version: u32,
    model: String,
    shape: ModelShape,
    transform: Transform,
    clustering: Clustering,
    restarts: usize,
    max_iterations: usize,
    seed: u64,
    quality: Quality,
    checksum: String,
}

/// Read first, so that a newer file's other fields may be anything.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl LocalityMap {
    /// The map as the bytes of one safetensors file. The same map gives the same bytes.
    ///
    /// # Errors
    /// None in practice: what a map holds can be written.
    pub fn to_bytes(&self) -> Result<Vec<u8>, MapError> {
        let kept = self.dimension();
        let columns: Vec<f32> = (0..self.clusters())
            .flat_map(|k| self.centroids.column(k))
            .collect();
        let le = |values: &[f32]| -> Vec<u8> {
            values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect()
        };
        let (layers, experts) = (self.shape.layers as usize, self.shape.experts as usize);
        let mask: Vec<u8> = self.mask.iter().flat_map(|l| l.to_le_bytes()).collect();
        let mut tensors = vec![
            ("idf", Dtype::F32, vec![layers, experts], le(&self.idf)),
            ("mask", Dtype::U32, vec![self.mask.len()], mask),
            (
                "centroids",
                Dtype::F32,
                vec![self.clusters(), kept],
                le(&columns),
            ),
        ];
        match &self.calibration {
            Calibration::Counts { bytes, ends } => {
                let ends_le = ends.iter().flat_map(|end| end.to_le_bytes()).collect();
                tensors.push(("calibration", Dtype::U8, vec![bytes.len()], bytes.clone()));
                tensors.push(("calibration_ends", Dtype::U64, vec![ends.len()], ends_le));
            }
            Calibration::Values { values, .. } => tensors.push((
                "calibration_values",
                Dtype::F32,
                vec![self.calibration.len(), kept],
                le(values),
            )),
        }
        let mut metadata = Metadata {
            version: MAP_VERSION,
            model: self.model.clone(),
            shape: self.shape,
            transform: self.transform,
            clustering: self.clustering,
            restarts: self.restarts,
            max_iterations: self.max_iterations,
            seed: self.seed,
            quality: self.quality.clone(),
            checksum: String::new(),
        };
        metadata.checksum = checksum(
            &serde_json::to_string(&metadata)?,
            tensors.iter().map(|(_, _, _, data)| data.as_slice()),
        );
        let metadata = HashMap::from([(KEY.to_owned(), serde_json::to_string(&metadata)?)]);
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, data)| {
                Ok((*name, TensorView::new(*dtype, shape.clone(), data)?))
            })
            .collect::<Result<Vec<_>, MapError>>()?;
        Ok(safetensors::serialize(views, Some(metadata))?)
    }

    /// Reads a map back, checking all of it.
    ///
    /// # Errors
    /// See [`MapError`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, MapError> {
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        let text = header
            .metadata()
            .as_ref()
            .and_then(|metadata| metadata.get(KEY))
            .ok_or(MapError::NotAMap)?;
        let Version { version } = serde_json::from_str(text)?;
        if version > MAP_VERSION {
            return Err(MapError::Newer { got: version });
        }
        let metadata: Metadata = serde_json::from_str(text)?;
        check_work(metadata.restarts, metadata.max_iterations).map_err(MapError::Work)?;
        let tensors = SafeTensors::deserialize(bytes)?;
        Reader {
            tensors: &tensors,
            shape: metadata.shape.check()?,
        }
        .read(metadata, text)
    }
}

struct Reader<'a> {
    tensors: &'a SafeTensors<'a>,
    shape: ModelShape,
}

impl Reader<'_> {
    fn read(&self, metadata: Metadata, text: &str) -> Result<LocalityMap, MapError> {
        let (layers, experts) = (self.shape.layers as usize, self.shape.experts as usize);
        let idf_data = self.tensor("idf", Dtype::F32, &[Some(layers), Some(experts)])?;
        let mask_data = self.tensor("mask", Dtype::U32, &[None])?;
        let mask: Vec<u32> = le_u32(mask_data);
        let rising = mask.windows(2).all(|two| two[0] < two[1]);
        if !rising || mask.last().is_none_or(|&last| last as usize >= layers) {
            return Err(MapError::Tensor {
                name: "mask",
                expected: format!("distinct ascending layers below {layers}"),
                got: format!("{mask:?}"),
            });
        }
        let kept = mask.len() * experts;
        let centroid_data = self.tensor("centroids", Dtype::F32, &[None, Some(kept)])?;
        if centroid_data.is_empty() {
            return Err(MapError::Tensor {
                name: "centroids",
                expected: "at least one".to_owned(),
                got: "none".to_owned(),
            });
        }
        let mut parts = vec![idf_data, mask_data, centroid_data];
        let calibration = if metadata.transform.needs_counts_only() {
            let bytes = self.tensor("calibration", Dtype::U8, &[None])?;
            let ends = self.tensor("calibration_ends", Dtype::U64, &[None])?;
            parts.extend([bytes, ends]);
            let ends = ends
                .as_chunks::<8>()
                .0
                .iter()
                .map(|&e| u64::from_le_bytes(e));
            Calibration::Counts {
                bytes: bytes.to_vec(),
                ends: ends.collect(),
            }
        } else {
            let data = self.tensor("calibration_values", Dtype::F32, &[None, Some(kept)])?;
            parts.push(data);
            Calibration::Values {
                dimension: kept,
                values: le_f32(data),
            }
        };
        // As it was written, before the checksum was filled in.
        let filled = format!("\"checksum\":\"{}\"", metadata.checksum);
        let text = text.replacen(&filled, "\"checksum\":\"\"", 1);
        let got = checksum(&text, parts.into_iter());
        if got != metadata.checksum {
            return Err(MapError::Checksum {
                expected: metadata.checksum,
                got,
            });
        }
        let idf = finite("idf", le_f32(idf_data))?;
        let centroids = finite("centroids", le_f32(centroid_data))?;
        calibration.unpack(kept_shape(self.shape, &mask))?;
        Ok(LocalityMap {
            model: metadata.model,
            shape: self.shape,
            transform: metadata.transform,
            weights: weights(&idf, &mask, self.shape),
            idf,
            centroids: Panels::pack(kept, &centroids),
            mask,
            clustering: metadata.clustering,
            restarts: metadata.restarts,
            max_iterations: metadata.max_iterations,
            seed: metadata.seed,
            calibration,
            quality: metadata.quality,
        })
    }

    /// A tensor's bytes, of the given type and dimensions (`None`: any).
    fn tensor(
        &self,
        name: &'static str,
        dtype: Dtype,
        shape: &[Option<usize>],
    ) -> Result<&[u8], MapError> {
        let view = self.tensors.tensor(name)?;
        let fits = view.shape().len() == shape.len()
            && view
                .shape()
                .iter()
                .zip(shape)
                .all(|(&got, wanted)| wanted.is_none_or(|wanted| wanted == got));
        if view.dtype() == dtype && fits {
            return Ok(view.data());
        }
        let dimensions: Vec<String> = shape
            .iter()
            .map(|wanted| wanted.map_or("any".to_owned(), |n| n.to_string()))
            .collect();
        Err(MapError::Tensor {
            name,
            expected: format!("{dtype:?} of [{}]", dimensions.join(", ")),
            got: format!("{:?} of {:?}", view.dtype(), view.shape()),
        })
    }
}

/// Over the metadata's text, its own checksum empty, and the tensors' bytes.
fn checksum<'a>(metadata: &str, tensors: impl Iterator<Item = &'a [u8]>) -> String {
    let mut hash = Xxh3Default::new();
    let mut add = |part: &[u8]| {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    };
    add(metadata.as_bytes());
    tensors.for_each(&mut add);
    format!("{:016x}", hash.digest())
}

fn le_f32(bytes: &[u8]) -> Vec<f32> {
    let values = bytes.as_chunks::<4>().0.iter();
    values.map(|&value| f32::from_le_bytes(value)).collect()
}

fn le_u32(bytes: &[u8]) -> Vec<u32> {
    let values = bytes.as_chunks::<4>().0.iter();
    values.map(|&value| u32::from_le_bytes(value)).collect()
}

fn finite(name: &'static str, values: Vec<f32>) -> Result<Vec<f32>, MapError> {
    match values.iter().find(|value| !value.is_finite()) {
        Some(value) => Err(MapError::Tensor {
            name,
            expected: "finite values".to_owned(),
            got: value.to_string(),
        }),
        None => Ok(values),
    }
}
