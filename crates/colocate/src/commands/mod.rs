//! The commands, one file each.

mod calibrate;
mod demo;
mod fit;
mod inspect;
mod limits;
mod serve;
mod up;
mod worker;

use anyhow::{Context, Result};
use clap::Subcommand;

use crate::output::Verdict;

/// What there is to do.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Serve the same prompts under each decode policy, on this machine, and compare them in a table.
    Demo(demo::Args),
    /// Run the demo's cluster and keep it running: an OpenAI endpoint on this machine.
    Up(up::Args),
    /// Run one embedded worker.
    Worker(worker::Args),
    /// Run the gateway in front of prefill and decode workers.
    Serve(serve::Args),
    /// Record which experts a model uses for a file of prompts.
    Calibrate(calibrate::Args),
    /// Fit a locality map from recorded expert counts.
    Fit(fit::Args),
    /// Show what a file of ours holds: recorded counts, a locality map, a model.
    Inspect(inspect::Args),
}

/// Runs a command to its end.
pub(crate) fn run(command: Command) -> Result<Verdict> {
    match command {
        Command::Demo(args) => block_on(demo::run(args)),
        Command::Up(args) => block_on(up::run(args)),
        Command::Worker(args) => block_on(worker::run(args)),
        Command::Serve(args) => block_on(serve::run(args)),
        Command::Calibrate(args) => block_on(calibrate::run(args)),
        Command::Fit(args) => fit::run(&args),
        Command::Inspect(args) => inspect::run(&args),
    }
}

fn block_on(command: impl Future<Output = Result<Verdict>>) -> Result<Verdict> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the runtime")?
        .block_on(command)
}
