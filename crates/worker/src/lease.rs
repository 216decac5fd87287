//! Leases on blocks that are held for a peer.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::RequestId;

/// A prompt whose blocks are held, or will be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeldPrompt {
    /// Names the prompt.
    pub(crate) digest: u128,
    /// Its length.
    pub(crate) tokens: u32,
    /// The handoff's name, where its sender gave it one.
    pub(crate) handoff: Option<Arc<str>>,
}

impl HeldPrompt {
    /// Whether this is the handoff's name.
    pub(crate) fn is_of(&self, handoff: &str) -> bool {
        self.handoff.as_deref() == Some(handoff)
    }
}

#[derive(Debug)]
struct Lease {
    prompt: HeldPrompt,
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
    pub(crate) fn begin(&mut self, id: RequestId, prompt: HeldPrompt, now: Instant) {
        let expires = now + self.length;
        self.leases.insert(id, Lease { prompt, expires });
    }

    /// What is held for a request.
    pub(crate) fn get(&self, id: RequestId) -> Option<&HeldPrompt> {
        self.leases.get(&id).map(|lease| &lease.prompt)
    }

    /// All that is held.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (RequestId, &HeldPrompt)> {
        self.leases.iter().map(|(&id, lease)| (id, &lease.prompt))
    }

    /// Ends a lease. True if there was one.
    pub(crate) fn end(&mut self, id: RequestId) -> bool {
        self.leases.remove(&id).is_some()
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

    fn prompt(tokens: u32) -> HeldPrompt {
        HeldPrompt {
            digest: 7,
            tokens,
            handoff: None,
        }
    }

    #[test]
    fn the_longest_lease_is_no_panic() {
        let start = Instant::now();
        let mut leases = Leases::new(Duration::from_secs(u64::MAX));
        leases.begin(RequestId(1), prompt(3), start);
        assert_eq!(leases.next_expiry(), Some(start + LONGEST));
        assert!(leases.expired(start).is_empty());
    }

    #[test]
    fn leases_end_by_themselves_or_are_ended() {
        let second = Duration::from_secs(1);
        let start = Instant::now();
        let mut leases = Leases::new(10 * second);
        assert_eq!(leases.next_expiry(), None);
        leases.begin(RequestId(1), prompt(3), start);
        leases.begin(RequestId(2), prompt(4), start + second);
        leases.begin(RequestId(3), prompt(5), start + 2 * second);
        assert_eq!(
            leases.get(RequestId(2)).map(|prompt| prompt.tokens),
            Some(4)
        );
        assert_eq!(leases.next_expiry(), Some(start + 10 * second));
        assert!(leases.expired(start + 9 * second).is_empty());
        assert!(leases.end(RequestId(2)));
        assert!(!leases.end(RequestId(2)));
        assert_eq!(
            leases.expired(start + 12 * second),
            [RequestId(1), RequestId(3)]
        );
        assert_eq!(leases.next_expiry(), None);
    }
}
