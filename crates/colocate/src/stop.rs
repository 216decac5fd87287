//! When to stop: Ctrl-C, SIGTERM, or a parent process that has gone.

use std::{
    io::Read,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that is cancelled by SIGINT (Ctrl-C) or SIGTERM. Another one, a second or more later, ends the process at once.
///
/// Must be called within a runtime.
pub(crate) fn on_signals() -> Result<CancellationToken> {
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let stop = CancellationToken::new();
    let token = stop.clone();
    tokio::spawn(async move {
        let mut first = None;
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            let since = *first.get_or_insert_with(Instant::now);
            token.cancel();
            // Supervisors signal a process and its group at once: that is one wish, not two.
            if since.elapsed() > Duration::from_secs(1) {
                std::process::exit(1);
            }
        }
    });
    Ok(stop)
}

/// Cancels `stop` when standard input ends, which is when the parent that holds its other end is gone, however it died. A process
/// that is still there some seconds later is ended.
pub(crate) fn when_parent_goes(stop: CancellationToken) {
    // A plain thread: a runtime would wait for a blocking read when it shuts down.
    std::thread::spawn(move || {
        let mut input = std::io::stdin().lock();
        let mut ignored = [0u8; 64];
        while !matches!(input.read(&mut ignored), Ok(0) | Err(_)) {}
        stop.cancel();
        std::thread::sleep(Duration::from_secs(3));
        std::process::exit(1);
    });
}
