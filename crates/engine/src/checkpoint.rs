//! Reading a Hugging Face Qwen3-MoE directory.
//!
//! The safetensors files are mapped, each tensor is checked against the shape that the configuration implies and handed out as
//! bf16 (matrices) or f32 (norm weights). A directory that is wrong in any way is an error that names the file or the tensor.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

/// How a checkpoint is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadOptions {
    /// Each expert's intermediate size is padded to this many times its own size with zeros that are really written: the same
    /// bits come out, and every expert costs this many times the memory traffic. 1 pads nothing.
    pub expert_padding: usize,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { expert_padding: 1 }
    }
}

/// Why a model directory could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file could not be opened, read or mapped.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not the JSON that was expected.
    #[error("cannot parse {}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A configuration that contradicts itself or is incomplete.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A valid model that this engine does not compute.
    #[error("{}: not supported: {what}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What it asks for.
        what: String,
    },
    /// A safetensors file that is cut short or damaged.
    #[error("{}: damaged safetensors file: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A tensor that the configuration implies is nowhere.
    #[error("{}: no tensor {name}", path.display())]
    MissingTensor {
        /// The model directory.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A tensor of another shape than the configuration implies.
    #[error("{}: tensor {name} has shape {got:?}, expected {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
        /// The shape in the file.
        got: Vec<usize>,
    },
    /// The kernels refuse a matrix.
    #[error("cannot pack {name}: {source}")]
    Pack {
        /// The tensor, or what its tensors have in common.
        name: String,
        /// What the kernels said.
        source: kernels::ShapeError,
    },
    /// The tokenizer's files are missing something or damaged.
    #[error("{}: {reason}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Loading options that make no sense.
    #[error("expert padding is {0}, expected 1 to 1024")]
    Padding(usize),
}

/// Where a tensor lies.
#[derive(Debug, Clone)]
struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

/// The tensors of a model directory, mapped.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    dir: PathBuf,
    files: Vec<(PathBuf, Mmap)>,
    entries: BTreeMap<String, Entry>,
    unused: BTreeSet<String>,
    hasher: blake3::Hasher,
}

#[derive(Debug, Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Maps the files of `dir` and reads their headers.
    pub(crate) fn open(dir: &Path) -> Result<Self, LoadError> {
        let mut checkpoint = Self {
            dir: dir.to_path_buf(),
            files: Vec::new(),
            entries: BTreeMap::new(),
            unused: BTreeSet::new(),
            hasher: blake3::Hasher::new(),
        };
        let index_path = dir.join("model.safetensors.index.json");
        if index_path.exists() {
            checkpoint.open_sharded(&index_path)?;
        } else {
            let path = dir.join("model.safetensors");
            let tensors = checkpoint.map(&path)?;
            checkpoint.entries = tensors.into_iter().collect();
        }
        checkpoint.unused = checkpoint.entries.keys().cloned().collect();
        Ok(checkpoint)
    }

    fn open_sharded(&mut self, index_path: &Path) -> Result<(), LoadError> {
        let text = std::fs::read(index_path).map_err(|source| LoadError::Io {
            path: index_path.to_path_buf(),
            source,
        })?;
        let index: Index = serde_json::from_slice(&text).map_err(|source| LoadError::Json {
            path: index_path.to_path_buf(),
            source,
        })?;
        let mut shards: BTreeMap<&str, BTreeMap<String, Entry>> = BTreeMap::new();
        for (name, shard) in &index.weight_map {
            if !shards.contains_key(shard.as_str()) {
                if Path::new(shard)
                    .file_name()
                    .is_none_or(|file| file != shard.as_str())
                {
                    let reason =
                        format!("weight_map names {shard:?}, expected a file of this folder");
                    return Err(LoadError::Config {
                        path: index_path.to_path_buf(),
                        reason,
                    });
                }
                let tensors = self.map(&self.dir.join(shard))?;
                shards.insert(shard, tensors.into_iter().collect());
            }
            let Some(entry) = shards[shard.as_str()].get(name) else {
                return Err(LoadError::MissingTensor {
                    path: self.dir.join(shard),
                    name: name.clone(),
                });
            };
            self.entries.insert(name.clone(), entry.clone());
        }
        Ok(())
    }

    fn map(&mut self, path: &Path) -> Result<Vec<(String, Entry)>, LoadError> {
        let io = |source| LoadError::Io {
            path: path.to_path_buf(),
            source,
        };
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Err(LoadError::Damaged {
                path: path.to_path_buf(),
                reason: "the file is empty".to_owned(),
            });
        }
        // SAFETY: the mapping is read-only and private to this value, which lives no longer than the loading of the model: every
        // tensor is copied out of it. What the compiler may assume, that the bytes do not change meanwhile, holds as long as nobody
        // truncates or rewrites the file during those moments; checkpoint files are written once, and replaced by renaming.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let damaged = |error: safetensors::SafeTensorError| LoadError::Damaged {
            path: path.to_path_buf(),
            reason: error.to_string(),
        };
        // Checks that the header is sound, that every tensor lies inside the file and that its size is that of its shape.
        let (header, metadata) = SafeTensors::read_metadata(&map).map_err(damaged)?;
        let data_start = header + size_of::<u64>();
        let index = self.files.len();
        let tensors = metadata
            .tensors()
            .into_iter()
            .map(|(name, info)| {
                let bytes = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
                (
                    name,
                    Entry {
                        file: index,
                        dtype: info.dtype,
                        shape: info.shape.clone(),
                        bytes,
                    },
                )
            })
            .collect();
        self.files.push((path.to_path_buf(), map));
        Ok(tensors)
    }

    /// Whether there is a tensor of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The raw bytes of a tensor, after the check of its shape and type.
    fn bytes(&mut self, name: &str, expected: &[usize]) -> Result<(Dtype, &[u8]), LoadError> {
        let Some(entry) = self.entries.get(name) else {
            return Err(LoadError::MissingTensor {
                path: self.dir.clone(),
                name: name.to_owned(),
            });
        };
        let (path, map) = &self.files[entry.file];
        if entry.shape != expected {
            return Err(LoadError::Shape {
                path: path.clone(),
                name: name.to_owned(),
                expected: expected.to_vec(),
                got: entry.shape.clone(),
            });
        }
        if !matches!(entry.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
            let what = format!(
                "tensor {name} of type {:?} (only BF16, F16 and F32)",
                entry.dtype
            );
            return Err(LoadError::Unsupported {
                path: path.clone(),
                what,
            });
        }
        self.unused.remove(name);
        let bytes = &map[entry.bytes.clone()];
        self.hasher.update(name.as_bytes());
        self.hasher.update(bytes);
        Ok((entry.dtype, bytes))
    }

    /// A tensor as bf16, row-major, appended to `out`. f16 and f32 are rounded to nearest, ties to even.
    pub(crate) fn append_bf16(
        &mut self,
        name: &str,
        shape: &[usize],
        out: &mut Vec<bf16>,
    ) -> Result<(), LoadError> {
        let (dtype, bytes) = self.bytes(name, shape)?;
        match dtype {
            Dtype::BF16 => out.extend(
                bytes
                    .chunks_exact(2)
                    .map(|b| bf16::from_le_bytes([b[0], b[1]])),
            ),
            Dtype::F16 => {
                out.extend(
                    bytes
                        .chunks_exact(2)
                        .map(|b| bf16::from_f32(f16::from_le_bytes([b[0], b[1]]).to_f32())),
                );
            }
            _ => out.extend(
                bytes
                    .chunks_exact(4)
                    .map(|b| bf16::from_f32(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
            ),
        }
        Ok(())
    }

    /// A vector as f32, exactly.
    pub(crate) fn f32_vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let (dtype, bytes) = self.bytes(name, &[len])?;
        Ok(match dtype {
            Dtype::BF16 => bytes
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            Dtype::F16 => bytes
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            _ => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        })
    }

    /// Ends the loading: refuses tensors that would change the result if they were left out, and returns a hash of all that was read.
    pub(crate) fn finish(self) -> Result<blake3::Hasher, LoadError> {
        let changes_the_result = |name: &&String| {
            [".bias", "scale", "qweight", "qzeros", "g_idx", "lora_"]
                .iter()
                .any(|mark| name.contains(mark))
        };
        if let Some(name) = self.unused.iter().find(changes_the_result) {
            return Err(LoadError::Unsupported {
                path: self.dir,
                what: format!("tensor {name}"),
            });
        }
        if !self.unused.is_empty() {
            tracing::debug!(
                count = self.unused.len(),
                first = self.unused.first(),
                "tensors that the model does not use"
            );
        }
        Ok(self.hasher)
    }
}
