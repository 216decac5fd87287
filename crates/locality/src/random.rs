//! Seeded randomness whose draws this crate defines itself, so that they outlive a dependency's
//! change of mind.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A stream of draws.
pub(crate) struct Random(ChaCha8Rng);

impl Random {
    /// The stream number `stream` of a seed: independent of the others.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        Self(rng)
    }

    /// Uniform below `limit`, which must not be 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        // Lemire: the high half of a product, the biased low products drawn again.
        loop {
            let product = u128::from(self.0.next_u64()) * u128::from(limit);
            if product as u64 >= limit.wrapping_neg() % limit {
                return (product >> 64) as u64;
            }
        }
    }

    /// Uniform in `[0, 1)`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}
