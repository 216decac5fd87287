//! A gateway inside this process, on a free port.

use std::{str::FromStr, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use gateway::{Config, GatewayError, LocalityConfig, Url};
use locality::{Band, LocalityMap};
use routing::DecodePolicyName;
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::output::BadUsage;

/// How long a gateway may take to end.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// How the locality policy weighs similarity against load.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct LocalityArgs {
    /// Width of the locality band: decode workers whose similarity is within this of the best are candidates
    #[arg(long, default_value_t = 0.1, allow_negative_numbers = true, value_parser = fraction::<f32>)]
    tau: f32,
    /// Let the second nearest decode worker in too when the band has only one
    #[arg(long)]
    widen_single_band: bool,
    /// Pass over decode workers that have more than this multiple of the mean load [default: no bound]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true, value_parser = max_load)]
    max_load: Option<f64>,
    /// Least part of a prompt's tokens that its expert counts must cover to be used, from 0 to 1
    #[arg(long, value_name = "PART", default_value_t = 0.5, allow_negative_numbers = true, value_parser = fraction::<f64>)]
    min_coverage: f64,
}

impl LocalityArgs {
    /// The policy's configuration.
    pub(crate) fn config(self) -> LocalityConfig {
        LocalityConfig {
            band: Band {
                tau: self.tau,
                widen_single: self.widen_single_band,
            },
            max_load: self.max_load,
            min_coverage: self.min_coverage,
        }
    }
}

fn fraction<T: FromStr + From<u8> + PartialOrd>(text: &str) -> Result<T, String> {
    let part: T = text.parse().map_err(|_| "expected a number".to_owned())?;
    if (T::from(0)..=T::from(1)).contains(&part) {
        Ok(part)
    } else {
        Err("expected a number from 0 to 1".into())
    }
}

fn max_load(text: &str) -> Result<f64, String> {
    let factor: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if factor >= 1.0 && factor.is_finite() {
        Ok(factor)
    } else {
        Err("expected a number of 1 or more".into())
    }
}

/// The workers behind a gateway, and how it routes.
#[derive(Debug, Clone)]
pub(crate) struct Front {
    /// URLs of prefill workers.
    pub(crate) prefill: Vec<String>,
    /// URLs of decode workers; centroid `k` of the map belongs to the `k`-th.
    pub(crate) decode: Vec<String>,
    /// The map for the `locality` policy.
    pub(crate) map: Option<LocalityMap>,
    /// How the locality policy weighs similarity against load.
    pub(crate) locality: LocalityConfig,
    /// Seed of policies that draw.
    pub(crate) seed: u64,
}

impl Front {
    /// The gateway's configuration for a policy.
    pub(crate) fn config(&self, policy: DecodePolicyName) -> Result<Config> {
        let mut config = Config::new(urls(&self.prefill)?, urls(&self.decode)?);
        config.decode_policy = Some(policy);
        config.locality_map = if policy == DecodePolicyName::Locality {
            self.map.clone()
        } else {
            None
        };
        config.locality = self.locality;
        config.seed = self.seed;
        Ok(config)
    }

    /// The index of the decode worker that the gateway's response header names.
    pub(crate) fn decode_index(&self, named: &str) -> Option<usize> {
        self.decode.iter().position(|url| host(url) == host(named))
    }
}

/// A worker's host and port, whether it is named by them or by its URL.
fn host(worker: &str) -> &str {
    worker
        .strip_prefix("http://")
        .unwrap_or(worker)
        .trim_end_matches('/')
}

/// A running gateway.
#[derive(Debug)]
pub(crate) struct Gateway {
    url: String,
    stop: CancellationToken,
    task: JoinHandle<Result<(), gateway::GatewayError>>,
}

impl Gateway {
    /// Starts a gateway that routes by `policy`.
    pub(crate) async fn start(front: &Front, policy: DecodePolicyName) -> Result<Self> {
        Self::start_at("127.0.0.1:0", front.config(policy)?).await
    }

    /// Starts a gateway on an address, and waits until it serves.
    pub(crate) async fn start_at(address: &str, config: Config) -> Result<Self> {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen on {address}"))?;
        let url = format!(
            "http://{}",
            listener
                .local_addr()
                .context("cannot tell the gateway's address")?
        );
        let stop = CancellationToken::new();
        let (ready, is_ready) = oneshot::channel();
        let said = move || {
            // Whoever started it may have gone.
            let _ = ready.send(());
        };
        let stopped = stop.clone().cancelled_owned();
        let task = tokio::spawn(gateway::serve(config, listener, said, stopped));
        let mut gateway = Self { url, stop, task };
        if is_ready.await.is_err() {
            gateway.ended().await?;
            bail!("the gateway ended before it served");
        }
        Ok(gateway)
    }

    /// Where it serves HTTP.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Waits until it ends by itself, which it only does by an error.
    pub(crate) async fn ended(&mut self) -> Result<()> {
        (&mut self.task)
            .await
            .context("the gateway ended badly")?
            .map_err(|error| match error {
                GatewayError::Client(_) | GatewayError::Listen(_) => {
                    anyhow::Error::new(error).context("the gateway failed")
                }
                // The others are what it was told to do.
                error => BadUsage(error.to_string()).into(),
            })
    }

    /// Stops it once the requests in flight have ended; how long that may take is the gateway's own affair.
    pub(crate) async fn drain(mut self) -> Result<()> {
        self.stop.cancel();
        self.ended().await
    }

    /// Stops it, when nothing is in flight.
    pub(crate) async fn stop(self) -> Result<()> {
        timeout(STOP_LIMIT, self.drain())
            .await
            .map_err(|_| anyhow!("the gateway did not stop within {} s", STOP_LIMIT.as_secs()))?
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.stop.cancel();
        self.task.abort();
    }
}

/// Reads worker URLs.
pub(crate) fn urls(texts: &[String]) -> Result<Vec<Url>> {
    texts
        .iter()
        .map(|text| text.parse().with_context(|| format!("not a URL: {text}")))
        .collect()
}
