//! What an operator decides.

use std::time::Duration;

use http::HeaderName;
use locality::LocalityMap;
use reqwest::Url;
use routing::decode::LocalityConfig;
use routing::{DecodePolicyName, PrefillPolicyName};

/// The request header that names a request's domain, for the `domain` policy. It is not sent on.
pub const DOMAIN_HEADER: HeaderName = HeaderName::from_static("x-colocate-domain");

/// The body field that names a request's domain, where the header does not. It is taken out before the body is sent on.
pub const DOMAIN_FIELD: &str = "colocate_domain";

/// Longest domain label, in bytes: the `domain` policy remembers labels, and clients choose them.
pub const MAX_DOMAIN_BYTES: usize = 128;

/// A gateway: its workers, its policies, its limits.
#[derive(Debug)]
pub struct Config {
    /// Workers that compute prompts, at least one.
    pub prefill: Vec<Url>,
    /// Workers that generate tokens, at least one. Centroid `k` of the locality map belongs to the `k`-th.
    pub decode: Vec<Url>,
    /// How prefill workers are chosen.
    pub prefill_policy: PrefillPolicyName,
    /// How decode workers are chosen; by default by locality where there is a map, else by least load.
    pub decode_policy: Option<DecodePolicyName>,
    /// The map for the `locality` policy. One with another number of centroids than there are decode workers is refitted from the
    /// calibration that it carries.
    pub locality_map: Option<LocalityMap>,
    /// For the `locality` policy: the band, and which part of a prompt's tokens its expert counts must cover to be used.
    pub locality: LocalityConfig,
    /// Seed of everything random: `random`, `power_of_two`, a refit.
    pub seed: u64,
    /// Name prefill worker, decode worker and reason in response headers `x-colocate-*`.
    pub decision_headers: bool,
    /// Largest request body, in bytes; a larger one is refused with 413.
    pub max_body_bytes: usize,
    /// Largest reply of a worker that is held in memory, in bytes: one that is not streamed, or what comes before a
    /// stream's first event. A larger one is the worker's failure. Not to be confused with the length of a stream, which
    /// is not bounded.
    pub max_reply_bytes: usize,
    /// Requests in flight, at least one: any more are refused with 503 until one ends.
    pub max_in_flight: usize,
    /// How many prefill workers one prefill may try, at least one.
    pub prefill_attempts: usize,
    /// How often a request whose decode worker failed before its first byte goes through prefill again; 0 tells the client
    /// at once.
    pub prefills_again: usize,
    /// How long after a prefill its blocks are trusted to be there: less than the prefill workers' lease, which is 30 s
    /// unless they are told otherwise.
    pub lease: Duration,
    /// How long to wait for what.
    pub timeouts: Timeouts,
}

/// How long to wait for what.
///
/// The defaults are generous where a request may queue inside a worker: to give up on it there, and send it to another,
/// only adds to the load that made it wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// For a client's request to arrive whole; it has a place among those in flight meanwhile. Then it is refused with 408.
    pub request: Duration,
    /// For a connection to a worker.
    pub connect: Duration,
    /// For a whole prefill.
    pub prefill: Duration,
    /// For a decode worker's first byte of a stream.
    pub first_byte: Duration,
    /// Between two pieces of a stream.
    pub between: Duration,
    /// For a whole reply that is not streamed.
    pub whole: Duration,
    /// For a health probe, and for any other question that needs no inference. A worker that leaves three probes in a row
    /// unanswered is down, and the requests that it has are given up: they are served elsewhere or end in an error.
    pub probe: Duration,
    /// Between two health probes of a worker.
    pub probe_interval: Duration,
    /// For requests in flight when the gateway is told to stop.
    pub drain: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            request: Duration::from_secs(60),
            connect: Duration::from_secs(2),
            prefill: Duration::from_secs(600),
            first_byte: Duration::from_secs(600),
            between: Duration::from_secs(120),
            whole: Duration::from_secs(3600),
            probe: Duration::from_secs(5),
            probe_interval: Duration::from_secs(1),
            drain: Duration::from_secs(30),
        }
    }
}

impl Config {
    /// A gateway in front of these workers, everything else by default.
    #[must_use]
    pub fn new(prefill: Vec<Url>, decode: Vec<Url>) -> Self {
        Self {
            prefill,
            decode,
            prefill_policy: PrefillPolicyName::PrefixHash,
            decode_policy: None,
            locality_map: None,
            locality: LocalityConfig::default(),
            seed: 0,
            decision_headers: true,
            max_body_bytes: 32 << 20,
            max_reply_bytes: 64 << 20,
            max_in_flight: 4096,
            prefill_attempts: 3,
            prefills_again: 1,
            lease: Duration::from_secs(25),
            timeouts: Timeouts::default(),
        }
    }
}
