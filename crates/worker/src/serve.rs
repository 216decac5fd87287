//! From a configuration to a worker that serves, and its end.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::serve::ListenerExt as _;
use engine::{ConfigError, Engine, LoadError, LoadOptions, Model};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::engine_thread;
use crate::http::{App, router, unix_time};
use crate::metrics::Metrics;
use crate::text::Text;
use crate::transfer::{server, wire};

/// Where a worker can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    /// Its HTTP.
    pub http: SocketAddr,
    /// Its transfer of KV blocks.
    pub transfer: SocketAddr,
}

/// Why a worker cannot serve, or no longer.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The model cannot be loaded.
    #[error("cannot load the model: {0}")]
    Load(#[from] LoadError),
    /// The engine cannot have this configuration.
    #[error("cannot set up the engine: {0}")]
    Engine(#[from] ConfigError),
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The system refuses a thread, or accepting connections failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The engine's thread ended by itself, which it never should.
    #[error("the engine has stopped")]
    EngineStopped,
}

/// Loads the model, serves until `shutdown`, then takes no new requests and lets running ones, and peers that still pull, finish within the grace period.
/// `bound` is called once requests can be served.
///
/// # Errors
/// The model cannot be loaded, an address cannot be listened on, or the engine died.
pub async fn serve(
    config: Config,
    bound: impl FnOnce(Bound),
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let http = listen(config.listen).await?;
    let transfer = listen(config.transfer_listen).await?;
    let addresses = Bound {
        http: http.local_addr()?,
        transfer: transfer.local_addr()?,
    };
    let app = Arc::new(load(config, addresses).await?);

    let stop_transfer = CancellationToken::new();
    let sender = server::Sender {
        engine: app.engine.clone(),
        engine_id: app.engine_id.clone(),
        geometry_digest: app.geometry_digest,
        timeout: app.config.transfer_timeout,
    };
    let peers = tokio::spawn(server::serve(transfer, sender, stop_transfer.clone()));

    tracing::info!(model = app.model_name, role = %app.config.role, http = %addresses.http, transfer = %addresses.transfer, "serving");
    bound(addresses);
    let result = serve_http(&app, http, shutdown).await;
    stop_transfer.cancel();
    app.engine.stop();
    if let Err(error) = peers.await {
        tracing::warn!(%error, "the transfer of blocks ended in an error");
    }
    result
}

async fn serve_http(
    app: &Arc<App>,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let closing = CancellationToken::new();
    let graceful = closing.clone();
    let listener = listener.tap_io(|stream| {
        // Tokens wait for nothing.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
    });
    let server = axum::serve(listener, router(app.clone()))
        .with_graceful_shutdown(async move { graceful.cancelled().await });
    let mut server = tokio::spawn(server.into_future());
    tokio::select! {
        ended = &mut server => {
            ended.map_err(std::io::Error::other)??;
            return Ok(());
        }
        () = shutdown => {}
        () = app.engine.ended() => {
            server.abort();
            return Err(ServeError::EngineStopped);
        }
    }
    app.closing.store(true, Ordering::Release);
    closing.cancel();
    let drained = async {
        if let Err(error) = (&mut server).await {
            tracing::warn!(%error, "serving ended in an error");
        }
        app.tasks.close();
        app.tasks.wait().await;
        // Peers may still come for blocks of prompts that were prefilled here.
        app.engine.nothing_held().await;
    };
    if tokio::time::timeout(app.config.grace, drained)
        .await
        .is_err()
    {
        tracing::warn!(
            grace_s = app.config.grace.as_secs(),
            "requests were still running at the end of the grace period"
        );
        server.abort();
    }
    Ok(())
}

/// Everything a worker needs but its listeners.
pub(crate) async fn load(config: Config, addresses: Bound) -> Result<App, ServeError> {
    let (dir, engine_config) = (config.model_dir.clone(), config.engine);
    let options = LoadOptions {
        expert_padding: config.expert_padding,
    };
    let loading = move || -> Result<(Engine, Text, u32), ServeError> {
        let model = Arc::new(Model::load(&dir, &options)?);
        let text = Text::load(&dir)?;
        let experts = model.config().experts as u32;
        Ok((Engine::new(model, engine_config)?, text, experts))
    };
    let (engine, text, experts) = tokio::task::spawn_blocking(loading)
        .await
        .map_err(std::io::Error::other)??;
    let geometry = engine.geometry();
    let max_sequence = engine.max_sequence();
    let metrics = Metrics::new(experts);
    let engine = engine_thread::spawn(engine, metrics.clone(), config.lease)?;
    Ok(App {
        model_name: config.model_name(),
        engine,
        text,
        metrics,
        geometry_digest: wire::geometry_digest(&geometry),
        geometry,
        max_sequence,
        started: unix_time(),
        engine_id: uuid::Uuid::new_v4().to_string().into(),
        transfer_host: transfer_host(&config, addresses),
        transfer_port: addresses.transfer.port(),
        tasks: TaskTracker::new(),
        closing: AtomicBool::new(false),
        config,
    })
}

/// The host that peers are told to pull from.
fn transfer_host(config: &Config, addresses: Bound) -> String {
    let specified = |address: SocketAddr| Some(address.ip()).filter(|ip| !ip.is_unspecified());
    config.transfer_host.clone().unwrap_or_else(|| {
        specified(addresses.transfer)
            .or_else(|| specified(addresses.http))
            .unwrap_or(IpAddr::from([127, 0, 0, 1]))
            .to_string()
    })
}

async fn listen(address: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(address)
        .await
        .map_err(|source| ServeError::Listen { address, source })
}

/// Waits for SIGTERM or Ctrl-C, for use as the `shutdown` of [`serve`].
pub async fn shutdown_signal() {
    let interrupt = tokio::signal::ctrl_c();
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        match signal(SignalKind::terminate()) {
            Ok(mut terminate) => tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt => {}
            },
            Err(error) => {
                tracing::warn!(%error, "cannot listen for SIGTERM");
                let _ = interrupt.await;
            }
        }
    }
    #[cfg(not(unix))]
    {
        let _ = interrupt.await;
    }
}
