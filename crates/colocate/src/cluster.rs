//! One prefill worker and some decode workers on this machine, each a process of its own.

use std::path::Path;

use anyhow::Result;
use futures::future::try_join_all;

use crate::{
    front::LocalityArgs,
    process::{WorkerProcess, WorkerSpec, stop_all},
};

/// What a cluster is made of.
#[derive(Debug, clap::Args)]
pub(crate) struct ClusterArgs {
    /// The model: a folder in the Hugging Face layout [default: models/demo of the repository]
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<std::path::PathBuf>,
    /// Decode workers
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) decode_workers: u16,
    /// Pad each expert with zeros to N times its size: same outputs, N times the bytes, as in a larger model
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) expert_padding: u16,
    #[command(flatten)]
    pub(crate) locality: LocalityArgs,
    /// Seed of everything that is drawn
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

/// Where prompts may take up the KV blocks of earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caching {
    /// On every worker.
    Everywhere,
    /// On the prefill worker, which keeps this many blocks.
    Prefill {
        /// KV blocks.
        blocks: usize,
    },
}

/// By how much decode workers give way to the prefill worker. They share this machine's cores, which a real cluster's do not: without it eight
/// decode workers leave the prefill worker a tenth of the machine, and requests queue there instead of decoding together.
const DECODE_NICENESS: u8 = 10;

/// Running workers.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// Fills KV caches.
    pub(crate) prefill: WorkerProcess,
    /// Generate tokens.
    pub(crate) decode: Vec<WorkerProcess>,
}

impl Cluster {
    /// Starts all workers side by side. When one fails to start, the others are stopped.
    pub(crate) async fn start(model: &Path, args: &ClusterArgs, caching: Caching) -> Result<Self> {
        let prefill = WorkerSpec {
            expert_padding: args.expert_padding,
            num_blocks: match caching {
                Caching::Everywhere => None,
                Caching::Prefill { blocks } => Some(blocks),
            },
            ..WorkerSpec::new("prefill", model, "prefill")
        };
        let decode = (0..args.decode_workers).map(|index| WorkerSpec {
            expert_padding: args.expert_padding,
            prefix_cache: caching == Caching::Everywhere,
            niceness: DECODE_NICENESS,
            ..WorkerSpec::new(format!("decode-{index}"), model, "decode")
        });
        let (prefill, decode) = tokio::try_join!(
            WorkerProcess::start(prefill),
            try_join_all(decode.map(WorkerProcess::start)),
        )?;
        Ok(Self { prefill, decode })
    }

    /// The decode workers' URLs, in order.
    pub(crate) fn decode_urls(&self) -> Vec<String> {
        self.decode
            .iter()
            .map(|worker| worker.url().to_owned())
            .collect()
    }

    /// An error for the first worker that has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        std::iter::once(&mut self.prefill)
            .chain(&mut self.decode)
            .try_for_each(WorkerProcess::check)
    }

    /// Stops all workers.
    pub(crate) async fn stop(self) {
        stop_all(std::iter::once(self.prefill).chain(self.decode)).await;
    }
}
