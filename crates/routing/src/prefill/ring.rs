//! A consistent-hash ring: each worker stands on it at many points, and a key belongs to the first point at or after
//! its hash. A worker that comes or goes moves only the keys between its points and their neighbours.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Points per worker on the ring (ELDR, arXiv 2607.00466, prefill routing).
pub const VIRTUAL_NODES: u64 = 160;

/// The ring of a pool of named workers.
#[derive(Debug, Clone, Default)]
pub struct Ring {
    /// (hash, worker), ascending.
    points: Vec<(u64, usize)>,
}

impl Ring {
    /// The ring of these workers. A worker's points follow from its name alone.
    #[must_use]
    pub fn new<S: AsRef<str>>(workers: &[S]) -> Self {
        let mut points: Vec<(u64, usize)> = workers
            .iter()
            .enumerate()
            .flat_map(|(index, name)| {
                (0..VIRTUAL_NODES)
                    .map(move |node| (xxh3_64_with_seed(name.as_ref().as_bytes(), node), index))
            })
            .collect();
        points.sort_unstable();
        Self { points }
    }

    /// Every worker in the order in which the ring meets them from this key on, repeats included: the first is the
    /// key's owner, the next different one its successor.
    pub fn walk(&self, key: &[u8]) -> impl Iterator<Item = usize> + '_ {
        let hash = xxh3_64(key);
        let start = self.points.partition_point(|&(point, _)| point < hash);
        self.points[start..]
            .iter()
            .chain(&self.points[..start])
            .map(|&(_, worker)| worker)
    }

    /// The worker that a key belongs to, or `None` on an empty ring.
    #[must_use]
    pub fn owner(&self, key: &[u8]) -> Option<usize> {
        self.walk(key).next()
    }
}
