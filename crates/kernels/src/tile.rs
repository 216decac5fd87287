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

/// Most panels that a tile of `rows` rows takes next of `left`: its sums must fit into the registers.
#[inline(always)]
pub(crate) fn panels_for<L: Lanes>(rows: usize, left: usize) -> usize {
    let most = match rows {
        1 => L::PANELS_OF_ONE_ROW,
        2 | 3 => L::PANELS_OF_FEW_ROWS,
        _ => L::PANELS_OF_MANY_ROWS,
    };
    let mut panels = most;
    while panels > left {
        panels /= 2;
    }
    panels
}

/// Sets `sums[r][j]` to the products of row `r` with the sixteen outputs of panel `j`.
///
/// Each sum begins at +0 and adds, for each pair of k in ascending order, the second and then the first product with a fused
/// multiply-add. That is VDPBF16PS's own order: with `DOT`, [`Lanes::dot`] gives the same bits where no number on the way is
/// denormal. The order is the same for every `rows` and every number of panels.
///
/// # Safety
/// The processor has the instructions of `L`; `x` points to `rows` rows, `stride` f32 apart: each at least `2 * pairs` f32, or
/// with `DOT` `pairs` pairs of bf16 in the place of one f32 each; each panel points to `pairs` lines of 32 bf16; `rows` is 1 to 6 and `panels.len()` comes from [`panels_for`].
#[inline(always)]
pub(crate) unsafe fn product<L: Lanes, const DOT: bool>(
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
                    unsafe {
                        if DOT {
                            fixed_dot::<L, $rows, $panels>(x, stride, &fixed, pairs, sums);
                        } else {
                            fixed_product::<L, $rows, $panels>(x, stride, &fixed, pairs, sums);
                        }
                    }
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
    // SAFETY: see `product`: every line read is below `pairs`, every x below `2 * pairs`. `lower` and `upper` end one
    // pair behind the last that is read and are not read there; `upper` is only read where there are rows above 2.
    unsafe {
        let mut acc = [[L::zero(); PANELS]; ROWS];
        // Two pointers and one stride reach six rows with x86's addressing (0, 1 and 2 strides).
        let mut lower = x;
        let mut upper = x.wrapping_add(3 * stride);
        for pair in 0..pairs {
            let (l, u) = (opaque(lower), opaque(upper));
            // Loops, not closures: those are not always inlined into the function with the target features.
            for second in [1, 0] {
                if ROWS < PANELS {
                    // What there is less of stays in registers.
                    let mut x = [L::zero(); ROWS];
                    for (r, x) in x.iter_mut().enumerate() {
                        *x = L::splat(*input(l, u, r, stride).add(second));
                    }
                    for j in 0..PANELS {
                        let w = weights::<L>(panels[j].add(pair * LINE), second);
                        for r in 0..ROWS {
                            acc[r][j] = L::fma(w, x[r], acc[r][j]);
                        }
                    }
                } else {
                    let mut w = [L::zero(); PANELS];
                    for (w, &panel) in w.iter_mut().zip(panels) {
                        *w = weights::<L>(panel.add(pair * LINE), second);
                    }
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let x = L::splat(*input(l, u, r, stride).add(second));
                        for (acc, &w) in acc.iter_mut().zip(&w) {
                            *acc = L::fma(w, x, *acc);
                        }
                    }
                }
            }
            lower = l.wrapping_add(2);
            upper = u.wrapping_add(2);
        }
        store::<L, ROWS, PANELS>(&acc, sums);
    }
}

#[inline(always)]
unsafe fn fixed_dot<L: Lanes, const ROWS: usize, const PANELS: usize>(
    x: *const f32,
    stride: usize,
    panels: &[*const bf16; PANELS],
    pairs: usize,
    sums: &mut Sums,
) {
    // SAFETY: see `product`: every line and every pair read is below `pairs`. `upper` is only read where there are rows above
    // 2. A pair of bf16 has the size of an f32 and less alignment.
    unsafe {
        let mut acc = [[L::zero(); PANELS]; ROWS];
        let mut lower = x;
        let mut upper = x.wrapping_add(3 * stride);
        for pair in 0..pairs {
            let (l, u) = (opaque(lower), opaque(upper));
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = *input(l, u, r, stride).cast::<[bf16; 2]>();
                for (acc, &panel) in acc.iter_mut().zip(panels) {
                    *acc = L::dot(panel.add(pair * LINE), x, *acc);
                }
            }
            lower = l.wrapping_add(1);
            upper = u.wrapping_add(1);
        }
        store::<L, ROWS, PANELS>(&acc, sums);
    }
}

/// Puts the sums of a tile where they are read.
///
/// # Safety
/// The processor has the instructions of `L`, and `ROWS * PANELS` is at most 24.
#[inline(always)]
unsafe fn store<L: Lanes, const ROWS: usize, const PANELS: usize>(
    acc: &[[L::F; PANELS]; ROWS],
    sums: &mut Sums,
) {
    for (r, acc) in acc.iter().enumerate() {
        for (j, &acc) in acc.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { L::store(sums.as_mut_ptr().add((r * PANELS + j) * LANES), acc) };
        }
    }
}

/// Where row `r` is: a stride or two from one of two pointers.
///
/// # Safety
/// The row exists.
#[inline(always)]
unsafe fn input(lower: *const f32, upper: *const f32, r: usize, stride: usize) -> *const f32 {
    // SAFETY: the caller's promise.
    unsafe {
        if r < 3 {
            lower.add(r * stride)
        } else {
            upper.add((r - 3) * stride)
        }
    }
}

/// Sixteen second or first weights of a line.
///
/// # Safety
/// As for the methods of [`Lanes`].
#[inline(always)]
unsafe fn weights<L: Lanes>(line: *const bf16, second: usize) -> L::F {
    // SAFETY: the caller's promise.
    unsafe {
        if second == 1 {
            L::odd(line)
        } else {
            L::even(line)
        }
    }
}

/// The same pointer, its origin hidden from the compiler, which would otherwise keep one pointer for each row and
/// spill them.
// The block has no instruction, so it reads and writes no memory.
#[allow(clippy::pointers_in_nomem_asm_block)]
#[inline(always)]
fn opaque(pointer: *const f32) -> *const f32 {
    #[cfg(target_arch = "x86_64")]
    {
        let mut pointer = pointer;
        // SAFETY: no instruction at all.
        unsafe {
            std::arch::asm!("/* {0} */", inout(reg) pointer, options(pure, nomem, nostack, preserves_flags));
        }
        pointer
    }
    #[cfg(not(target_arch = "x86_64"))]
    pointer
}
