//! Prompts to recorded expert counts, through any worker that gives them.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use experts::{CalibrationFile, CalibrationHeader, CalibrationRecord};
use futures::{StreamExt, stream};
use workload::Prompt;

use crate::{
    client::{Ask, Client, Sampling},
    files,
    progress::Step,
};

/// What recording brought.
#[derive(Debug)]
pub(crate) struct Recorded {
    /// The records, in the order of the prompts that gave one.
    pub(crate) file: CalibrationFile,
    /// The prompts that failed, by index, and why.
    pub(crate) failures: Vec<(usize, anyhow::Error)>,
}

/// Runs every prompt on the worker behind `client`, `concurrency` at a time, generating `tokens` tokens each. The seed of a prompt's
/// draws is that of `sampling` plus the prompt's index.
///
/// # Errors
/// Only when no prompt at all gave a record; otherwise failures are listed.
pub(crate) async fn record(
    client: &Client,
    prompts: &[Prompt],
    tokens: u32,
    sampling: Sampling,
    concurrency: usize,
    step: &Step,
) -> Result<Recorded> {
    let mut results = stream::iter(prompts.iter().enumerate())
        .map(|(index, prompt)| one(client, prompt, tokens, sampling.of(index)))
        .buffered(concurrency.max(1));
    let (mut records, mut failures) = (Vec::with_capacity(prompts.len()), Vec::new());
    let mut index = 0;
    while let Some(result) = results.next().await {
        match result {
            Ok(record) => records.push(record),
            Err(error) => failures.push((index, error)),
        }
        index += 1;
        step.advance();
    }
    let Some(shape) = records.first().map(CalibrationRecord::shape) else {
        let why = failures
            .into_iter()
            .next()
            .map_or_else(|| anyhow!("there were no prompts"), |(_, error)| error);
        return Err(why.context("no prompt gave a record"));
    };
    let header = CalibrationHeader::new(client.model(), shape);
    Ok(Recorded {
        file: CalibrationFile { header, records },
        failures,
    })
}

async fn one(
    client: &Client,
    prompt: &Prompt,
    tokens: u32,
    sampling: Sampling,
) -> Result<CalibrationRecord> {
    let ask = Ask {
        prompt: &prompt.prompt,
        domain: None,
        tokens,
        sampling,
    };
    let extras = client.counts(&ask).await?;
    let counts = extras
        .prompt_counts
        .context("the worker gave no prompt counts")?;
    let decode = extras.output_counts.map(experts::PromptCounts::into_counts);
    Ok(CalibrationRecord {
        gate_probabilities: extras.gate_probabilities,
        gate_logits: extras.gate_logits,
        domain: prompt.domain.clone(),
        workload: prompt.workload.map(|workload| workload.to_string()),
        ..CalibrationRecord::new(counts, decode)
    })
}

/// Reads a calibration file.
pub(crate) fn read(path: &Path) -> Result<CalibrationFile> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read calibration file {}", path.display()))?;
    CalibrationFile::parse(&text)
        .with_context(|| format!("cannot use calibration file {}", path.display()))
}

/// Writes a calibration file.
pub(crate) fn write(file: &CalibrationFile, path: &Path) -> Result<()> {
    files::write(path, file.to_jsonl()?.as_bytes())
}
