//! Causal attention over the paged cache.

use std::cell::RefCell;

use half::bf16;

use crate::error::{ShapeError, expect_len};
use crate::exp::exp;
use crate::isa::{Isa, Kernel};
use crate::kv::KvLayout;
use crate::lanes::{LANES, Lanes};
use crate::reduce;
use crate::round::round_bf16;
use crate::tile::{self, MAX_ROWS, Sums, TILE};

/// Tokens of one split of the context. Splits begin at multiples of it, counted from the sequence's first token.
pub const SPLIT: usize = 64;
const GROUPS: usize = SPLIT / LANES;

/// What attention does for the new tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// How the cache's blocks are laid out.
    pub layout: KvLayout,
    /// Query heads, a multiple of the key and value heads; head `h` reads key and value head `h / (heads / kv_heads)`.
    pub heads: usize,
    /// What scores are multiplied with, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// One layer's cache, `[blocks][layout.block_elements()]`. The new tokens' own keys and values are already in it.
    pub cache: &'a [bf16],
    /// The sequence's blocks in order; as many as its tokens need.
    pub table: &'a [u32],
    /// The position of the first new token.
    pub first_position: usize,
}

impl Attention<'_> {
    /// Attention for consecutive new tokens: queries `[rows, heads, head_dim]` in bf16, `out` alike. Row `r` sits at position
    /// `first_position + r` and sees that position and all before it.
    ///
    /// One decode token is a chunk of one row. A row's bits depend on its query and on the cached keys and values up to its
    /// position, and on nothing else: not on the chunking, not on where the prefix came from, not on the blocks' numbers, not
    /// on the instruction set. For each split of 64 positions, in order: scores `q . k * scale` (summed as
    /// [`matmul`](crate::matmul) sums), their maximum, `p = e^(score - m)` for the running maximum `m`, the sum of `p` in
    /// sixteen lanes; running sum and output are first multiplied by `e^(m_before - m)`; then `p v` is added token by token.
    ///
    /// # Errors
    /// A length does not fit, `table` is too short or names a block that is not in `cache`, or `heads` is not a multiple
    /// of the key and value heads.
    pub fn run(&self, isa: Isa, queries: &[bf16], out: &mut [bf16]) -> Result<(), ShapeError> {
        let operation = "attention";
        let layout = &self.layout;
        if self.heads == 0 || !self.heads.is_multiple_of(layout.kv_heads()) {
            return Err(ShapeError::Unsupported {
                operation,
                what: "heads",
                rule: "a multiple of kv_heads and not 0",
                got: self.heads,
            });
        }
        let width = self.heads * layout.head_dim();
        let rows = queries.len() / width;
        expect_len(operation, "queries", rows * width, queries.len())?;
        expect_len(operation, "out", queries.len(), out.len())?;
        if rows == 0 {
            return Ok(());
        }
        let blocks = (self.first_position + rows).div_ceil(layout.block_size());
        if self.table.len() < blocks {
            return Err(ShapeError::Length {
                operation,
                what: "block table",
                expected: blocks,
                got: self.table.len(),
            });
        }
        let limit = self.cache.len() / layout.block_elements();
        if let Some(&block) = self.table[..blocks]
            .iter()
            .find(|&&block| block as usize >= limit)
        {
            return Err(ShapeError::Index {
                operation,
                what: "block",
                index: block as usize,
                limit,
            });
        }
        isa.run(Run {
            attention: self,
            queries,
            out,
            rows,
        });
        Ok(())
    }
}

/// Buffers of one tile of up to six queries.
#[derive(Default)]
struct Scratch {
    /// Queries as f32, `[6, head_dim]`.
    queries: Vec<f32>,
    /// Outputs, `[6, value_width]`.
    out: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { queries: Vec::new(), out: Vec::new() }) };
}

struct Run<'a> {
    attention: &'a Attention<'a>,
    queries: &'a [bf16],
    out: &'a mut [bf16],
    rows: usize,
}

impl Kernel for Run<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // The buffers leave their cell while they are in use, so that no borrow can ever be found taken.
        let mut scratch = SCRATCH.take();
        // SAFETY: the caller's promise.
        unsafe { self.heads::<L>(&mut scratch) };
        SCRATCH.set(scratch);
    }
}

/// A query of a tile: where it is and what it has summed so far.
#[derive(Clone, Copy, Default)]
struct Query {
    /// Its first element in the queries and in the output.
    start: usize,
    position: usize,
    max: f32,
    sum: f32,
}

impl Run<'_> {
    #[inline(always)]
    unsafe fn heads<L: Lanes>(self, scratch: &mut Scratch) {
        let Self {
            attention,
            queries,
            out,
            rows,
        } = self;
        let layout = &attention.layout;
        let dim = layout.head_dim();
        let group = attention.heads / layout.kv_heads();
        scratch.queries.resize(MAX_ROWS * dim, 0.0);
        scratch.out.resize(MAX_ROWS * layout.value_width(), 0.0);
        // A tile is whole rows where the heads of a row fit, so that queries of one position stay together.
        let tile = if group <= MAX_ROWS {
            MAX_ROWS / group * group
        } else {
            MAX_ROWS
        };
        for head in 0..layout.kv_heads() {
            let mut first = 0;
            while first < rows * group {
                let count = tile.min(rows * group - first);
                let mut tile = [Query::default(); MAX_ROWS];
                for (i, query) in tile[..count].iter_mut().enumerate() {
                    let row = (first + i) / group;
                    let start = (row * attention.heads + head * group + (first + i) % group) * dim;
                    *query = Query {
                        start,
                        position: attention.first_position + row,
                        max: f32::NEG_INFINITY,
                        sum: 0.0,
                    };
                    let wide = &mut scratch.queries[i * dim..][..dim];
                    for (to, from) in wide.iter_mut().zip(&queries[start..][..dim]) {
                        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
                    }
                }
                // SAFETY: the caller's promise; `run` has checked table and cache up to the last position.
                unsafe { attend::<L>(attention, head, &mut tile[..count], scratch) };
                for (i, query) in tile[..count].iter().enumerate() {
                    let sums = &scratch.out[i * layout.value_width()..][..dim];
                    for (to, &sum) in out[query.start..][..dim].iter_mut().zip(sums) {
                        *to = round_bf16(sum / query.sum);
                    }
                }
                first += count;
            }
        }
    }
}

/// Runs up to six queries of one key and value head over all splits; their sums are left in `scratch.out`.
///
/// # Safety
/// The processor has `L`; the table covers the last query's position and names blocks within the cache.
#[inline(always)]
unsafe fn attend<L: Lanes>(
    attention: &Attention<'_>,
    head: usize,
    tile: &mut [Query],
    scratch: &mut Scratch,
) {
    let layout = &attention.layout;
    let (dim, width) = (layout.head_dim(), layout.value_width());
    let last = tile.iter().map(|query| query.position).max().unwrap_or(0);
    let block = |position: usize| {
        let block = attention.table[position / layout.block_size()] as usize;
        let elements = layout.block_elements();
        &attention.cache[block * elements..][..elements]
    };
    scratch.out[..tile.len() * width].fill(0.0);
    let mut scores = [0.0; TILE];
    for split in 0..=last / SPLIT {
        let start = split * SPLIT;
        // A group beyond the last position may have no block: any other stands in, and its scores are masked.
        let group_start = |g: usize| {
            let position = start + g * LANES;
            if position <= last { position } else { start }
        };
        let keys: [*const bf16; GROUPS] = std::array::from_fn(|g| {
            let position = group_start(g);
            let from = layout.key_group(head, position % layout.block_size() / LANES);
            block(position)[from..][..dim * LANES].as_ptr()
        });
        let values: [*const bf16; GROUPS] = std::array::from_fn(|g| {
            let position = group_start(g);
            let from = layout.value(head, position % layout.block_size());
            block(position)[from..][..width * LANES].as_ptr()
        });
        // SAFETY: `queries` holds six rows of `dim`; each key group was sliced to `dim / 2` lines of 32; a tile has one to six rows.
        unsafe {
            score::<L>(
                scratch.queries.as_ptr(),
                tile.len(),
                &keys,
                dim,
                &mut scores,
            )
        };
        let mut seen = [0; MAX_ROWS];
        for ((i, query), scores) in tile
            .iter_mut()
            .enumerate()
            .zip(scores.chunks_exact_mut(SPLIT))
        {
            seen[i] = (query.position + 1).saturating_sub(start).min(SPLIT);
            if seen[i] == 0 {
                continue;
            }
            let scores: &mut [f32; SPLIT] = match scores.try_into() {
                Ok(scores) => scores,
                Err(_) => unreachable!("chunks of {SPLIT}"),
            };
            for (t, score) in scores.iter_mut().enumerate() {
                let scaled = *score * attention.scale;
                *score = if t < seen[i] {
                    scaled
                } else {
                    f32::NEG_INFINITY
                };
            }
            let before = query.max;
            // SAFETY: the caller's promise.
            let split_max = unsafe { reduce::max::<L>(scores) };
            query.max = if split_max > before {
                split_max
            } else {
                before
            };
            let max = query.max;
            for score in scores.iter_mut() {
                *score = exp(*score - max);
            }
            let fade = exp(before - max);
            // SAFETY: the caller's promise.
            query.sum = query.sum.mul_add(fade, unsafe { reduce::sum::<L>(scores) });
            for out in &mut scratch.out[i * width..][..width] {
                *out *= fade;
            }
        }
        // Queries that see equally many tokens go together; one that sees fewer must not even multiply the others with 0,
        // for they may be infinite.
        let mut from = 0;
        while from < tile.len() {
            let mut to = from + 1;
            while to < tile.len() && seen[to] == seen[from] {
                to += 1;
            }
            // SAFETY: rows `from..to` of scores are 64 wide, of `out` `width` wide; each value group was sliced to sixteen
            // tokens of `width`; groups up to the `seen[from]`-th token are the true ones.
            unsafe {
                add_values::<L>(
                    scores.as_ptr().add(from * SPLIT),
                    to - from,
                    &values,
                    seen[from],
                    width,
                    scratch.out.as_mut_ptr().add(from * width),
                );
            }
            from = to;
        }
    }
}

/// Products of the tile's queries with the keys of one split, `[rows][64]`.
///
/// # Safety
/// The processor has `L`; `queries` points to `rows` rows of `dim`, `rows` is 1 to 6; each of `keys` to `dim / 2` lines of 32.
#[inline(always)]
unsafe fn score<L: Lanes>(
    queries: *const f32,
    rows: usize,
    keys: &[*const bf16; GROUPS],
    dim: usize,
    scores: &mut Sums,
) {
    let mut part = [0.0; TILE];
    let mut first = 0;
    while first < GROUPS {
        let groups = tile::panels_for::<L>(rows, GROUPS - first);
        let to: &mut Sums = if groups == GROUPS { scores } else { &mut part };
        let keys = &keys[first..first + groups];
        // SAFETY: the caller's promise.
        unsafe { tile::product::<L, false>(queries, dim, rows, keys, dim / 2, to) };
        if groups < GROUPS {
            for (to, from) in scores
                .chunks_exact_mut(SPLIT)
                .zip(part.chunks_exact(groups * LANES))
                .take(rows)
            {
                to[first * LANES..][..groups * LANES].copy_from_slice(from);
            }
        }
        first += groups;
    }
}

/// Adds `p v` of `tokens` tokens, token by token, to `rows` rows of `out`.
///
/// # Safety
/// The processor has `L`; `p` points to `rows` rows of 64; `values` to sixteen tokens of `width` each (those below
/// `tokens`); `out` to `rows` rows of `width`, a multiple of 16; `rows` is at most 6.
#[inline(always)]
unsafe fn add_values<L: Lanes>(
    p: *const f32,
    rows: usize,
    values: &[*const bf16; GROUPS],
    tokens: usize,
    width: usize,
    out: *mut f32,
) {
    let mut column = 0;
    while column < width {
        // Two vectors of sums a row where the registers hold them.
        let wide = width - column >= 2 * LANES && L::PANELS_OF_MANY_ROWS > 1;
        macro_rules! select {
            ($($rows:literal),*) => {
                match (rows, wide) {
                    $(
                        // SAFETY: the caller's promise; `column` plus one or two vectors is at most `width`.
                        ($rows, true) => unsafe { add_fixed::<L, $rows, 2>(p, values, tokens, width, column, out) },
                        // SAFETY: as above.
                        ($rows, false) => unsafe { add_fixed::<L, $rows, 1>(p, values, tokens, width, column, out) },
                    )*
                    _ => unreachable!("a tile of {rows} rows"),
                }
            };
        }
        select!(1, 2, 3, 4, 5, 6);
        column += if wide { 2 * LANES } else { LANES };
    }
}

#[inline(always)]
unsafe fn add_fixed<L: Lanes, const ROWS: usize, const VECTORS: usize>(
    p: *const f32,
    values: &[*const bf16; GROUPS],
    tokens: usize,
    width: usize,
    column: usize,
    out: *mut f32,
) {
    // SAFETY: see `add_values`.
    unsafe {
        // Loops, not `array::from_fn`: its closure is not always inlined into the function with the target features.
        let mut acc = [[L::zero(); VECTORS]; ROWS];
        for (r, acc) in acc.iter_mut().enumerate() {
            for (j, acc) in acc.iter_mut().enumerate() {
                *acc = L::load(out.add(r * width + column + j * LANES));
            }
        }
        for (g, &values) in values.iter().enumerate() {
            let first = g * LANES;
            for t in 0..tokens.saturating_sub(first).min(LANES) {
                let mut v = [L::zero(); VECTORS];
                for (j, v) in v.iter_mut().enumerate() {
                    *v = L::widen(values.add(t * width + column + j * LANES));
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let p = L::splat(*p.add(r * SPLIT + first + t));
                    for (acc, &v) in acc.iter_mut().zip(&v) {
                        *acc = L::fma(v, p, *acc);
                    }
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (j, &acc) in acc.iter().enumerate() {
                L::store(out.add(r * width + column + j * LANES), acc);
            }
        }
    }
}
