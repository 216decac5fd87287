//! The thread as others see it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use engine::{PinId, PrefilledBlocks, Recording, Request, RequestId, SamplingParams, Usage};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{Command, Event};
use crate::transfer::server::refuse;
use crate::transfer::wire::{Failure, Pull, Refusal};

/// The engine's thread has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the engine has stopped")]
pub(crate) struct EngineGone;

/// Speaks to the engine's thread. Cheap to clone.
#[derive(Clone)]
pub(crate) struct EngineHandle {
    pub(super) commands: std::sync::mpsc::Sender<Command>,
    pub(super) next_id: Arc<AtomicU64>,
    pub(super) ended: CancellationToken,
}

/// A request to run, but for its name, which [`EngineHandle::submit`] gives it.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampling: SamplingParams,
    pub(crate) record: Recording,
    pub(crate) hold_blocks: bool,
    /// The name of the handoff that blocks are held for.
    pub(crate) handoff: Option<Arc<str>>,
    pub(crate) prefilled: Option<(PinGuard, Vec<u8>)>,
}

impl EngineHandle {
    /// Whether the thread runs.
    pub(crate) fn is_alive(&self) -> bool {
        !self.ended.is_cancelled()
    }

    /// Waits until the thread has ended.
    pub(crate) async fn ended(&self) {
        self.ended.cancelled().await;
    }

    /// Waits until no blocks are held for peers.
    pub(crate) async fn nothing_held(&self) {
        while self.usage().await.is_ok_and(|usage| usage.held > 0) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Hands a request over. Dropping what comes back ends it.
    pub(crate) fn submit(&self, work: Work) -> Running {
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let prefilled = work.prefilled.map(|(pin, payload)| PrefilledBlocks {
            pin: pin.used(),
            payload,
        });
        let request = Request {
            id,
            prompt: work.prompt,
            sampling: work.sampling,
            record: work.record,
            hold_blocks: work.hold_blocks,
            prefilled,
        };
        let (sender, events) = mpsc::unbounded_channel();
        // A thread that is gone drops the sender, which the receiver sees.
        self.send(Command::Submit {
            request,
            handoff: work.handoff,
            events: sender,
        });
        Running {
            id,
            events,
            engine: self.clone(),
            over: false,
        }
    }

    /// References the leading blocks of a prompt that the engine already has.
    pub(crate) async fn pin(&self, tokens: Arc<[u32]>) -> Result<PinGuard, EngineGone> {
        let (reply, answer) = oneshot::channel();
        let guard = PinReply {
            engine: self.clone(),
            answer,
        };
        self.send(Command::Pin { tokens, reply });
        guard.await_pin().await
    }

    /// Reads held blocks.
    pub(crate) async fn read_held(&self, pull: &Pull) -> Result<Vec<u8>, Failure> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::ReadHeld {
            pull: pull.clone(),
            reply,
        });
        answer.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Lets held blocks go.
    pub(crate) async fn release(&self, request_id: &str) -> Result<(), Failure> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Release {
            request_id: request_id.to_owned(),
            reply,
        });
        answer.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Ends the request of a handoff, running or held, whose sender has given it up.
    pub(crate) fn forget(&self, handoff: &str) {
        self.send(Command::Forget {
            handoff: handoff.to_owned(),
        });
    }

    /// What the engine is busy with.
    pub(crate) async fn usage(&self) -> Result<Usage, EngineGone> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Usage(reply));
        answer.await.map_err(|_| EngineGone)
    }

    /// Ends the thread, and with it all requests.
    pub(crate) fn stop(&self) {
        self.send(Command::Stop);
    }

    fn send(&self, command: Command) {
        // When the thread is gone the command is dropped, and with it the sender of its reply: that is what callers see.
        let _ = self.commands.send(command);
    }
}

fn gone() -> Failure {
    refuse(Refusal::Internal, EngineGone.to_string())
}

/// Waits for a pin; a pin that arrives after nobody waits any more is given back.
struct PinReply {
    engine: EngineHandle,
    answer: oneshot::Receiver<engine::Pinned>,
}

impl PinReply {
    async fn await_pin(mut self) -> Result<PinGuard, EngineGone> {
        let pinned = (&mut self.answer).await.map_err(|_| EngineGone)?;
        Ok(PinGuard {
            engine: self.engine.clone(),
            pin: pinned.id,
            used: false,
            blocks: pinned.blocks,
        })
    }
}

impl Drop for PinReply {
    fn drop(&mut self) {
        self.answer.close();
        if let Ok(pinned) = self.answer.try_recv() {
            self.engine.send(Command::Unpin(pinned.id));
        }
    }
}

/// Blocks that wait for their request. Dropped unused, it gives them back.
pub(crate) struct PinGuard {
    engine: EngineHandle,
    pin: PinId,
    used: bool,
    blocks: usize,
}

impl PinGuard {
    /// How many leading blocks of the prompt they are.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// The pin, for the request that uses it up.
    fn used(mut self) -> PinId {
        self.used = true;
        self.pin
    }
}

impl std::fmt::Debug for PinGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PinGuard({:?}, {} blocks)", self.pin, self.blocks)
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        if !self.used {
            self.engine.send(Command::Unpin(self.pin));
        }
    }
}

/// A request that the engine has, until it is [`Running::finished`]. Dropped before, it ends the request and frees its blocks.
pub(crate) struct Running {
    id: RequestId,
    events: mpsc::UnboundedReceiver<Event>,
    engine: EngineHandle,
    over: bool,
}

impl Running {
    /// Its name in the engine, and in a handoff.
    pub(crate) fn id(&self) -> RequestId {
        self.id
    }

    /// What happens next.
    ///
    /// # Errors
    /// The thread has ended.
    pub(crate) async fn event(&mut self) -> Result<Event, EngineGone> {
        self.events.recv().await.ok_or(EngineGone)
    }

    /// The request has ended by itself, and nothing of it is to be ended here. For a request whose blocks are held, this leaves
    /// them to their lease; dropped without it, they are freed.
    pub(crate) fn finished(&mut self) {
        self.over = true;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.over {
            self.engine.send(Command::Abort(self.id));
        }
    }
}
