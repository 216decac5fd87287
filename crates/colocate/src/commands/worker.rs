//! `colocate worker`: one embedded worker.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context, Result};
use engine::{EngineConfig, PrefixCache};

use crate::{
    files, logging,
    output::{self, Verdict},
    process::Listening,
    stop,
};

/// How long running requests may go on once the parent is gone.
const ORPHAN_GRACE: Duration = Duration::from_millis(200);

/// Arguments of `colocate worker`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The model: a folder in the Hugging Face layout
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// The name to serve it under [default: the folder's name]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Which half of a handoff it takes part in: prefill, decode or both
    #[arg(long, default_value_t = ::worker::Role::Both)]
    role: ::worker::Role,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8001)]
    port: u16,
    /// Port on which peers pull KV blocks; 0 takes a free one
    #[arg(long, default_value_t = 0)]
    transfer_port: u16,
    /// The host that peers are told to pull from [default: --host]
    #[arg(long, value_name = "HOST")]
    transfer_host: Option<String>,
    /// How long blocks are held for a peer
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    lease: u64,
    /// Pad each expert with zeros to N times its size: same outputs, N times the bytes, as in a larger model
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    expert_padding: u16,
    /// Tokens per KV block [default: 16]
    #[arg(long, value_name = "N")]
    block_size: Option<usize>,
    /// KV blocks
    #[arg(long, value_name = "N")]
    num_blocks: Option<usize>,
    /// Requests that run at once
    #[arg(long, value_name = "N")]
    max_num_seqs: Option<usize>,
    /// Tokens that one step computes
    #[arg(long, value_name = "N")]
    max_batched_tokens: Option<usize>,
    /// The longest sequence, prompt and generated tokens together [default: the model's]
    #[arg(long, value_name = "N")]
    max_model_len: Option<usize>,
    /// Compute every prompt, even one that was just computed
    #[arg(long)]
    no_prefix_cache: bool,
    /// End when standard input does: for a parent that holds its other end
    #[arg(long)]
    exit_with_parent: bool,
    /// Say where it listens as one JSON line, and log warnings only
    #[arg(long)]
    json: bool,
}

/// Serves until it is told to stop.
pub(crate) async fn run(args: Args) -> Result<Verdict> {
    logging::start(if args.json { "warn" } else { "info" });
    let stop = stop::on_signals()?;
    let mut config = ::worker::Config::new(files::model(Some(&args.model))?);
    let model = args
        .served_model_name
        .clone()
        .unwrap_or_else(|| files::folder_name(&config.model_dir));
    config.served_model_name = Some(model.clone());
    config.role = args.role;
    config.listen = SocketAddr::new(args.host, args.port);
    config.transfer_listen = SocketAddr::new(args.host, args.transfer_port);
    config.transfer_host = args.transfer_host.clone();
    config.expert_padding = args.expert_padding.into();
    config.lease = Duration::from_secs(args.lease);
    config.engine = engine_config(&args);
    if args.exit_with_parent {
        config.grace = ORPHAN_GRACE;
        stop::when_parent_goes(stop.clone());
    }
    let said = |bound: ::worker::Bound| {
        let listening = Listening {
            url: format!("http://{}", bound.http),
            role: args.role.to_string(),
            model,
        };
        let text = || {
            format!(
                "listening on {}, role {}, model {}",
                listening.url, listening.role, listening.model
            )
        };
        if let Err(error) = output::report(args.json, &listening, text) {
            tracing::warn!("cannot say where it listens: {error:#}");
        }
    };
    ::worker::serve(config, said, stop.cancelled_owned())
        .await
        .context("the worker cannot serve")?;
    Ok(Verdict::Passed)
}

fn engine_config(args: &Args) -> EngineConfig {
    let defaults = EngineConfig::default();
    EngineConfig {
        block_size: args.block_size.unwrap_or(defaults.block_size),
        num_blocks: args.num_blocks.unwrap_or(defaults.num_blocks),
        max_num_seqs: args.max_num_seqs.unwrap_or(defaults.max_num_seqs),
        max_waiting: defaults.max_waiting,
        max_batched_tokens: args
            .max_batched_tokens
            .unwrap_or(defaults.max_batched_tokens),
        max_model_len: args.max_model_len.or(defaults.max_model_len),
        prefix_cache: if args.no_prefix_cache {
            PrefixCache::Off
        } else {
            defaults.prefix_cache
        },
    }
}
