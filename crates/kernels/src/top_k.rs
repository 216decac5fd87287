//! The router's choice.

use crate::error::{ShapeError, expect_len};
use crate::exp::exp;
use crate::isa::{Isa, Kernel};
use crate::lanes::Lanes;
use crate::reduce;

/// What a router does with the probabilities of the experts that it has chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renormalise {
    /// They are divided by their sum (`norm_topk_prob: true`).
    Yes,
    /// They stay as the softmax gave them.
    No,
}

/// Softmax over one token's `logits`, then the `ids.len()` most probable experts in descending order; of equal ones
/// the lower index comes first.
///
/// `probabilities`, as long as `logits`, receives the whole softmax. NaN counts as less than everything.
///
/// # Errors
/// `weights` and `ids`, or `probabilities` and `logits`, differ in length, there are fewer experts than `ids`, or more than 65,536.
pub fn softmax_top_k(
    isa: Isa,
    logits: &[f32],
    renormalise: Renormalise,
    probabilities: &mut [f32],
    ids: &mut [u16],
    weights: &mut [f32],
) -> Result<(), ShapeError> {
    let operation = "softmax_top_k";
    expect_len(operation, "weights", ids.len(), weights.len())?;
    expect_len(
        operation,
        "probabilities",
        logits.len(),
        probabilities.len(),
    )?;
    if ids.len() > logits.len() || logits.len() > 1 << 16 {
        return Err(ShapeError::Unsupported {
            operation,
            what: "number of experts",
            rule: "at least top_k and at most 65536",
            got: logits.len(),
        });
    }
    softmax(isa, logits, probabilities)?;
    let mut chosen = 0;
    for (i, &p) in probabilities.iter().enumerate() {
        let p = if p.is_nan() { -1.0 } else { p };
        if chosen == ids.len() && chosen.checked_sub(1).is_none_or(|last| p <= weights[last]) {
            continue;
        }
        let mut at = chosen.min(ids.len() - 1);
        while at > 0 && weights[at - 1] < p {
            weights[at] = weights[at - 1];
            ids[at] = ids[at - 1];
            at -= 1;
        }
        weights[at] = p;
        ids[at] = i as u16;
        chosen = (chosen + 1).min(ids.len());
    }
    for (weight, &id) in weights.iter_mut().zip(&*ids) {
        *weight = probabilities[usize::from(id)];
    }
    if renormalise == Renormalise::Yes {
        let sum: f32 = weights.iter().sum();
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    Ok(())
}

/// `out = e^(x - max(x)) / sum`.
///
/// # Errors
/// The slices differ in length.
pub fn softmax(isa: Isa, x: &[f32], out: &mut [f32]) -> Result<(), ShapeError> {
    expect_len("softmax", "out", x.len(), out.len())?;
    isa.run(Softmax { x, out });
    Ok(())
}

struct Softmax<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: the caller's promise.
        let max = unsafe { reduce::max::<L>(self.x) };
        for (out, &x) in self.out.iter_mut().zip(self.x) {
            *out = exp(x - max);
        }
        // SAFETY: the caller's promise.
        let sum = unsafe { reduce::sum::<L>(self.out) };
        for out in self.out.iter_mut() {
            *out /= sum;
        }
    }
}

/// The index of the largest element, the lowest of equal ones; nothing where all are NaN or there is none.
#[must_use]
pub fn argmax(isa: Isa, x: &[f32]) -> Option<usize> {
    let max = isa.run(Max { x });
    x.iter().position(|&x| x == max)
}

struct Max<'a> {
    x: &'a [f32],
}

impl Kernel for Max<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { reduce::max::<L>(self.x) }
    }
}
