//! `colocate serve`: the gateway in front of running workers.

use std::path::PathBuf;

use anyhow::{Context, Result};
use gateway::{Config, Url};
use locality::LocalityMap;
use routing::{DecodePolicyName, PrefillPolicyName};
use serde_json::json;

use super::limits::Limits;
use crate::{
    front::{Gateway, LocalityArgs},
    maps,
    output::{self, BadUsage, Verdict},
    stop,
};

/// Arguments of `colocate serve`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A prefill worker's URL, or several
    #[arg(long, value_name = "URL", num_args = 1.., required = true, value_parser = worker_url)]
    prefill: Vec<Url>,
    /// A decode worker's URL, or several; the order is that of the locality map's clusters
    #[arg(long, value_name = "URL", num_args = 1.., required = true, value_parser = worker_url)]
    decode: Vec<Url>,
    /// Locality map made by `colocate fit`
    #[arg(long, value_name = "FILE")]
    locality_map: Option<PathBuf>,
    /// How decode workers are chosen: round_robin, random, power_of_two, least_loaded, domain, locality [default: locality with a map,
    /// else least_loaded]
    #[arg(long, value_name = "NAME")]
    decode_policy: Option<DecodePolicyName>,
    /// How prefill workers are chosen: prefix_hash, round_robin, least_loaded
    #[arg(long, value_name = "NAME", default_value_t = PrefillPolicyName::PrefixHash)]
    prefill_policy: PrefillPolicyName,
    #[command(flatten)]
    locality: LocalityArgs,
    #[command(flatten)]
    limits: Limits,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Leave out the response headers that name the workers and the reason
    #[arg(long)]
    no_decision_headers: bool,
    /// Seed of the policies that draw, and of a refit
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Say where it listens as one JSON line
    #[arg(long)]
    json: bool,
}

/// Reads a worker's URL.
fn worker_url(text: &str) -> Result<Url, String> {
    let url: Url = text.parse().map_err(|error| format!("{error}"))?;
    if url.scheme() == "http" && url.has_host() {
        Ok(url)
    } else {
        Err("expected http://host:port".into())
    }
}

/// Serves until it is told to stop.
pub(crate) async fn run(args: Args) -> Result<Verdict> {
    crate::logging::start("info");
    let stop = stop::on_signals()?;
    let map = args.locality_map.as_deref().map(maps::read).transpose()?;
    let policy = decode_policy(args.decode_policy, map.as_ref())?;
    let (map_clusters, workers) = (map.as_ref().map(LocalityMap::clusters), args.decode.len());
    let mut config = Config::new(args.prefill, args.decode);
    config.prefill_policy = args.prefill_policy;
    config.decode_policy = Some(policy);
    config.locality_map = map;
    config.locality = args.locality.config();
    args.limits.apply(&mut config);
    config.seed = args.seed;
    config.decision_headers = !args.no_decision_headers;
    let address = format!("{}:{}", args.host, args.port);
    let mut gateway = tokio::select! {
        gateway = Gateway::start_at(&address, config) => gateway?,
        () = stop.cancelled() => return Ok(Verdict::Passed),
    };
    let report = json!({"url": gateway.url(), "decode_policy": policy, "prefill_policy": args.prefill_policy});
    output::report(args.json, &report, || {
        let refit = match map_clusters {
            Some(clusters) if clusters != workers && policy == DecodePolicyName::Locality => {
                format!(" (map refitted from {clusters} to {workers} clusters)")
            }
            _ => String::new(),
        };
        format!(
            "listening on {}, prefill by {}, decode by {policy}{refit}",
            gateway.url(),
            args.prefill_policy
        )
    })?;
    tokio::select! {
        ended = gateway.ended() => ended.context("cannot go on serving")?,
        () = stop.cancelled() => gateway.drain().await?,
    }
    Ok(Verdict::Passed)
}

/// The policy to use: the one asked for, else locality where there is a map, else least load.
fn decode_policy(
    asked: Option<DecodePolicyName>,
    map: Option<&LocalityMap>,
) -> Result<DecodePolicyName> {
    match (asked, map) {
        (Some(DecodePolicyName::Locality), None) => {
            Err(BadUsage("--decode-policy locality needs --locality-map FILE".into()).into())
        }
        (Some(policy), _) => Ok(policy),
        (None, Some(_)) => Ok(DecodePolicyName::Locality),
        (None, None) => Ok(DecodePolicyName::LeastLoaded),
    }
}
