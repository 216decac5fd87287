//! The gateway as a whole: what its parts share, how it starts and how it stops.

use std::sync::{Arc, Mutex};

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, Timeouts};
use crate::errors::GatewayError;
use crate::health;
use crate::metrics::Metrics;
use crate::placement::Placement;
use crate::policies::{self, MapNote};
use crate::registry::{Pool, Side, Worker};
use crate::routes;
use crate::upstream::Upstream;

/// What every request shares.
pub(crate) struct App {
    pub(crate) placement: Placement,
    pub(crate) upstream: Upstream,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) map: Option<MapNote>,
    pub(crate) timeouts: Timeouts,
    pub(crate) max_body_bytes: usize,
    pub(crate) max_in_flight: usize,
    /// A permit for each request that may be in flight.
    pub(crate) permits: Arc<Semaphore>,
    pub(crate) prefill_attempts: usize,
    pub(crate) prefills_again: usize,
    pub(crate) lease: std::time::Duration,
    pub(crate) max_reply_bytes: usize,
    pub(crate) decision_headers: bool,
    /// Held while a worker is let in, see [`health`].
    pub(crate) admission: Mutex<()>,
    /// Whether it was said that the prefill workers send no counts.
    pub(crate) said_no_counts: std::sync::Once,
    /// Whether it was said that the locality map is for another model.
    pub(crate) said_other_model: std::sync::Once,
}

impl App {
    pub(crate) async fn new(mut config: Config) -> Result<Self, GatewayError> {
        let prefill = Pool::new(Side::Prefill, &config.prefill)?;
        let decode = Pool::new(Side::Decode, &config.decode)?;
        let policies = policies::make(&mut config).await?;
        let metrics = Arc::new(Metrics::new());
        let max_in_flight = config.max_in_flight.clamp(1, Semaphore::MAX_PERMITS);
        Ok(Self {
            placement: Placement::new(
                prefill,
                decode,
                policies.prefill,
                policies.decode,
                Arc::clone(&metrics),
            ),
            upstream: Upstream::new(&config.timeouts, config.max_reply_bytes)?,
            metrics,
            map: policies.map,
            timeouts: config.timeouts,
            max_body_bytes: config.max_body_bytes,
            max_in_flight,
            permits: Arc::new(Semaphore::new(max_in_flight)),
            prefill_attempts: config.prefill_attempts,
            prefills_again: config.prefills_again,
            lease: config.lease,
            max_reply_bytes: config.max_reply_bytes,
            admission: Mutex::new(()),
            decision_headers: config.decision_headers,
            said_no_counts: std::sync::Once::new(),
            said_other_model: std::sync::Once::new(),
        })
    }

    /// Every worker of both pools.
    pub(crate) fn workers(&self) -> impl Iterator<Item = &Arc<Worker>> {
        self.placement
            .prefill
            .iter()
            .chain(self.placement.decode.iter())
    }

    pub(crate) fn pool(&self, side: Side) -> &Pool {
        match side {
            Side::Prefill => &self.placement.prefill,
            Side::Decode => &self.placement.decode,
        }
    }
}

/// Serves on `listener` until `shutdown` resolves, then lets requests in flight end, within [`Timeouts::drain`].
///
/// Workers need not be up yet: those that are not are looked for until they are. `ready` is called once the configuration
/// has been found to work and every worker has been looked at; requests that come before wait.
///
/// # Errors
/// A configuration that cannot work, workers of two kinds, or a listener that fails.
pub async fn serve(
    config: Config,
    listener: TcpListener,
    ready: impl FnOnce(),
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), GatewayError> {
    let app = Arc::new(App::new(config).await?);
    health::first_look(&app).await?;
    let mut watchers = JoinSet::new();
    for worker in app.workers() {
        watchers.spawn(health::watch(Arc::clone(&app), Arc::clone(worker)));
    }
    let (prefill_policy, decode_policy) = app.placement.policy_names();
    tracing::info!(
        prefill = app.placement.prefill.len(),
        decode = app.placement.decode.len(),
        prefill_policy,
        decode_policy,
        "gateway is up"
    );
    ready();
    let stopping = CancellationToken::new();
    let server = {
        let stopping = stopping.clone();
        axum::serve(listener, routes::router(&app)).with_graceful_shutdown(async move {
            shutdown.await;
            stopping.cancel();
        })
    };
    let drained = {
        let drain = app.timeouts.drain;
        async move {
            stopping.cancelled().await;
            tokio::time::sleep(drain).await;
        }
    };
    tokio::select! {
        result = async { server.await } => result.map_err(GatewayError::Listen),
        () = drained => {
            tracing::warn!("requests were still in flight when the gateway stopped");
            Ok(())
        }
    }
}
