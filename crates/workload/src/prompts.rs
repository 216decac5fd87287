//! Prompt files: one JSON object a line.

use std::{fmt, io::BufRead, str::FromStr};

use serde::{Deserialize, Serialize};

/// The two kinds of workload that the locality paper serves (arXiv 2607.00466): requests that differ by task, or by language.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Workload {
    /// Domains such as code, mathematics, medicine and law.
    Task,
    /// Natural languages.
    Language,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Task => "task",
            Self::Language => "language",
        })
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "task" => Ok(Self::Task),
            "language" => Ok(Self::Language),
            other => Err(format!("expected task or language, got {other:?}")),
        }
    }
}

/// One prompt and what is known of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prompt {
    /// The text that is sent.
    pub prompt: String,
    /// What it is about, for example `law` or `fr`. The `domain` policy routes by it; locality never sees it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Which workload it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<Workload>,
}

/// Why a prompt file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// A line could not be read.
    #[error("cannot read line {line}")]
    Read {
        /// Counted from 1.
        line: usize,
        /// What the reader said.
        source: std::io::Error,
    },
    /// A line is not a prompt.
    #[error(
        "line {line}: expected an object {{\"prompt\": text, \"domain\"?: text, \"workload\"?: \"task\"|\"language\"}}: {source}"
    )]
    Parse {
        /// Counted from 1.
        line: usize,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// A prompt has no text.
    #[error("line {line}: expected a prompt with some text, got an empty one")]
    Empty {
        /// Counted from 1.
        line: usize,
    },
    /// There is no prompt at all.
    #[error("expected at least one prompt, got none")]
    None,
}

/// Reads a prompt file: JSONL, one [`Prompt`] a line; blank lines are skipped, unknown fields ignored.
///
/// # Errors
/// The first line that cannot be read, is not a prompt or has an empty prompt, by its number; or no prompt at all.
pub fn read_prompts(reader: impl BufRead) -> Result<Vec<Prompt>, PromptError> {
    let mut prompts = Vec::new();
    for (index, text) in reader.lines().enumerate() {
        let line = index + 1;
        let text = text.map_err(|source| PromptError::Read { line, source })?;
        if text.trim().is_empty() {
            continue;
        }
        let prompt: Prompt =
            serde_json::from_str(&text).map_err(|source| PromptError::Parse { line, source })?;
        if prompt.prompt.is_empty() {
            return Err(PromptError::Empty { line });
        }
        prompts.push(prompt);
    }
    if prompts.is_empty() {
        return Err(PromptError::None);
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn reads_what_is_there_and_skips_blank_lines() {
        let text = "{\"prompt\":\"a\",\"domain\":\"law\",\"workload\":\"task\"}\n\n{\"prompt\":\"b\",\"source\":7}\n";
        let prompts = read_prompts(text.as_bytes()).unwrap();
        assert_eq!(prompts.len(), 2);
        assert_eq!(prompts[0].domain.as_deref(), Some("law"));
        assert_eq!(prompts[0].workload, Some(Workload::Task));
        assert_eq!(prompts[1].prompt, "b");
        assert_eq!(prompts[1].domain, None);
    }

    #[test]
    fn names_the_line_that_is_wrong() {
        let cases: [(&[u8], &str); 6] = [
            (b"{\"prompt\":\"a\"}\nnonsense\n", "line 2"),
            (b"{\"prompt\":\"a\"}\n\n{\"domain\":\"law\"}\n", "line 3"),
            (
                b"{\"prompt\":\"\"}\n",
                "line 1: expected a prompt with some text",
            ),
            (b"{\"prompt\":\"a\",\"workload\":\"chat\"}\n", "line 1"),
            (b"{\"prompt\":\"a\"}\n\xff\xfe\n", "cannot read line 2"),
            (b"\n\n", "expected at least one prompt"),
        ];
        for (text, expected) in cases {
            let message = read_prompts(text).unwrap_err().to_string();
            assert!(message.contains(expected), "{message:?} lacks {expected:?}");
        }
    }
}
