//! Which instructions to use, decided at run time.

use std::fmt;
use std::str::FromStr;

#[cfg(target_arch = "x86_64")]
use crate::lanes::{Avx2Lanes, Avx512Lanes};
use crate::lanes::{Lanes, ScalarLanes};

/// An instruction set that this machine has.
///
/// A value exists only for what the running processor supports, so that every kernel that takes one is safe to call.
/// All sets give the same bits (see the crate documentation): choosing another one changes the speed only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Isa(Level);

/// The instruction sets that the kernels are compiled for, slowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Plain Rust for any processor: the reference.
    Scalar,
    /// AVX2 and FMA, 8 lanes.
    Avx2,
    /// AVX-512 F, BW, DQ and VL, 16 lanes.
    Avx512,
    /// The same with the dot product of AVX-512 BF16: twice as fast as fused multiply-adds on Zen 4, half as fast on
    /// Sapphire Rapids, so [`Isa::detect`] takes it on AMD's processors only.
    Avx512Bf16,
}

impl Isa {
    /// The reference, available everywhere.
    pub const SCALAR: Self = Self(Level::Scalar);

    /// The fastest set that this processor supports.
    #[must_use]
    pub fn detect() -> Self {
        Self::available()
            .into_iter()
            .rfind(|isa| isa.0 != Level::Avx512Bf16 || made_by_amd())
            .unwrap_or(Self::SCALAR)
    }

    /// The set asked for, or nothing where this processor does not have it.
    #[must_use]
    pub fn new(level: Level) -> Option<Self> {
        supported(level).then_some(Self(level))
    }

    /// All sets of this processor, slowest first; the first one is always [`Isa::SCALAR`].
    #[must_use]
    pub fn available() -> Vec<Self> {
        [Level::Scalar, Level::Avx2, Level::Avx512, Level::Avx512Bf16]
            .into_iter()
            .filter_map(Self::new)
            .collect()
    }

    /// Which one it is.
    #[must_use]
    pub fn level(self) -> Level {
        self.0
    }

    /// Runs `kernel`, compiled for this set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            // SAFETY: `ScalarLanes` needs no processor feature.
            Level::Scalar => unsafe { kernel.run::<ScalarLanes>() },
            // SAFETY: an `Isa` with this level is made by `Isa::new` only, which has found the features.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => unsafe { run_avx512(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 => unsafe { run_avx512_bf16(kernel) },
            // No such `Isa` exists on other processors; the reference is right in any case.
            // SAFETY: `ScalarLanes` needs no processor feature.
            #[cfg(not(target_arch = "x86_64"))]
            Level::Avx2 | Level::Avx512 | Level::Avx512Bf16 => unsafe {
                kernel.run::<ScalarLanes>()
            },
        }
    }
}

/// A piece of work that is compiled once for each instruction set.
///
/// `run` must be `#[inline(always)]`, as must be all that it calls and that is to use the wider instructions: only then
/// does the code end up inside the function that carries the target features.
pub(crate) trait Kernel {
    /// What it gives back.
    type Output;

    /// Does the work.
    ///
    /// # Safety
    /// The processor must support the instructions of `L`.
    unsafe fn run<L: Lanes>(self) -> Self::Output;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function's own target features are those that `Avx2Lanes` needs.
    unsafe { kernel.run::<Avx2Lanes>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function's own target features are those that `Avx512Lanes` needs.
    unsafe { kernel.run::<Avx512Lanes<false>>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn run_avx512_bf16<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function's own target features are those that `Avx512Lanes<true>` needs.
    unsafe { kernel.run::<Avx512Lanes<true>>() }
}

#[cfg(target_arch = "x86_64")]
fn made_by_amd() -> bool {
    let leaf = std::arch::x86_64::__cpuid(0);
    [leaf.ebx, leaf.edx, leaf.ecx]
        .map(u32::to_le_bytes)
        .concat()
        == b"AuthenticAMD"
}

#[cfg(not(target_arch = "x86_64"))]
fn made_by_amd() -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
fn supported(level: Level) -> bool {
    match level {
        Level::Scalar => true,
        Level::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
        Level::Avx512 => {
            supported(Level::Avx2)
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        }
        Level::Avx512Bf16 => supported(Level::Avx512) && is_x86_feature_detected!("avx512bf16"),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn supported(level: Level) -> bool {
    level == Level::Scalar
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
        })
    }
}

/// A name that is no instruction set, or one that this processor does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected an instruction set of this processor (scalar, avx2, avx512 or avx512bf16), got {0:?}"
)]
pub struct UnknownIsa(String);

impl FromStr for Isa {
    type Err = UnknownIsa;

    fn from_str(name: &str) -> Result<Self, UnknownIsa> {
        Self::available()
            .into_iter()
            .find(|isa| isa.to_string() == name)
            .ok_or_else(|| UnknownIsa(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_ones_are_refused() {
        for isa in Isa::available() {
            assert_eq!(isa.to_string().parse::<Isa>().unwrap(), isa);
        }
        assert!("avx1024".parse::<Isa>().is_err());
        assert_eq!(Isa::available()[0], Isa::SCALAR);
    }
}
