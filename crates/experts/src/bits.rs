//! Bits into bytes and back, most significant first.

/// Appends bits to a byte vector.
pub(crate) struct BitWriter {
    bytes: Vec<u8>,
    /// The last bits, right-aligned, fewer than 8 of them.
    pending: u64,
    pending_bits: u32,
}

impl BitWriter {
    /// Continues after whole bytes.
    pub(crate) fn after(bytes: Vec<u8>) -> Self {
        Self {
            bytes,
            pending: 0,
            pending_bits: 0,
        }
    }

    /// Appends the low `width` (at most 32) bits of `value`.
    pub(crate) fn put(&mut self, value: u32, width: u32) {
        debug_assert!(width <= 32 && (width == 32 || value >> width == 0));
        self.pending = (self.pending << width) | u64::from(value);
        self.pending_bits += width;
        while self.pending_bits >= 8 {
            self.pending_bits -= 8;
            self.bytes.push((self.pending >> self.pending_bits) as u8);
        }
        self.pending &= (1 << self.pending_bits) - 1;
    }

    /// Appends `zeros` zero bits and a one.
    pub(crate) fn put_unary(&mut self, mut zeros: u32) {
        while zeros >= 32 {
            self.put(0, 32);
            zeros -= 32;
        }
        self.put(1, zeros + 1);
    }

    /// The bytes, the last one filled up with zero bits.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        if self.pending_bits > 0 {
            self.put(0, 8 - self.pending_bits);
        }
        self.bytes
    }
}

/// Why there is no unary number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unary {
    /// The bits end before a one.
    End,
    /// More zeros than allowed.
    OverLimit,
}

/// Reads bits from bytes; `None` beyond the end.
pub(crate) struct BitReader<'a> {
    bytes: &'a [u8],
    /// Bits read so far.
    position: usize,
}

impl<'a> BitReader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    fn remaining(&self) -> usize {
        self.bytes.len() * 8 - self.position
    }

    /// The next bits, left-aligned, at least 57 of them true where the bytes have them, zeros after
    /// their end.
    fn window(&self) -> u64 {
        let tail = &self.bytes[self.position / 8..];
        let word = match tail.first_chunk::<8>() {
            Some(chunk) => u64::from_be_bytes(*chunk),
            None => {
                let mut chunk = [0; 8];
                chunk[..tail.len()].copy_from_slice(tail);
                u64::from_be_bytes(chunk)
            }
        };
        word << (self.position % 8)
    }

    /// The next `width` (at most 32) bits.
    pub(crate) fn take(&mut self, width: u32) -> Option<u32> {
        debug_assert!(width <= 32);
        if width == 0 {
            return Some(0);
        }
        if self.remaining() < width as usize {
            return None;
        }
        let value = (self.window() >> (64 - width)) as u32;
        self.position += width as usize;
        Some(value)
    }

    /// The zeros before the next one, which is consumed too.
    pub(crate) fn take_unary(&mut self, limit: u32) -> Result<u32, Unary> {
        let mut zeros = 0u32;
        loop {
            // The window's last 7 bits may lie beyond the bytes that it was read from.
            let run = self.window().leading_zeros().min(57);
            zeros = zeros.saturating_add(run);
            if self.remaining() <= run as usize {
                return Err(Unary::End);
            }
            if zeros > limit {
                return Err(Unary::OverLimit);
            }
            if run < 57 {
                self.position += run as usize + 1;
                return Ok(zeros);
            }
            self.position += 57;
        }
    }

    /// True when fewer than eight bits are left and all are zero.
    pub(crate) fn at_padding(&self) -> bool {
        self.remaining() < 8 && (self.remaining() == 0 || self.window() == 0)
    }
}
