//! `colocate calibrate`: a file of prompts to a file of recorded expert counts.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde_json::json;

use crate::{
    calibration,
    client::{Client, Sampling},
    files,
    output::{self, Verdict},
    process::{WorkerProcess, WorkerSpec},
    progress::Progress,
    stop,
};

/// How many failed prompts are named.
const NAMED_FAILURES: usize = 10;

/// Arguments of `colocate calibrate`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("source").required(true))]
pub(crate) struct Args {
    /// A running worker with role `both`
    #[arg(long, group = "source")]
    url: Option<String>,
    /// A model folder: starts a worker for the time it takes
    #[arg(long, value_name = "DIR", group = "source")]
    model: Option<PathBuf>,
    /// Prompts, JSONL: {"prompt": text, "domain"?: text, "workload"?: "task"|"language"}
    #[arg(long, value_name = "FILE")]
    prompts: PathBuf,
    /// Where to write the counts, JSONL
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Tokens to generate per prompt; the experts they use are what a prompt's counts should foresee
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Temperature at which they are drawn: that of the traffic to come
    #[arg(long, default_value_t = Sampling::DEFAULT_TEMPERATURE, value_parser = Sampling::temperature)]
    temperature: f64,
    /// Seed of the draws
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Prompts in flight
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: u32,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Records counts.
pub(crate) async fn run(args: Args) -> Result<Verdict> {
    let stop = stop::on_signals()?;
    let prompts = files::prompts(&args.prompts)?;
    let work = async {
        let worker = match &args.model {
            Some(model) => Some(start_worker(&files::model(Some(model))?).await?),
            None => None,
        };
        let url = worker
            .as_ref()
            .map(WorkerProcess::url)
            .or(args.url.as_deref())
            .unwrap_or_default();
        let client = Client::connect(url).await?;
        let bar = Progress.bar("recording expert counts", prompts.len());
        let recorded = calibration::record(
            &client,
            &prompts,
            args.max_tokens,
            Sampling {
                temperature: args.temperature,
                seed: args.seed,
            },
            args.concurrency as usize,
            &bar,
        )
        .await;
        drop(bar);
        if let Some(worker) = worker {
            worker.stop().await;
        }
        recorded
    };
    let recorded = tokio::select! {
        recorded = work => recorded?,
        () = stop.cancelled() => bail!("interrupted"),
    };
    calibration::write(&recorded.file, &args.out)?;
    for (index, error) in recorded.failures.iter().take(NAMED_FAILURES) {
        eprintln!("prompt {} failed: {error:#}", index + 1);
    }
    let (records, failed, shape) = (
        recorded.file.records.len(),
        recorded.failures.len(),
        recorded.file.header.shape,
    );
    let failed_prompts: Vec<usize> = recorded
        .failures
        .iter()
        .map(|(index, _)| index + 1)
        .collect();
    let report = json!({
        "out": args.out,
        "model": recorded.file.header.model,
        "records": records,
        "failed": failed,
        "failed_prompts": failed_prompts,
        "layers": shape.layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
    });
    output::report(args.json, &report, || {
        let failed = if failed == 0 {
            String::new()
        } else {
            format!("; {failed} prompts failed")
        };
        format!(
            "{}: {records} records of {} ({} MoE layers, {} experts, top {}){failed}",
            args.out.display(),
            recorded.file.header.model,
            shape.layers,
            shape.experts,
            shape.top_k,
        )
    })?;
    Ok(Verdict::from_checks(failed == 0))
}

async fn start_worker(model: &Path) -> Result<WorkerProcess> {
    let _starting = Progress.step("starting a worker");
    WorkerProcess::start(WorkerSpec::new("calibration", model, "both")).await
}
