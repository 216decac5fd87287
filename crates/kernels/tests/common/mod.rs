//! Seeded data.
#![allow(dead_code, unreachable_pub)]

use half::bf16;

fn next(state: &mut u64) -> u64 {
    // SplitMix64.
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Values in -scale..scale.
pub fn random_f32(seed: u64, len: usize, scale: f32) -> Vec<f32> {
    let mut state = seed;
    (0..len)
        .map(|_| (next(&mut state) >> 40) as f32 / (1_u64 << 23) as f32 * scale - scale)
        .collect()
}

/// Values in -scale..scale, as bf16.
pub fn random(seed: u64, len: usize, scale: f32) -> Vec<bf16> {
    random_f32(seed, len, scale)
        .into_iter()
        .map(bf16::from_f32)
        .collect()
}

/// Any bits at all, every fourth a special value.
pub fn any_bits(seed: u64, len: usize) -> Vec<bf16> {
    const SPECIAL: [u16; 8] = [
        0x0000, 0x8000, 0x0001, 0x8001, 0x7f7f, 0x7f80, 0xff80, 0x7fc0,
    ];
    let mut state = seed;
    (0..len)
        .map(|_| {
            let z = next(&mut state);
            let value = if z & 3 == 0 {
                SPECIAL[(z >> 8) as usize % SPECIAL.len()]
            } else {
                (z >> 16) as u16
            };
            bf16::from_bits(value)
        })
        .collect()
}

/// Bits to compare, every NaN as one.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter()
        .map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() })
        .collect()
}
