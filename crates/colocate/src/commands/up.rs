//! `colocate up`: the demo's cluster, kept running.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use locality::LocalityMap;
use routing::DecodePolicyName;
use serde_json::json;

use crate::{
    client::{Client, Sampling},
    cluster::{Caching, Cluster, ClusterArgs},
    files, fitting,
    front::{Front, Gateway},
    maps,
    output::{self, Verdict},
    process::{WorkerProcess, WorkerSpec},
    progress::Progress,
    stop,
};

/// Arguments of `colocate up`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Locality map made by `colocate fit` [default: calibrates and fits one when it starts]
    #[arg(long, value_name = "FILE")]
    locality_map: Option<PathBuf>,
    /// Prompts to fit the locality map on, JSONL [default: prompts/calibration.jsonl of the model]
    #[arg(long, value_name = "FILE", conflicts_with = "locality_map")]
    calibration_prompts: Option<PathBuf>,
    /// How decode workers are chosen: round_robin, random, power_of_two, least_loaded, domain, locality
    #[arg(long, value_name = "NAME", default_value_t = DecodePolicyName::Locality)]
    decode_policy: DecodePolicyName,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Say where it listens as one JSON line
    #[arg(long)]
    json: bool,
}

/// Runs the cluster until it is told to stop.
pub(crate) async fn run(args: Args) -> Result<Verdict> {
    crate::logging::start("warn");
    let stop = stop::on_signals()?;
    let model = files::model(args.cluster.model.as_deref())?;
    let starting = Progress.step("starting workers");
    let mut cluster = tokio::select! {
        cluster = Cluster::start(&model, &args.cluster, Caching::Everywhere) => cluster?,
        () = stop.cancelled() => bail!("interrupted"),
    };
    drop(starting);
    let served = tokio::select! {
        served = serve(&args, &model, &cluster) => served,
        () = stop.cancelled() => Ok(()),
    };
    let dead = cluster.check();
    cluster.stop().await;
    match (served, dead) {
        (Err(error), Err(dead)) if !stop.is_cancelled() => Err(error.context(dead)),
        (served, _) => served.map(|()| Verdict::Passed),
    }
}

async fn serve(args: &Args, model: &std::path::Path, cluster: &Cluster) -> Result<()> {
    let map = map(args, model, cluster).await?;
    let front = Front {
        prefill: vec![cluster.prefill.url().to_owned()],
        decode: cluster.decode_urls(),
        map,
        locality: args.cluster.locality.config(),
        seed: args.cluster.seed,
    };
    let address = format!("{}:{}", args.host, args.port);
    let mut gateway = Gateway::start_at(&address, front.config(args.decode_policy)?).await?;
    let (url, name) = (gateway.url().to_owned(), cluster.prefill.model());
    let report = json!({
        "url": url,
        "model": name,
        "decode_policy": args.decode_policy,
        "prefill": front.prefill,
        "decode": front.decode,
    });
    output::report(args.json, &report, || {
        format!(
            "{url}/v1 serves {name}: 1 prefill and {} decode workers, decode by {}\n\n  \
             curl {url}/v1/completions -H 'content-type: application/json' \\\n    \
             -d '{{\"model\": \"{name}\", \"prompt\": \"The heart is\", \"max_tokens\": 32, \"stream\": true}}'\n\n\
             Ctrl-C stops it and all its workers.",
            front.decode.len(),
            args.decode_policy,
        )
    })?;
    gateway.ended().await.context("cannot go on serving")
}

/// The map that the policy needs, from a file or made now.
async fn map(
    args: &Args,
    model: &std::path::Path,
    cluster: &Cluster,
) -> Result<Option<LocalityMap>> {
    if args.decode_policy != DecodePolicyName::Locality {
        return Ok(None);
    }
    if let Some(path) = &args.locality_map {
        return maps::read(path).map(Some);
    }
    let prompts = files::model_prompts(args.calibration_prompts.as_deref(), model, "calibration")?;
    // Counts come from a worker that runs whole requests; it is needed for this only.
    let solo = WorkerProcess::start(WorkerSpec::new("calibration", model, "both")).await?;
    let client = Client::connect(solo.url()).await?;
    let fitted = fitting::fit_live(
        &client,
        &prompts,
        cluster.decode.len(),
        Sampling {
            temperature: Sampling::DEFAULT_TEMPERATURE,
            seed: args.cluster.seed,
        },
        Progress,
    )
    .await;
    solo.stop().await;
    Ok(Some(fitted?.map))
}
