//! The pulling side.

use std::time::Duration;

use protocol::ApiError;
use protocol::handoff::EmbeddedParams;
use tokio::net::TcpStream;

use super::wire::{self, Failure, FrameError, Kind, Pull, Refusal, Ticket};

/// Why blocks did not come.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PullError {
    /// Nobody listens there.
    #[error("cannot connect: {0}")]
    Connect(std::io::Error),
    /// The peer says nothing.
    #[error("no {what} within {} ms", .after.as_millis())]
    Silent {
        /// What was awaited.
        what: &'static str,
        /// For how long.
        after: Duration,
    },
    /// What came is not what the protocol says.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The peer refuses.
    #[error("{message}")]
    Refused {
        /// Why, for the program.
        refusal: Refusal,
        /// Why, for a human.
        message: String,
    },
}

impl PullError {
    /// The error that the client gets to see: a pull that failed may be retried after another prefill; one between workers or of prompts
    /// that do not fit together may not.
    pub(crate) fn to_api(&self, peer: &EmbeddedParams) -> ApiError {
        let message = format!(
            "KV blocks of request {} from {}:{}: {self}",
            peer.remote_request_id, peer.remote_host, peer.remote_port
        );
        match self {
            Self::Refused { refusal, .. } if refusal.is_mismatch() => {
                ApiError::kv_transfer_incompatible(message)
            }
            _ => ApiError::kv_transfer_failed(message),
        }
    }

    /// A word for the metrics.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Silent { .. } => "timeout",
            Self::Frame(FrameError::Checksum { .. }) => "checksum",
            Self::Frame(FrameError::TooLong { .. }) => "length",
            Self::Frame(FrameError::Short { .. }) => "short",
            Self::Frame(_) => "frame",
            Self::Refused { refusal, .. } => match refusal {
                Refusal::NotHeld => "not_held",
                Refusal::OtherEngine => "other_engine",
                Refusal::Geometry => "geometry",
                Refusal::Prompt => "prompt",
                Refusal::Malformed | Refusal::Internal => "refused",
            },
        }
    }
}

/// The ticket for the blocks that `params` speak of.
pub(crate) fn ticket(params: &EmbeddedParams) -> Ticket {
    Ticket {
        engine_id: params.remote_engine_id.clone(),
        request_id: params.remote_request_id.clone(),
    }
}

/// Pulls blocks: what the other engine wrote, of at most `limit` bytes, its checksum verified and its receipt acknowledged.
///
/// # Errors
/// See [`PullError`]. Each stage (connection, first answer, payload) may take `timeout`.
pub(crate) async fn pull(
    params: &EmbeddedParams,
    pull: &Pull,
    limit: usize,
    timeout: Duration,
) -> Result<Vec<u8>, PullError> {
    let mut stream = connect(params, timeout).await?;
    let answer = async {
        wire::write(&mut stream, Kind::Pull, &pull.encode()).await?;
        // A refusal may be longer than a small payload of blocks.
        wire::read(&mut stream, limit.max(wire::SMALL)).await
    };
    match within(timeout, "blocks", answer).await?? {
        (Kind::Blocks, payload) if payload.len() <= limit => {
            // The blocks are here whether or not the peer hears of it; if it does not, its lease frees them.
            let done = wire::write(&mut stream, Kind::Done, &[]);
            if let Ok(Err(error)) = within(timeout, "acknowledgement", done).await {
                tracing::debug!(%error, "the peer did not take the acknowledgement of its blocks");
            }
            Ok(payload)
        }
        (Kind::Blocks, payload) => Err(FrameError::TooLong {
            limit,
            got: payload.len(),
        }
        .into()),
        (Kind::Failure, payload) => {
            let Failure { refusal, message } = Failure::decode(&payload)?;
            Err(PullError::Refused { refusal, message })
        }
        (kind, _) => Err(unexpected("blocks", kind)),
    }
}

/// Tells the other side that nobody will pull its blocks.
///
/// # Errors
/// See [`PullError`].
pub(crate) async fn release(params: &EmbeddedParams, timeout: Duration) -> Result<(), PullError> {
    let mut stream = connect(params, timeout).await?;
    let answer = async {
        wire::write(&mut stream, Kind::Release, &ticket(params).encode()).await?;
        wire::read(&mut stream, wire::SMALL).await
    };
    match within(timeout, "answer to a release", answer).await?? {
        (Kind::Released, _) => Ok(()),
        (Kind::Failure, payload) => {
            let Failure { refusal, message } = Failure::decode(&payload)?;
            Err(PullError::Refused { refusal, message })
        }
        (kind, _) => Err(unexpected("a released frame", kind)),
    }
}

async fn connect(params: &EmbeddedParams, timeout: Duration) -> Result<TcpStream, PullError> {
    let address = (params.remote_host.as_str(), params.remote_port);
    let stream = within(timeout, "connection", TcpStream::connect(address))
        .await?
        .map_err(PullError::Connect)?;
    // Small frames wait for nothing.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    Ok(stream)
}

fn unexpected(expected: &'static str, kind: Kind) -> PullError {
    FrameError::Kind {
        expected,
        got: kind as u8,
    }
    .into()
}

async fn within<T>(
    after: Duration,
    what: &'static str,
    work: impl Future<Output = T>,
) -> Result<T, PullError> {
    tokio::time::timeout(after, work)
        .await
        .map_err(|_| PullError::Silent { what, after })
}
