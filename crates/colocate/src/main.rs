//! The command line of Colocate.
//!
//! A thin binary: each command is one file in `commands` that parses its arguments, calls the crates below and prints. What
//! several commands share lies beside them: worker processes (`process`), a cluster of them (`cluster`), the load client
//! (`client`, `load`), counters read from workers (`scrape`).
//!
//! Results go to standard output, everything else to standard error, progress only when that is a terminal. Exit codes: 0
//! done, 1 the run or a check in it failed, 2 bad usage.

#![allow(clippy::print_stdout, clippy::print_stderr)] // This is the one crate that talks to a terminal.

mod calibration;
mod client;
mod cluster;
mod commands;
mod files;
mod fitting;
mod front;
mod load;
mod logging;
mod maps;
mod output;
mod process;
mod progress;
mod scrape;
mod stop;

use std::process::ExitCode;

use clap::Parser;

use crate::output::Verdict;

/// Routes mixture-of-experts requests by expert locality in prefill/decode-disaggregated serving.
#[derive(Parser)]
#[command(name = "colocate", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

fn main() -> ExitCode {
    // clap prints its own message for bad usage and exits with 2.
    let cli = Cli::parse();
    match commands::run(cli.command) {
        Ok(Verdict::Passed) => ExitCode::SUCCESS,
        Ok(Verdict::Failed) => ExitCode::from(1),
        Err(error) => {
            eprintln!("{}", output::error_text(&error));
            ExitCode::from(if error.is::<output::BadUsage>() { 2 } else { 1 })
        }
    }
}
