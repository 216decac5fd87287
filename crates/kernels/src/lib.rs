//! CPU kernels of the embedded engine: bf16 matrix products, RMSNorm, RoPE, attention over a paged cache, top-k.
//!
//! # The problem
//!
//! Decoding a token multiplies one row with every weight that the token meets, so a decode step is a race through memory: its
//! time follows the bytes of the distinct experts that its batch selects, hardly the number of rows. The
//! kernels must therefore read each weight once for all rows of a batch, in the order in which it lies in memory
//! ([`PackedMatrix`]), and still come near the processor's peak when a prompt brings hundreds of rows.
//!
//! # The invariant
//!
//! **A row's result is the same bits in any company.** It depends on the row and the weights, not on the number of rows,
//! the row's place, the chunking of a prompt, the block numbers of the cache, or zeros that pad a matrix. Otherwise a
//! router could change a model's output by choosing another worker, and "outputs identical" could not be checked.
//! It holds because every sum has one order, fixed by what is summed: over k for a product ([`matmul`]), over sixteen lanes
//! and halves for norms and softmax, over splits at fixed positions for [`Attention`].
//!
//! **The same bits on every instruction set**, too. Sixteen outputs are sixteen lanes and each lane adds with fused
//! multiply-adds in the order of k; exponentials are one polynomial of such steps; square roots and quotients are IEEE's. So
//! [`Isa::SCALAR`] is the reference that the vector paths must equal exactly, and the bound between them is zero
//! (NaN payloads aside).
//!
//! Matrix inputs are bf16 (weights, activations, cached keys and values, queries), sums are f32, and attention
//! probabilities stay f32. A value is rounded to bf16 once, where the next product reads it.
//!
//! # Example
//!
//! ```
//! use half::bf16;
//! use kernels::{Isa, PackedMatrix, Rows, RowsMut, matmul};
//!
//! let isa = Isa::detect();
//! let weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0].map(bf16::from_f32); // [3, 2]
//! let w = PackedMatrix::pack(&weights, 3, 2)?;
//! let x = [1.0, 10.0].map(bf16::from_f32); // [1, 2]
//! let mut out = [0.0; 3];
//! matmul(isa, Rows::dense(&x, 2), &w, RowsMut::dense(&mut out, 3))?;
//! assert_eq!(out, [21.0, 43.0, 65.0]);
//! # Ok::<(), kernels::ShapeError>(())
//! ```

// The one crate of the workspace (beside the checkpoint's memory map) that needs it: vector instructions and raw
// pointers to panels. Everything public is safe and checks its shapes.
#![allow(unsafe_code)]
#![deny(unsafe_op_in_unsafe_fn)]
// Hot paths are compiled once for each instruction set by inlining them into a function with the target features.
#![allow(clippy::inline_always)]

mod attention;
mod error;
mod exp;
mod isa;
mod kv;
mod lanes;
mod matmul;
mod norm;
mod packed;
mod reduce;
mod residual;
mod rope;
mod round;
mod rows;
mod silu;
mod storage;
mod tile;
mod top_k;

pub mod bandwidth;

pub use attention::{Attention, SPLIT};
pub use error::ShapeError;
pub use isa::{Isa, Level, UnknownIsa};
pub use kv::KvLayout;
pub use matmul::{matmul, matmul_silu_mul};
pub use norm::{rms_norm, rms_norm_f32};
pub use packed::{PackedGateUp, PackedMatrix};
pub use residual::{add, combine};
pub use rope::{RopeTable, head_norm_rope, rope};
pub use round::{round_bf16, to_bf16, to_f32};
pub use rows::{Rows, RowsMut};
pub use silu::silu_mul;
pub use storage::AlignedBuf;
pub use top_k::{Renormalise, argmax, softmax, softmax_top_k};
