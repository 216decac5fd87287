//! A request's entry in the books, from its arrival to its last byte: one that is dropped before is a client that left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::OwnedSemaphorePermit;

use crate::metrics::Metrics;

/// Status of a request whose client did not wait for the end, as nginx has it.
const CLIENT_LEFT: u16 = 499;

/// An open entry.
#[derive(Debug)]
pub(crate) struct Account {
    metrics: Arc<Metrics>,
    route: &'static str,
    arrived: Instant,
    closed: bool,
    /// Its place among the requests in flight, given up with the entry itself and not when it is closed.
    permit: Option<OwnedSemaphorePermit>,
}

impl Account {
    pub(crate) fn open(metrics: &Arc<Metrics>, route: &'static str) -> Self {
        Self {
            metrics: Arc::clone(metrics),
            route,
            arrived: Instant::now(),
            closed: false,
            permit: None,
        }
    }

    /// Takes a place among the requests in flight, for as long as the entry lives.
    pub(crate) fn hold(&mut self, permit: OwnedSemaphorePermit) {
        self.permit = Some(permit);
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.arrived.elapsed()
    }

    /// Notes the first token of a stream.
    pub(crate) fn first_token(&self) {
        self.metrics.ttft(self.route, self.elapsed());
    }

    /// Closes the entry. Only the first call counts.
    pub(crate) fn close(&mut self, status: u16) {
        if !std::mem::replace(&mut self.closed, true) {
            self.metrics.request(self.route, status, self.elapsed());
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.close(CLIENT_LEFT);
    }
}
