//! Leases on blocks that are held for a peer.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use engine::RequestId;

/// What is known of held blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lease {
    /// Names the prompt.
    pub(crate) prompt_digest: u128,
    /// Its length.
    pub(crate) prompt_tokens: u32,
    expires: Instant,
}

/// The longest lease, 30 years: any length is taken, and the clock's range is not known.
const LONGEST: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);

/// The leases of one engine, all of the same length.
#[derive(Debug)]
pub(crate) struct Leases {
    length: Duration,
    leases: HashMap<RequestId, Lease>,
}

impl Leases {
    /// No leases yet.
    pub(crate) fn new(length: Duration) -> Self {
        Self {
            length: length.min(LONGEST),
            leases: HashMap::new(),
        }
    }

    /// The request's blocks are held from `now` on.
    pub(crate) fn begin(
        &mut self,
        id: RequestId,
        prompt_digest: u128,
        prompt_tokens: u32,
        now: Instant,
    ) {
        let lease = Lease {
            prompt_digest,
            prompt_tokens,
            expires: now + self.length,
        };
        self.leases.insert(id, lease);
    }

    /// The lease of a request.
    pub(crate) fn get(&self, id: RequestId) -> Option<Lease> {
        self.leases.get(&id).copied()
    }

    /// Ends a lease, if there is one.
    pub(crate) fn end(&mut self, id: RequestId) -> Option<Lease> {
        self.leases.remove(&id)
    }

    /// When the next one ends by itself.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.leases.values().map(|lease| lease.expires).min()
    }

    /// Ends the leases that have expired at `now`, and gives their requests in order.
    pub(crate) fn expired(&mut self, now: Instant) -> Vec<RequestId> {
        let mut ids: Vec<_> = self
            .leases
            .extract_if(|_, lease| lease.expires <= now)
            .map(|(id, _)| id)
            .collect();
        ids.sort_unstable();
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_lease_is_no_panic() {
        let start = Instant::now();
        let mut leases = Leases::new(Duration::from_secs(u64::MAX));
        leases.begin(RequestId(1), 7, 3, start);
        assert_eq!(leases.next_expiry(), Some(start + LONGEST));
        assert!(leases.expired(start).is_empty());
    }

    #[test]
    fn leases_end_by_themselves_or_are_ended() {
        let second = Duration::from_secs(1);
        let start = Instant::now();
        let mut leases = Leases::new(10 * second);
        assert_eq!(leases.next_expiry(), None);
        leases.begin(RequestId(1), 7, 3, start);
        leases.begin(RequestId(2), 8, 4, start + second);
        leases.begin(RequestId(3), 9, 5, start + 2 * second);
        assert_eq!(
            leases.get(RequestId(2)).map(|lease| lease.prompt_tokens),
            Some(4)
        );
        assert_eq!(leases.next_expiry(), Some(start + 10 * second));
        assert!(leases.expired(start + 9 * second).is_empty());
        assert!(leases.end(RequestId(2)).is_some());
        assert!(leases.end(RequestId(2)).is_none());
        assert_eq!(
            leases.expired(start + 12 * second),
            [RequestId(1), RequestId(3)]
        );
        assert_eq!(leases.next_expiry(), None);
    }
}
