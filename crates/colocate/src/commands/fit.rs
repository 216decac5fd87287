//! `colocate fit`: recorded expert counts to a locality map, with what it is worth.

use std::{path::PathBuf, time::Instant};

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table};
use locality::{Clustering, FitConfig, FitReport, Transform};
use serde::Serialize;

use crate::{
    calibration, fitting, maps,
    output::{self, BadUsage, Verdict},
};

/// Arguments of `colocate fit`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Recorded counts, made by `colocate calibrate`
    #[arg(value_name = "CALIBRATION")]
    calibration: PathBuf,
    /// Where to write the locality map
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Clusters: as many as there are decode workers
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u16).range(1..))]
    clusters: u16,
    /// How counts become a signature: count_idf, count, sqrt_count, gate_probability, gate_logit, binary [default: the
    /// one of counts alone with the highest rho]
    #[arg(long, value_name = "NAME")]
    transform: Option<Transform>,
    /// Plain K-means, which lets clusters grow unequal
    #[arg(long)]
    unbalanced: bool,
    /// Compute rho over all pairs of requests instead of 30,000 drawn ones
    #[arg(long)]
    all_pairs: bool,
    /// Seed of the pairs and of K-means
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What was fitted, for `--json`.
#[derive(Debug, Serialize)]
struct Report<'a> {
    out: &'a std::path::Path,
    model: &'a str,
    clusters: usize,
    clustering: Clustering,
    seed: u64,
    /// The time of the fit alone, without reading and writing files.
    fit_ms: f64,
    #[serde(flatten)]
    fit: &'a FitReport,
}

/// Fits a map.
pub(crate) fn run(args: &Args) -> Result<Verdict> {
    if let (Ok(from), Ok(to)) = (args.calibration.canonicalize(), args.out.canonicalize())
        && from == to
    {
        return Err(BadUsage("--out names the calibration file itself".into()).into());
    }
    let file = calibration::read(&args.calibration)?;
    let defaults = FitConfig::default();
    let config = FitConfig {
        clusters: args.clusters.into(),
        transform: args.transform,
        clustering: if args.unbalanced {
            Clustering::Plain
        } else {
            Clustering::Balanced
        },
        pairs: if args.all_pairs { None } else { defaults.pairs },
        seed: args.seed,
        ..defaults
    };
    let began = Instant::now();
    let (map, fit) = fitting::fit(&file, &config)
        .with_context(|| format!("cannot fit {}", args.calibration.display()))?;
    let fit_ms = began.elapsed().as_secs_f64() * 1e3;
    maps::write(&map, &args.out)?;
    let report = Report {
        out: &args.out,
        model: map.model(),
        clusters: map.clusters(),
        clustering: map.clustering(),
        seed: args.seed,
        fit_ms,
        fit: &fit,
    };
    output::report(args.json, &report, || text(&report))?;
    Ok(Verdict::Passed)
}

fn text(report: &Report<'_>) -> String {
    let fit = report.fit;
    let mut table = Table::new();
    table.load_style(output::TABLE);
    table.set_header(["transform", "rho", ""]);
    for line in &fit.transforms {
        let note = match &line.left_out {
            Some(why) => why.as_str(),
            None if line.transform == fit.transform => "taken",
            None => "",
        };
        table.add_row([
            line.transform.to_string(),
            maps::figure(line.rho),
            note.to_owned(),
        ]);
    }
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!(
        "{} records of {}, {} with decode counts, rho over {} pairs\n{table}\n{}{} iterations{}, {:.0} ms; wrote {}\n",
        fit.records,
        report.model,
        fit.rated_records,
        fit.pairs,
        maps::quality_text(
            &fit.quality,
            &fit.layers_kept,
            fit.layers,
            report.clustering
        ),
        fit.iterations,
        if fit.converged { "" } else { " (not at rest)" },
        report.fit_ms,
        report.out.display(),
    )
}
