//! When to stop: Ctrl-C, SIGTERM, or a parent process that has gone.

use std::io::Read;

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that is cancelled by SIGINT (Ctrl-C) or SIGTERM. The second signal ends the process at once.
///
/// Must be called within a runtime.
pub(crate) fn on_signals() -> Result<CancellationToken> {
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let stop = CancellationToken::new();
    let token = stop.clone();
    tokio::spawn(async move {
        for signals in 0.. {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            if signals > 0 {
                std::process::exit(1);
            }
            token.cancel();
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
        std::thread::sleep(std::time::Duration::from_secs(3));
        std::process::exit(1);
    });
}
