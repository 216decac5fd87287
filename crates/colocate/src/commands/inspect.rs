//! `colocate inspect`: what a file of ours holds.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use experts::{CalibrationFile, ModelShape};
use locality::LocalityMap;
use serde::Serialize;
use serde_json::json;

use crate::{
    maps,
    output::{self, Verdict},
};

/// Arguments of `colocate inspect`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Recorded counts, a locality map, a prompt file or a model folder
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What a file turned out to be.
enum Found {
    Map(Box<LocalityMap>),
    Calibration(CalibrationFile),
    Prompts(Vec<workload::Prompt>),
    Model(serde_json::Value),
}

/// Shows a file.
pub(crate) fn run(args: &Args) -> Result<Verdict> {
    match open(&args.file)? {
        Found::Map(map) => show_map(args, &map),
        Found::Calibration(file) => show_calibration(args, &file),
        Found::Prompts(prompts) => show_prompts(args, &prompts),
        Found::Model(config) => show_model(args, &config),
    }?;
    Ok(Verdict::Passed)
}

/// Finds out what a path is by what lies there, not by its name.
fn open(path: &Path) -> Result<Found> {
    let shown = path.display();
    if path.is_dir() {
        let config = path.join("config.json");
        let text = std::fs::read(&config).with_context(|| {
            format!("expected a model folder, cannot read {}", config.display())
        })?;
        let config = serde_json::from_slice(&text)
            .with_context(|| format!("cannot use {}", config.display()))?;
        return Ok(Found::Model(config));
    }
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {shown}"))?;
    // Our text files begin with an object; a safetensors file begins with the length of its header.
    if bytes.first() != Some(&b'{') {
        let map = LocalityMap::from_bytes(&bytes).with_context(|| {
            format!("{shown} holds neither recorded counts nor a locality map nor prompts")
        })?;
        return Ok(Found::Map(Box::new(map)));
    }
    let text = std::str::from_utf8(&bytes).with_context(|| format!("{shown} is no text"))?;
    let first: serde_json::Value = text
        .lines()
        .next()
        .and_then(|line| serde_json::from_str(line).ok())
        .with_context(|| format!("{shown}: line 1 is no JSON object"))?;
    if first.get("format").is_some() {
        let file = CalibrationFile::parse(text)
            .with_context(|| format!("cannot use calibration file {shown}"))?;
        Ok(Found::Calibration(file))
    } else if first.get("prompt").is_some() {
        let prompts = workload::read_prompts(&bytes[..])
            .with_context(|| format!("cannot use prompt file {shown}"))?;
        Ok(Found::Prompts(prompts))
    } else {
        bail!(
            "{shown} holds neither recorded counts nor a locality map nor prompts: line 1 has no \"format\" and no \"prompt\""
        )
    }
}

fn show_map(args: &Args, map: &LocalityMap) -> Result<()> {
    #[derive(Serialize)]
    struct Shown<'a> {
        kind: &'static str,
        model: &'a str,
        shape: ModelShape,
        transform: locality::Transform,
        clusters: usize,
        clustering: locality::Clustering,
        seed: u64,
        layers_kept: &'a [u32],
        calibration_records: usize,
        quality: &'a locality::Quality,
    }
    let shown = Shown {
        kind: "locality_map",
        model: map.model(),
        shape: map.shape(),
        transform: map.transform(),
        clusters: map.clusters(),
        clustering: map.clustering(),
        seed: map.seed(),
        layers_kept: map.mask(),
        calibration_records: map.calibration_records(),
        quality: map.quality(),
    };
    output::report(args.json, &shown, || {
        format!(
            "{}: locality map of {} ({})\n{}transform: {}\nrefits for up to {} decode workers from the counts of {} requests that it carries\n",
            args.file.display(),
            map.model(),
            shape_text(map.shape()),
            maps::quality_text(
                map.quality(),
                map.mask(),
                map.shape().layers,
                map.clustering()
            ),
            map.transform(),
            map.calibration_records(),
            map.calibration_records(),
        )
    })
}

fn show_calibration(args: &Args, file: &CalibrationFile) -> Result<()> {
    let (mut domains, mut workloads) = (BTreeMap::new(), BTreeMap::new());
    let (mut prompt_tokens, mut covered, mut decode, mut gates) = (0u64, 0u64, 0, 0);
    for record in &file.records {
        *domains
            .entry(label(record.domain.as_deref()))
            .or_insert(0usize) += 1;
        *workloads
            .entry(label(record.workload.as_deref()))
            .or_insert(0usize) += 1;
        prompt_tokens += u64::from(record.prompt.prompt_tokens());
        covered += u64::from(record.prompt.covered_tokens());
        decode += usize::from(record.decode.is_some());
        gates += usize::from(record.gate_probabilities.is_some() && record.gate_logits.is_some());
    }
    let header = &file.header;
    let shown = json!({
        "kind": "calibration",
        "model": header.model,
        "shape": header.shape,
        "records": file.records.len(),
        "records_with_decode_counts": decode,
        "records_with_gate_values": gates,
        "prompt_tokens": prompt_tokens,
        "covered_tokens": covered,
        "domains": domains,
        "workloads": workloads,
    });
    output::report(args.json, &shown, || {
        format!(
            "{}: expert counts of {} ({})\n{} records, {decode} with decode counts, {gates} with gate values\n\
             {prompt_tokens} prompt tokens, {covered} of them counted\ndomains: {}\nworkloads: {}\n",
            args.file.display(),
            header.model,
            shape_text(header.shape),
            file.records.len(),
            tally(&domains),
            tally(&workloads),
        )
    })
}

fn show_prompts(args: &Args, prompts: &[workload::Prompt]) -> Result<()> {
    let (mut domains, mut workloads) = (BTreeMap::new(), BTreeMap::new());
    for prompt in prompts {
        *domains
            .entry(label(prompt.domain.as_deref()))
            .or_insert(0usize) += 1;
        *workloads
            .entry(
                prompt
                    .workload
                    .map_or_else(|| label(None), |workload| workload.to_string()),
            )
            .or_insert(0usize) += 1;
    }
    let characters: usize = prompts
        .iter()
        .map(|prompt| prompt.prompt.chars().count())
        .sum();
    let shown = json!({
        "kind": "prompts",
        "prompts": prompts.len(),
        "characters": characters,
        "domains": domains,
        "workloads": workloads,
    });
    output::report(args.json, &shown, || {
        format!(
            "{}: {} prompts of {} characters on average\ndomains: {}\nworkloads: {}\n",
            args.file.display(),
            prompts.len(),
            characters / prompts.len().max(1),
            tally(&domains),
            tally(&workloads),
        )
    })
}

fn show_model(args: &Args, config: &serde_json::Value) -> Result<()> {
    let first = |names: &[&str]| {
        names
            .iter()
            .find_map(|name| config.get(*name))
            .cloned()
            .unwrap_or_default()
    };
    let weights: u64 = std::fs::read_dir(&args.file)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| {
            entry
                .path()
                .extension()
                .is_some_and(|extension| extension == "safetensors")
        })
        .filter_map(|entry| entry.metadata().ok())
        .map(|metadata| metadata.len())
        .sum();
    let fields = [
        (
            "architecture",
            first(&["architectures"])
                .get(0)
                .cloned()
                .unwrap_or_default(),
        ),
        ("layers", first(&["num_hidden_layers"])),
        ("experts", first(&["num_experts", "num_local_experts"])),
        ("top_k", first(&["num_experts_per_tok"])),
        ("hidden_size", first(&["hidden_size"])),
        ("expert_size", first(&["moe_intermediate_size"])),
        ("vocabulary", first(&["vocab_size"])),
        ("weight_bytes", weights.into()),
    ];
    let mut shown = serde_json::Map::new();
    shown.insert("kind".into(), "model".into());
    shown.extend(
        fields
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone())),
    );
    output::report(args.json, &shown, || {
        let lines: Vec<String> = fields
            .iter()
            .map(|(name, value)| match value.as_str() {
                Some(text) => format!("{name}: {text}"),
                None => format!("{name}: {value}"),
            })
            .collect();
        format!("{}: model\n{}\n", args.file.display(), lines.join("\n"))
    })
}

fn shape_text(shape: ModelShape) -> String {
    format!(
        "{} MoE layers, {} experts, top {}",
        shape.layers, shape.experts, shape.top_k
    )
}

fn label(name: Option<&str>) -> String {
    name.unwrap_or("none").to_owned()
}

fn tally(counts: &BTreeMap<String, usize>) -> String {
    counts
        .iter()
        .map(|(name, count)| format!("{name} {count}"))
        .collect::<Vec<_>>()
        .join(", ")
}
