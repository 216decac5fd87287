//! Limits of the gateway that an operator may set.

use std::{num::NonZeroUsize, time::Duration};

use gateway::Config;

/// What a gateway bounds. Whatever is not given keeps the gateway's own default.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct Limits {
    /// Requests in flight; more are refused with 503 [default: 4096]
    #[arg(long, value_name = "N")]
    max_in_flight: Option<NonZeroUsize>,
    /// Largest request body; a larger one is refused with 413 [default: 32 MiB]
    #[arg(long, value_name = "BYTES")]
    max_body_bytes: Option<NonZeroUsize>,
    /// Largest reply of a worker that is held in memory; streams are not bounded [default: 64 MiB]
    #[arg(long, value_name = "BYTES")]
    max_reply_bytes: Option<NonZeroUsize>,
    /// Prefill workers that one prefill may try [default: 3]
    #[arg(long, value_name = "N")]
    prefill_attempts: Option<NonZeroUsize>,
    /// How often a request goes through prefill again when its decode worker fails before the first byte [default: 1]
    #[arg(long, value_name = "N")]
    prefills_again: Option<usize>,
    /// How long a prefill's blocks are trusted to be there; less than the prefill workers' lease [default: 25]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    trust_lease: Option<Duration>,
    /// For a client's request to arrive whole [default: 60]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    request_timeout: Option<Duration>,
    /// For a connection to a worker [default: 2]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    connect_timeout: Option<Duration>,
    /// For a whole prefill [default: 600]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    prefill_timeout: Option<Duration>,
    /// For the first byte of a decode worker's stream [default: 600]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    first_byte_timeout: Option<Duration>,
    /// Between two pieces of a stream [default: 120]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    stream_timeout: Option<Duration>,
    /// For a whole reply that is not streamed [default: 3600]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    reply_timeout: Option<Duration>,
    /// For a health probe; three in a row unanswered, and the worker is down [default: 5]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    probe_timeout: Option<Duration>,
    /// Between two health probes of a worker [default: 1]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    probe_interval: Option<Duration>,
    /// For requests in flight when the gateway is told to stop [default: 30]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = seconds)]
    drain_timeout: Option<Duration>,
}

impl Limits {
    /// Writes what was given into `config`.
    pub(crate) fn apply(&self, config: &mut Config) {
        let timeouts = &mut config.timeouts;
        set(&mut timeouts.request, self.request_timeout);
        set(&mut timeouts.connect, self.connect_timeout);
        set(&mut timeouts.prefill, self.prefill_timeout);
        set(&mut timeouts.first_byte, self.first_byte_timeout);
        set(&mut timeouts.between, self.stream_timeout);
        set(&mut timeouts.whole, self.reply_timeout);
        set(&mut timeouts.probe, self.probe_timeout);
        set(&mut timeouts.probe_interval, self.probe_interval);
        set(&mut timeouts.drain, self.drain_timeout);
        set(&mut config.lease, self.trust_lease);
        set(&mut config.prefills_again, self.prefills_again);
        set(
            &mut config.prefill_attempts,
            self.prefill_attempts.map(NonZeroUsize::get),
        );
        set(
            &mut config.max_in_flight,
            self.max_in_flight.map(NonZeroUsize::get),
        );
        set(
            &mut config.max_body_bytes,
            self.max_body_bytes.map(NonZeroUsize::get),
        );
        set(
            &mut config.max_reply_bytes,
            self.max_reply_bytes.map(NonZeroUsize::get),
        );
    }
}

fn set<T>(to: &mut T, given: Option<T>) {
    if let Some(value) = given {
        *to = value;
    }
}

/// Seconds, fractions allowed, from a millisecond to a year.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| "expected a number of seconds".to_owned())?;
    if (0.001..=31_536_000.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("expected seconds from 0.001 to 31536000".into())
    }
}
