//! Names for block contents.

/// The name of a block's content: of its tokens, all tokens before them, and the model.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash([u8; 32]);

impl BlockHash {
    /// The hash's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl std::fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "BlockHash({}..)",
            blake3::Hash::from(self.0).to_hex().split_at(12).0
        )
    }
}

/// Names the blocks of token sequences: a block's hash is that of its parent's hash and its own tokens, the first parent being a
/// hash of the model's fingerprint and the block size.
#[derive(Debug, Clone)]
pub struct PrefixHasher {
    root: BlockHash,
    block_size: usize,
}

impl PrefixHasher {
    /// Names for the blocks of one model at one block size.
    #[must_use]
    pub fn new(fingerprint: &str, block_size: usize) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"colocate kv block v1");
        hasher.update(&(block_size as u64).to_le_bytes());
        hasher.update(fingerprint.as_bytes());
        Self {
            root: BlockHash(hasher.finalize().into()),
            block_size,
        }
    }

    /// Extends `hashes` to all full blocks of `tokens`; those already there are of the same sequence and are kept.
    pub fn extend(&self, hashes: &mut Vec<BlockHash>, tokens: &[u32]) {
        let done = hashes.len() * self.block_size;
        for block in tokens[done.min(tokens.len())..].chunks_exact(self.block_size) {
            let parent = hashes.last().unwrap_or(&self.root);
            hashes.push(child(parent, block));
        }
    }

    /// The names of all full blocks of `tokens`.
    #[must_use]
    pub fn full_blocks(&self, tokens: &[u32]) -> Vec<BlockHash> {
        let mut hashes = Vec::with_capacity(tokens.len() / self.block_size);
        self.extend(&mut hashes, tokens);
        hashes
    }

    /// The name of a whole sequence, its last block full or not.
    #[must_use]
    pub fn sequence(&self, tokens: &[u32]) -> BlockHash {
        let hashes = self.full_blocks(tokens);
        let tail = &tokens[hashes.len() * self.block_size..];
        child(hashes.last().unwrap_or(&self.root), tail)
    }
}

fn child(parent: &BlockHash, tokens: &[u32]) -> BlockHash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&parent.0);
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    BlockHash(hasher.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_names_its_block_and_everything_before_it() {
        let hasher = PrefixHasher::new("m", 2);
        let a = hasher.full_blocks(&[1, 2, 3, 4, 5]);
        let b = hasher.full_blocks(&[1, 2, 3, 4]);
        let c = hasher.full_blocks(&[9, 2, 3, 4]);
        assert_eq!(a.len(), 2);
        assert_eq!(a, b);
        assert_ne!(a[0], c[0]);
        assert_ne!(a[1], c[1]);
        assert_ne!(a, PrefixHasher::new("n", 2).full_blocks(&[1, 2, 3, 4]));
    }

    #[test]
    fn extending_equals_hashing_at_once() {
        let hasher = PrefixHasher::new("m", 3);
        let tokens: Vec<u32> = (0..20).collect();
        let mut hashes = Vec::new();
        for n in 0..=tokens.len() {
            hasher.extend(&mut hashes, &tokens[..n]);
            assert_eq!(hashes, hasher.full_blocks(&tokens[..n]));
        }
    }

    #[test]
    fn a_sequence_is_named_with_its_tail() {
        let hasher = PrefixHasher::new("m", 2);
        let names =
            [&[1, 2][..], &[1, 2, 3], &[1, 2, 3, 4], &[1, 2, 4]].map(|t| hasher.sequence(t));
        for (i, a) in names.iter().enumerate() {
            assert!(names[..i].iter().all(|b| a != b));
        }
    }
}
