//! What the thread does all day.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use engine::{Engine, FinishReason, RequestId, Step};
use tokio::sync::mpsc;

use super::{Command, Event};
use crate::lease::{HeldPrompt, Leases};
use crate::metrics::{Metrics, ReleaseCause};
use crate::transfer::server::refuse;
use crate::transfer::wire::{Failure, Pull, Refusal, prompt_digest};

/// Serves commands and computes steps until told to stop or until nobody can send commands any more.
pub(super) fn run(engine: Engine, inbox: &Receiver<Command>, metrics: &Metrics, lease: Duration) {
    let mut state = State {
        engine,
        metrics,
        streams: HashMap::new(),
        prompts: HashMap::new(),
        leases: Leases::new(lease),
        stuck: false,
    };
    while state.commands(inbox) {
        state.expire(Instant::now());
        if state.engine.has_work() {
            let step = state.engine.step();
            state.after(step);
        }
    }
}

struct State<'a> {
    engine: Engine,
    metrics: &'a Metrics,
    streams: HashMap<RequestId, mpsc::UnboundedSender<Event>>,
    /// What prompts will be held once their requests end.
    prompts: HashMap<RequestId, HeldPrompt>,
    leases: Leases,
    /// The last step could compute nothing: all work waits for blocks that only a command or an expiry can free.
    stuck: bool,
}

impl State<'_> {
    /// Takes all commands that are there; waits for one when there is nothing to compute. False when it is time to leave.
    fn commands(&mut self, inbox: &Receiver<Command>) -> bool {
        if !self.engine.has_work() || self.stuck {
            let first = match self.leases.next_expiry() {
                Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match first {
                Ok(command) => {
                    if !self.command(command) {
                        return false;
                    }
                }
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        loop {
            match inbox.try_recv() {
                Ok(command) => {
                    if !self.command(command) {
                        return false;
                    }
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn command(&mut self, command: Command) -> bool {
        self.stuck = false;
        // A reply that nobody waits for any more is dropped, except for pins, which would be lost.
        match command {
            Command::Submit {
                request,
                handoff,
                events,
            } => self.submit(request, handoff, events),
            Command::Abort(id) => self.abort(id),
            Command::Pin { tokens, reply } => {
                let pinned = self.engine.pin_prefix(&tokens);
                if let Err(pinned) = reply.send(pinned) {
                    self.engine.unpin(pinned.id);
                }
            }
            Command::Unpin(id) => self.engine.unpin(id),
            Command::ReadHeld { pull, reply } => {
                let _ = reply.send(self.read_held(&pull));
            }
            Command::Release { request_id, reply } => {
                let _ = reply.send(self.release(&request_id));
            }
            Command::Forget { handoff } => self.forget(&handoff),
            Command::Usage(reply) => {
                let _ = reply.send(self.engine.usage());
            }
            Command::Stop => return false,
        }
        true
    }

    fn submit(
        &mut self,
        request: engine::Request,
        handoff: Option<Arc<str>>,
        events: mpsc::UnboundedSender<Event>,
    ) {
        let id = request.id;
        let held_prompt = request.hold_blocks.then(|| HeldPrompt {
            digest: prompt_digest(&request.prompt),
            tokens: request.prompt.len() as u32,
            handoff,
        });
        match self.engine.add(request) {
            Ok(()) => {
                if events.send(Event::Admitted).is_err() {
                    self.engine.abort(id);
                    return;
                }
                self.streams.insert(id, events);
                self.prompts.extend(held_prompt.map(|prompt| (id, prompt)));
            }
            Err(error) => {
                let _ = events.send(Event::Refused(error));
            }
        }
    }

    fn abort(&mut self, id: RequestId) {
        self.engine.abort(id);
        self.streams.remove(&id);
        self.prompts.remove(&id);
        if self.leases.end(id) {
            self.metrics.released(ReleaseCause::Aborted);
        }
    }

    /// Ends what a handoff's sender has given up, be it done already or not.
    fn forget(&mut self, handoff: &str) {
        let running = self.prompts.iter().map(|(&id, prompt)| (id, prompt));
        let named = running
            .chain(self.leases.iter())
            .find(|(_, prompt)| prompt.is_of(handoff))
            .map(|(id, _)| id);
        if let Some(id) = named {
            self.abort(id);
        }
    }

    fn read_held(&self, pull: &Pull) -> Result<Vec<u8>, Failure> {
        let (id, prompt) = self.find(&pull.ticket.request_id)?;
        if (prompt.digest, prompt.tokens) != (pull.prompt_digest, pull.prompt_tokens) {
            return Err(refuse(
                Refusal::Prompt,
                format!(
                    "expected the prompt that was prefilled, of {} tokens, got another one, of {}",
                    prompt.tokens, pull.prompt_tokens
                ),
            ));
        }
        self.engine
            .read_held(id, pull.first_block as usize)
            .map_err(|error| refuse(Refusal::Malformed, error.to_string()))
    }

    fn release(&mut self, request_id: &str) -> Result<(), Failure> {
        let (id, _) = self.find(request_id)?;
        self.leases.end(id);
        self.engine.release_held(id);
        self.metrics.released(ReleaseCause::Released);
        Ok(())
    }

    fn find(&self, request_id: &str) -> Result<(RequestId, &HeldPrompt), Failure> {
        let not_held = || {
            refuse(
                Refusal::NotHeld,
                format!(
                    "request {request_id} holds no blocks here: pulled, released, or its lease has expired"
                ),
            )
        };
        let id = request_id.parse().map(RequestId).map_err(|_| not_held())?;
        self.leases
            .get(id)
            .map(|prompt| (id, prompt))
            .ok_or_else(not_held)
    }

    fn expire(&mut self, now: Instant) {
        for id in self.leases.expired(now) {
            self.engine.release_held(id);
            self.metrics.released(ReleaseCause::Expired);
            self.stuck = false;
            tracing::warn!(
                request = id.0,
                "no decode worker took the blocks of a prefilled request within its lease"
            );
        }
    }

    fn after(&mut self, step: Step) {
        self.stuck = step.stats.rows == 0;
        if !self.stuck {
            self.metrics.step(&step.stats);
        }
        for token in step.tokens {
            let (id, finish) = (token.id, token.finish);
            if finish == Some(FinishReason::Length)
                && let Some(prompt) = self.prompts.remove(&id)
            {
                self.leases.begin(id, prompt, Instant::now());
                self.metrics.held();
            }
            let sent = self
                .streams
                .get(&id)
                .is_some_and(|events| events.send(Event::Token(Box::new(token))).is_ok());
            if finish.is_some() {
                self.streams.remove(&id);
                self.prompts.remove(&id);
            } else if !sent {
                self.abort(id);
            }
        }
    }
}
