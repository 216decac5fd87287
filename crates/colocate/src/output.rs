//! What a command leaves behind: its verdict, its report, its errors.

use std::io::{self, Write};

use anyhow::{Context, Result};
use comfy_table::{LineStyle, TableStyle};
use serde::Serialize;

/// How tables look: lines above, below and under the header, none between rows.
pub(crate) const TABLE: TableStyle = TableStyle::new()
    .top_border(LineStyle::none().fill('─').junction('─'))
    .header_separator(LineStyle::none().fill('─').junction('─'))
    .bottom_border(LineStyle::none().fill('─').junction('─'));

/// How a command that ran to its end came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Everything that it checks held: exit code 0.
    Passed,
    /// It ran, and a check in it failed: exit code 1.
    Failed,
}

impl Verdict {
    /// Passed when `checks_held`.
    pub(crate) fn from_checks(checks_held: bool) -> Self {
        if checks_held {
            Self::Passed
        } else {
            Self::Failed
        }
    }
}

/// Arguments that each parse but make no sense together or with the files they name: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadUsage(pub(crate) String);

/// Writes a command's result to standard output: one JSON object, or text for people.
///
/// A reader that has gone away (`colocate inspect ... | head`) is no error.
pub(crate) fn report(
    json: bool,
    value: &impl Serialize,
    text: impl FnOnce() -> String,
) -> Result<()> {
    let mut rendered = if json {
        serde_json::to_string(value).context("cannot write the report as JSON")?
    } else {
        text()
    };
    if !rendered.ends_with('\n') {
        rendered.push('\n');
    }
    let mut out = io::stdout().lock();
    match out
        .write_all(rendered.as_bytes())
        .and_then(|()| out.flush())
    {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
}

/// An error and its causes on one line; causes that the line already ends with are not repeated.
pub(crate) fn error_text(error: &anyhow::Error) -> String {
    let mut text = String::from("error: ");
    for (depth, cause) in error.chain().enumerate() {
        let cause = cause.to_string();
        if depth == 0 {
            text.push_str(&cause);
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_chains_read_as_one_line() {
        let error = anyhow::anyhow!("line 3: not JSON").context("cannot read prompts.jsonl");
        assert_eq!(
            error_text(&error),
            "error: cannot read prompts.jsonl: line 3: not JSON"
        );
        let repeats = anyhow::anyhow!("refused").context("cannot connect: refused");
        assert_eq!(error_text(&repeats), "error: cannot connect: refused");
    }
}
