//! The engine on a thread of its own.
//!
//! The engine is synchronous and computes for milliseconds at a time, so it must not run on the runtime. Commands go in by a channel and
//! are taken between steps; every request has a channel of its own for what comes out. The thread sleeps while there is nothing to compute.
//! It alone owns the engine, so there are no locks.

mod handle;
mod run;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use engine::{AdmissionError, Engine, PinId, Pinned, Request, RequestId, TokenOut, Usage};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::transfer::wire::{Failure, Pull};

pub(crate) use handle::{EngineGone, EngineHandle, PinGuard, Running, Work};

/// What the thread is asked to do.
enum Command {
    /// Take a request in. Everything about it goes to `events`.
    Submit {
        request: Request,
        /// The name of the handoff that it is for.
        handoff: Option<Arc<str>>,
        events: mpsc::UnboundedSender<Event>,
    },
    /// End a request, wherever it is, also when its blocks are held.
    Abort(RequestId),
    /// Reference the leading blocks of a prompt.
    Pin {
        tokens: Arc<[u32]>,
        reply: oneshot::Sender<Pinned>,
    },
    /// Let them go.
    Unpin(PinId),
    /// Read held blocks.
    ReadHeld {
        pull: Pull,
        reply: oneshot::Sender<Result<Vec<u8>, Failure>>,
    },
    /// Let held blocks go.
    Release {
        request_id: String,
        reply: oneshot::Sender<Result<(), Failure>>,
    },
    /// End the request of a handoff, as [`Command::Abort`] does; what there is not is no error.
    Forget {
        /// The name that its sender gave it.
        handoff: String,
    },
    /// Say what the engine is busy with.
    Usage(oneshot::Sender<Usage>),
    /// Leave.
    Stop,
}

/// What happens to a request.
#[derive(Debug)]
pub(crate) enum Event {
    /// The engine took it in. Always the first event, or else [`Event::Refused`].
    Admitted,
    /// The engine did not take it in. Always the last event.
    Refused(AdmissionError),
    /// It generated a token.
    Token(Box<TokenOut>),
}

/// Starts the thread. It ends when every handle is gone, or at [`EngineHandle::stop`].
///
/// # Errors
/// Where the system gives no thread.
pub(crate) fn spawn(
    engine: Engine,
    metrics: Metrics,
    lease: Duration,
) -> std::io::Result<EngineHandle> {
    let (commands, inbox) = std::sync::mpsc::channel();
    let ended = CancellationToken::new();
    // Tells the handles when the thread is gone, also when it panicked.
    let on_end = ended.clone().drop_guard();
    std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || {
            let _on_end = on_end;
            run::run(engine, &inbox, &metrics, lease);
        })?;
    Ok(EngineHandle {
        commands,
        next_id: Arc::new(AtomicU64::new(1)),
        ended,
    })
}
