//! Files that commands read, with errors that name them.

use std::{
    fs::File,
    io::{BufReader, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use workload::Prompt;

use crate::output::BadUsage;

/// Writes a file whole or not at all: what stands there before is replaced only once all bytes are on the disk beside it.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let special = path
        .metadata()
        .is_ok_and(|existing| !existing.is_file() && !existing.is_dir());
    let written = if special {
        std::fs::write(path, bytes)
    } else {
        replace(path, bytes)
    };
    written.with_context(|| format!("cannot write {}", path.display()))
}

fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.prefix(".colocate-").tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Reads a prompt file.
pub(crate) fn prompts(path: &Path) -> Result<Vec<Prompt>> {
    let file =
        File::open(path).with_context(|| format!("cannot open prompt file {}", path.display()))?;
    workload::read_prompts(BufReader::new(file))
        .with_context(|| format!("cannot use prompt file {}", path.display()))
}

/// The model to run: `given`, or the demo model, looked for in `models/demo` under the current folder and its parents, then
/// under the folders above this program.
pub(crate) fn model(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(given) = given {
        if !given.join("config.json").is_file() {
            return Err(BadUsage(format!(
                "expected a model folder with a config.json at {}, found none",
                given.display()
            ))
            .into());
        }
        return Ok(given.to_owned());
    }
    let starts = [std::env::current_dir().ok(), std::env::current_exe().ok()];
    starts
        .iter()
        .flatten()
        .flat_map(|start| start.ancestors())
        .map(|folder| folder.join("models").join("demo"))
        .find(|model| model.join("config.json").is_file())
        .ok_or_else(|| {
            BadUsage(
                "found no models/demo with a config.json here, above, or above this program: run inside a clone of the repository, \
                 or name a model with --model DIR"
                    .into(),
            )
            .into()
        })
}

/// The name of a folder, also of one written as `.` or with `..` at its end.
pub(crate) fn folder_name(folder: &Path) -> String {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    whole.file_name().map_or_else(
        || "model".into(),
        |name| name.to_string_lossy().into_owned(),
    )
}

/// The prompt file of a model: `given`, or the model's own `prompts/<name>.jsonl`.
pub(crate) fn model_prompts(given: Option<&Path>, model: &Path, name: &str) -> Result<Vec<Prompt>> {
    match given {
        Some(path) => prompts(path),
        None => prompts(&model.join("prompts").join(format!("{name}.jsonl"))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_failed_write_leaves_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("map");
        write(&file, b"first").unwrap();
        write(&file, b"second").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"second");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        // A folder cannot be replaced by a file.
        assert!(write(folder.path(), b"third").is_err());
        assert!(write(&folder.path().join("none").join("map"), b"third").is_err());
        assert_eq!(std::fs::read(&file).unwrap(), b"second");
    }
}
