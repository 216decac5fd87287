//! Who is there: the workers of both pools, whether they are up, and what is in flight on each.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use reqwest::Url;
use routing::WorkerFacts;
use tokio::sync::{Notify, watch};

use crate::errors::GatewayError;

/// What a worker is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    Prefill,
    Decode,
}

impl Side {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How a worker moves KV blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// By the embedded workers' own transfer.
    Embedded,
    /// By a connector of vLLM, or of whatever else speaks its dialect.
    Other,
}

impl Kind {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Embedded => "colocate",
            Self::Other => "vllm",
        }
    }
}

/// One worker.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) side: Side,
    /// Its place in its pool.
    pub(crate) index: usize,
    /// `host:port`, as metrics and headers call it.
    pub(crate) name: String,
    base: String,
    in_flight: AtomicU32,
    placed: AtomicU64,
    failures: AtomicU64,
    /// Watched by the requests that it has.
    state: watch::Sender<State>,
    /// Told when the worker should be looked at before its next turn.
    pub(crate) look: Notify,
}

/// What is believed of a worker.
#[derive(Debug, Clone)]
pub(crate) struct State {
    pub(crate) healthy: bool,
    /// It does not even answer that it is not well. A worker that is down in another way may still finish what it has, as
    /// one does that is shutting down; or else its connections break.
    pub(crate) silent: bool,
    /// Why it is not healthy.
    pub(crate) reason: Option<String>,
    pub(crate) since: Instant,
    pub(crate) kind: Option<Kind>,
}

impl Worker {
    fn new(side: Side, index: usize, url: &Url) -> Result<Self, GatewayError> {
        let wrong = || GatewayError::Url {
            side: side.as_str(),
            url: url.to_string(),
        };
        if !matches!(url.scheme(), "http" | "https") {
            return Err(wrong());
        }
        let host = url.host_str().ok_or_else(wrong)?;
        let port = url.port_or_known_default().ok_or_else(wrong)?;
        Ok(Self {
            side,
            index,
            name: format!("{host}:{port}"),
            base: url.as_str().trim_end_matches('/').to_owned(),
            in_flight: AtomicU32::new(0),
            placed: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            state: watch::Sender::new(State {
                healthy: false,
                silent: false,
                reason: Some("not looked at yet".to_owned()),
                since: Instant::now(),
                kind: None,
            }),
            look: Notify::new(),
        })
    }

    /// The URL of one of its routes; `path` begins with a slash.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    /// Its base URL.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// Requests in flight.
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Requests placed on it so far.
    pub(crate) fn placed(&self) -> u64 {
        self.placed.load(Ordering::Relaxed)
    }

    /// Requests that failed on it so far.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    pub(crate) fn count_failure(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// What is believed of it.
    pub(crate) fn state(&self) -> State {
        self.state.borrow().clone()
    }

    pub(crate) fn healthy(&self) -> bool {
        self.state.borrow().healthy
    }

    pub(crate) fn kind(&self) -> Option<Kind> {
        self.state.borrow().kind
    }

    pub(crate) fn set_kind(&self, kind: Kind) {
        self.state.send_modify(|state| state.kind = Some(kind));
    }

    /// Takes the worker for up. True if that is news.
    pub(crate) fn set_up(&self) -> bool {
        self.state.send_if_modified(|state| {
            let news = !state.healthy;
            if news {
                state.since = Instant::now();
            }
            state.healthy = true;
            state.silent = false;
            state.reason = None;
            news
        })
    }

    /// Takes the worker for down, and for silent until it is up again if it is. True if it was up.
    pub(crate) fn set_down(&self, reason: impl Into<String>, silent: bool) -> bool {
        let mut news = false;
        self.state.send_modify(|state| {
            news = state.healthy;
            if news {
                state.since = Instant::now();
            }
            state.healthy = false;
            state.silent |= silent;
            state.reason = Some(reason.into());
        });
        news
    }

    /// Waits until the worker is taken for silent, and says why.
    pub(crate) async fn falls_silent(&self) -> String {
        let mut state = self.state.subscribe();
        let silent = state.wait_for(|state| state.silent).await;
        // It cannot fail: the worker itself holds the sender.
        silent.map_or_else(
            |_| String::new(),
            |state| state.reason.clone().unwrap_or_default(),
        )
    }
}

/// A request in flight on a worker, until this is dropped.
#[derive(Debug)]
pub(crate) struct InFlight(Arc<Worker>);

impl InFlight {
    pub(crate) fn open(worker: &Arc<Worker>) -> Self {
        worker.in_flight.fetch_add(1, Ordering::Relaxed);
        worker.placed.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(worker))
    }

    pub(crate) fn worker(&self) -> &Arc<Worker> {
        &self.0
    }
}

impl Deref for InFlight {
    type Target = Worker;

    fn deref(&self) -> &Worker {
        &self.0
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The workers of one side, in a fixed order.
#[derive(Debug)]
pub(crate) struct Pool {
    workers: Vec<Arc<Worker>>,
}

impl Pool {
    pub(crate) fn new(side: Side, urls: &[Url]) -> Result<Self, GatewayError> {
        if urls.is_empty() {
            return Err(GatewayError::NoWorkers(side.as_str()));
        }
        let workers = urls
            .iter()
            .enumerate()
            .map(|(index, url)| Worker::new(side, index, url).map(Arc::new))
            .collect::<Result<Vec<_>, _>>()?;
        for (index, worker) in workers.iter().enumerate() {
            if workers[..index]
                .iter()
                .any(|other| other.base == worker.base)
            {
                return Err(GatewayError::Twice {
                    side: side.as_str(),
                    url: worker.base.clone(),
                });
            }
        }
        Ok(Self { workers })
    }

    pub(crate) fn len(&self) -> usize {
        self.workers.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Worker>> {
        self.workers.iter()
    }

    pub(crate) fn get(&self, index: usize) -> Option<&Arc<Worker>> {
        self.workers.get(index)
    }

    pub(crate) fn any_healthy(&self) -> bool {
        self.workers.iter().any(|worker| worker.healthy())
    }

    /// What a policy is told of the pool, for a request that has tried these workers.
    pub(crate) fn facts(&self, tried: &Tried) -> Vec<WorkerFacts> {
        let facts = |with_soft: bool| -> Vec<WorkerFacts> {
            self.workers
                .iter()
                .map(|worker| WorkerFacts {
                    in_flight: worker.in_flight(),
                    healthy: worker.healthy(),
                    excluded: tried.unreachable.contains(&worker.index)
                        || (with_soft && tried.failed.contains(&worker.index)),
                })
                .collect()
        };
        let strict = facts(true);
        if strict.iter().any(WorkerFacts::eligible) {
            strict
        } else {
            facts(false)
        }
    }
}

/// The workers of one side that a request has tried.
#[derive(Debug, Default)]
pub(crate) struct Tried {
    /// Could not be reached: not tried again.
    unreachable: Vec<usize>,
    /// Were reached and failed: tried again only if no other is left.
    failed: Vec<usize>,
}

impl Tried {
    pub(crate) fn unreachable(&mut self, worker: &Worker) {
        self.unreachable.push(worker.index);
    }

    pub(crate) fn failed(&mut self, worker: &Worker) {
        self.failed.push(worker.index);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn pool(urls: &[&str]) -> Result<Pool, GatewayError> {
        let urls: Vec<Url> = urls.iter().map(|url| url.parse().unwrap()).collect();
        Pool::new(Side::Decode, &urls)
    }

    fn up(urls: &[&str]) -> Pool {
        let pool = pool(urls).unwrap();
        pool.iter().for_each(|worker| {
            worker.set_up();
        });
        pool
    }

    fn eligible(pool: &Pool, tried: &Tried) -> Vec<usize> {
        let facts = pool.facts(tried);
        (0..facts.len())
            .filter(|&index| facts[index].eligible())
            .collect()
    }

    #[test]
    fn pools_are_checked() {
        let check = |urls: &[&str], part: &str| {
            let message = pool(urls).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        };
        check(&[], "at least one decode worker");
        check(&["ftp://a:1"], "ftp://a:1");
        check(&["http://a:1", "http://a:1/"], "given twice");
        let pool = pool(&["http://a:1/", "http://b/base"]).unwrap();
        assert_eq!(pool.get(0).unwrap().url("/health"), "http://a:1/health");
        assert_eq!(pool.get(1).unwrap().url("/health"), "http://b/base/health");
        assert_eq!(pool.get(1).unwrap().name, "b:80");
    }

    #[test]
    fn guards_count() {
        let pool = up(&["http://a:1"]);
        let worker = pool.get(0).unwrap();
        let one = InFlight::open(worker);
        let two = InFlight::open(worker);
        assert_eq!(pool.facts(&Tried::default())[0].in_flight, 2);
        drop(one);
        drop(two);
        assert_eq!((worker.in_flight(), worker.placed()), (0, 2));
    }

    #[tokio::test]
    async fn silence_is_told_to_who_waits_and_lasts_until_the_worker_is_up() {
        let pool = up(&["http://a:1"]);
        let worker = pool.get(0).unwrap();
        let mut waiting = Box::pin(worker.falls_silent());
        assert!(worker.set_down("shutting down", false));
        assert!(futures::poll!(&mut waiting).is_pending());
        assert!(!worker.set_down("no answer", true));
        assert_eq!(waiting.await, "no answer");
        worker.set_down("refused", false);
        assert_eq!(worker.falls_silent().await, "refused");
        assert!(worker.set_up());
        assert!(futures::poll!(Box::pin(worker.falls_silent())).is_pending());
    }

    #[test]
    fn a_failed_worker_is_used_again_only_if_it_is_the_last() {
        let pool = up(&["http://a:1", "http://b:1", "http://c:1"]);
        let mut tried = Tried::default();
        tried.failed(pool.get(0).unwrap());
        assert_eq!(eligible(&pool, &tried), [1, 2]);
        tried.unreachable(pool.get(1).unwrap());
        pool.get(2).unwrap().set_down("gone", false);
        assert_eq!(eligible(&pool, &tried), [0]);
        tried.unreachable(pool.get(0).unwrap());
        assert!(eligible(&pool, &tried).is_empty());
    }
}
