//! The six ways to turn what a prompt used into numbers worth comparing.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How a cell of a signature comes from a prompt's counts or gate values (ELDR, arXiv 2607.00466,
/// "signature"). Each is followed by L2 normalisation, so constant factors do not matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transform {
    /// `c[l,e] * ln((N + 1) / (df[l,e] + 1))`: the paper's best.
    CountIdf,
    /// `c[l,e]`.
    Count,
    /// `sqrt(c[l,e])`.
    SqrtCount,
    /// Gate probabilities (softmax over experts) summed over the prompt's tokens.
    GateProbability,
    /// Gate logits summed over the prompt's tokens.
    GateLogit,
    /// 1 where `c[l,e] > 0`, else 0.
    Binary,
}

/// A name that is no transform's.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "expected one of count_idf, count, sqrt_count, gate_probability, gate_logit, binary, got {0:?}"
)]
pub struct UnknownTransform(String);

impl Transform {
    /// All six, in the order in which they are reported and in which ties are broken.
    pub const ALL: [Self; 6] = [
        Self::CountIdf,
        Self::Count,
        Self::SqrtCount,
        Self::GateProbability,
        Self::GateLogit,
        Self::Binary,
    ];

    /// The name used on the command line and in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CountIdf => "count_idf",
            Self::Count => "count",
            Self::SqrtCount => "sqrt_count",
            Self::GateProbability => "gate_probability",
            Self::GateLogit => "gate_logit",
            Self::Binary => "binary",
        }
    }

    /// True when expert counts alone suffice. Only these can be chosen automatically: gate values
    /// do not travel with a handoff.
    #[must_use]
    pub fn needs_counts_only(self) -> bool {
        !matches!(self, Self::GateProbability | Self::GateLogit)
    }
}

impl fmt::Display for Transform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Transform {
    type Err = UnknownTransform;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|transform| transform.name() == name)
            .ok_or_else(|| UnknownTransform(name.to_owned()))
    }
}
