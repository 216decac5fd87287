//! The sending side: a listener that gives held blocks to whoever names them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::wire::{self, Failure, FrameError, Kind, Pull, Refusal, Ticket};
use crate::engine_thread::EngineHandle;

/// Connections served at once; more wait in the listener's backlog.
const CONNECTIONS: usize = 128;

/// What the sending side needs.
#[derive(Clone)]
pub(crate) struct Sender {
    /// The engine that holds the blocks.
    pub(crate) engine: EngineHandle,
    /// Its name, which tickets must carry.
    pub(crate) engine_id: Arc<str>,
    /// [`wire::geometry_digest`] of the engine.
    pub(crate) geometry_digest: u64,
    /// How long a peer may take to say or to take something.
    pub(crate) timeout: Duration,
}

/// Serves peers until `stop`.
pub(crate) async fn serve(listener: TcpListener, sender: Sender, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else {
            return;
        };
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let (sender, stop) = (sender.clone(), stop.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = sender.connection(stream, peer) => {}
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a peer");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

impl Sender {
    async fn connection(&self, mut stream: TcpStream, peer: SocketAddr) {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%peer, %error, "cannot set TCP_NODELAY");
        }
        if let Err(error) = self.exchange(&mut stream).await {
            tracing::debug!(%peer, %error, "a peer's connection ended in an error");
        }
    }

    /// One exchange per connection.
    async fn exchange(&self, stream: &mut TcpStream) -> Result<(), FrameError> {
        let request = match self.within(wire::read(stream, wire::SMALL)).await {
            Ok(request) => request,
            // Something that is no frame, such as a peer of another transport, is told so, if it still listens.
            Err(error) => {
                let failure = refuse(Refusal::Malformed, error.to_string());
                self.answer(stream, Kind::Failure, &failure.encode())
                    .await?;
                return Err(error);
            }
        };
        match request {
            (Kind::Pull, payload) => self.pull(stream, &payload).await,
            (Kind::Release, payload) => {
                let ticket = Ticket::decode(&payload)?;
                let answer = if *ticket.engine_id == *self.engine_id {
                    self.engine.release(&ticket.request_id).await
                } else {
                    Err(other_engine(&ticket, &self.engine_id))
                };
                match answer {
                    Ok(()) => self.answer(stream, Kind::Released, &[]).await,
                    Err(failure) => self.answer(stream, Kind::Failure, &failure.encode()).await,
                }
            }
            (kind, _) => Err(FrameError::Kind {
                expected: "a pull or a release",
                got: kind as u8,
            }),
        }
    }

    async fn pull(&self, stream: &mut TcpStream, payload: &[u8]) -> Result<(), FrameError> {
        let pull = Pull::decode(payload)?;
        let blocks = match self.blocks(&pull).await {
            Ok(blocks) => blocks,
            Err(failure) => {
                return self.answer(stream, Kind::Failure, &failure.encode()).await;
            }
        };
        self.answer(stream, Kind::Blocks, &blocks).await?;
        // Without an acknowledgement the blocks stay under their lease: the peer may ask again.
        match self.within(wire::read(stream, wire::SMALL)).await? {
            (Kind::Done, _) => {
                let released = self.engine.release(&pull.ticket.request_id).await;
                if let Err(failure) = released {
                    tracing::debug!(
                        failure.message,
                        "pulled blocks were gone before their release"
                    );
                }
                Ok(())
            }
            (kind, _) => Err(FrameError::Kind {
                expected: "an acknowledgement",
                got: kind as u8,
            }),
        }
    }

    async fn blocks(&self, pull: &Pull) -> Result<Vec<u8>, Failure> {
        if *pull.ticket.engine_id != *self.engine_id {
            return Err(other_engine(&pull.ticket, &self.engine_id));
        }
        if pull.geometry_digest != self.geometry_digest {
            return Err(refuse(
                Refusal::Geometry,
                "expected a peer with the same model and block size, got another one",
            ));
        }
        self.engine.read_held(pull).await
    }

    async fn answer(
        &self,
        stream: &mut TcpStream,
        kind: Kind,
        payload: &[u8],
    ) -> Result<(), FrameError> {
        self.within(wire::write(stream, kind, payload)).await
    }

    async fn within<T>(
        &self,
        work: impl Future<Output = Result<T, FrameError>>,
    ) -> Result<T, FrameError> {
        match tokio::time::timeout(self.timeout, work).await {
            Ok(result) => result,
            Err(_) => Err(FrameError::Io(std::io::ErrorKind::TimedOut.into())),
        }
    }
}

pub(crate) fn refuse(refusal: Refusal, message: impl Into<String>) -> Failure {
    Failure {
        refusal,
        message: message.into(),
    }
}

fn other_engine(ticket: &Ticket, own: &str) -> Failure {
    refuse(
        Refusal::OtherEngine,
        format!(
            "expected engine {own}, got a ticket of engine {}: was the worker restarted?",
            ticket.engine_id
        ),
    )
}
