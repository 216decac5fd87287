//! Reading a Hugging Face Qwen3-MoE directory.

use std::path::PathBuf;

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

/// Why a checkpoint could not be loaded.
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
}
