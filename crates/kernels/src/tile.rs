//! The inner product: a few rows times a few panels, all sums in registers.

use half::bf16;

use crate::lanes::{LANES, Lanes};
use crate::storage::LINE;

/// Most rows of one tile.
pub(crate) const MAX_ROWS: usize = 6;
/// Most panels of one tile.
pub(crate) const MAX_PANELS: usize = 8;
/// Room for the sums of any tile.
pub(crate) const TILE: usize = 24 * LANES;

/// Sums of one tile, `[rows][panels][16]`, from the beginning.
pub(crate) type Sums = [f32; TILE];

/// Most panels that a tile of `rows` rows may have: the sums must fit into the registers.
#[inline(always)]
pub(crate) fn panels_for(rows: usize, left: usize) -> usize {
    match left {
        8.. if rows <= 3 => 8,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Sets `sums[r][j]` to the products of row `r` with the sixteen outputs of panel `j`.
///
/// Each sum begins at +0 and adds, for each pair of k in ascending order, the second and then the first product with a fused
/// multiply-add. That is VDPBF16PS's own order: that instruction gives the same bits for normal numbers, and is left aside
/// because it has half the throughput of two fused multiply-adds on Sapphire Rapids (measured: 96 against 200 GFLOP/s) and flushes
/// denormals. The order is the same for every `rows` and every number of panels.
///
/// # Safety
/// The processor has the instructions of `L`; `x` points to `rows` rows of f32, `stride` apart, each at least `2 * pairs`
/// long; each panel points to `pairs` lines of 32 bf16; `rows` is 1 to 6, `panels.len()` is 8, 4, 2 or 1, and 8 for at most three rows.
#[inline(always)]
pub(crate) unsafe fn product<L: Lanes>(
    x: *const f32,
    stride: usize,
    rows: usize,
    panels: &[*const bf16],
    pairs: usize,
    sums: &mut Sums,
) {
    macro_rules! select {
        ($($rows:literal x $panels:literal),*) => {
            match (rows, panels.len()) {
                $(($rows, $panels) => {
                    let mut fixed = [std::ptr::null(); $panels];
                    fixed.copy_from_slice(panels);
                    // SAFETY: the caller's promise; rows * panels is at most 24, so the sums fit.
                    unsafe { fixed_product::<L, $rows, $panels>(x, stride, &fixed, pairs, sums) }
                })*
                _ => unreachable!("a tile of {rows} rows x {} panels", panels.len()),
            }
        };
    }
    select!(
        1 x 1, 1 x 2, 1 x 4, 1 x 8, 2 x 1, 2 x 2, 2 x 4, 2 x 8, 3 x 1, 3 x 2, 3 x 4, 3 x 8,
        4 x 1, 4 x 2, 4 x 4, 5 x 1, 5 x 2, 5 x 4, 6 x 1, 6 x 2, 6 x 4
    );
}

#[inline(always)]
unsafe fn fixed_product<L: Lanes, const ROWS: usize, const PANELS: usize>(
    x: *const f32,
    stride: usize,
    panels: &[*const bf16; PANELS],
    pairs: usize,
    sums: &mut Sums,
) {
    // SAFETY: see `product`: every line read is below `pairs`, every x below `2 * pairs`.
    unsafe {
        let mut acc = [[L::zero(); PANELS]; ROWS];
        for pair in 0..pairs {
            let second: [L::F; PANELS] =
                std::array::from_fn(|j| L::odd(panels[j].add(pair * LINE)));
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = L::splat(*x.add(r * stride + 2 * pair + 1));
                for (acc, &w) in acc.iter_mut().zip(&second) {
                    *acc = L::fma(w, x, *acc);
                }
            }
            let first: [L::F; PANELS] =
                std::array::from_fn(|j| L::even(panels[j].add(pair * LINE)));
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = L::splat(*x.add(r * stride + 2 * pair));
                for (acc, &w) in acc.iter_mut().zip(&first) {
                    *acc = L::fma(w, x, *acc);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (j, &acc) in acc.iter().enumerate() {
                L::store(sums.as_mut_ptr().add((r * PANELS + j) * LANES), acc);
            }
        }
    }
}
