//! Log lines on standard error.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Starts logging at `level` and above, or as `RUST_LOG` says. Later calls change nothing.
pub(crate) fn start(level: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .try_init();
}
