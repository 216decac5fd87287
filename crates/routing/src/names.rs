//! The policies' names, as the command line, JSON and metrics spell them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A name that no policy has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no {side} policy is called \"{given}\": expected one of {known}")]
pub struct UnknownPolicy {
    /// `prefill` or `decode`.
    pub side: &'static str,
    /// What was given.
    pub given: String,
    /// The names there are, comma separated.
    pub known: String,
}

macro_rules! policy_names {
    ($(#[$doc:meta])* $name:ident, $side:literal, { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)+
        }

        impl $name {
            /// Every policy, in the order of tables and help texts.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The name as it is written everywhere.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = UnknownPolicy;

            /// Reads a name; `-` may stand for `_`, and case does not matter.
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let plain = text.trim().to_ascii_lowercase().replace('-', "_");
                Self::ALL.iter().copied().find(|name| name.as_str() == plain).ok_or_else(|| UnknownPolicy {
                    side: $side,
                    given: text.to_owned(),
                    known: [$($text,)+].join(", "),
                })
            }
        }
    };
}

policy_names! {
    /// How a prefill worker is chosen.
    PrefillPolicyName, "prefill", {
        /// Consistent hash of the prompt's first bytes, bounded by load.
        PrefixHash = "prefix_hash",
        /// Each worker in turn.
        RoundRobin = "round_robin",
        /// The fewest requests in flight.
        LeastLoaded = "least_loaded",
    }
}

policy_names! {
    /// How a decode worker is chosen.
    DecodePolicyName, "decode", {
        /// Each worker in turn.
        RoundRobin = "round_robin",
        /// Any worker, by the seed.
        Random = "random",
        /// The less loaded of two drawn by the seed.
        PowerOfTwo = "power_of_two",
        /// The fewest requests in flight.
        LeastLoaded = "least_loaded",
        /// The workers that the request's domain label is assigned to.
        Domain = "domain",
        /// The least loaded of those whose batch already uses the prompt's experts.
        Locality = "locality",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn names_go_round() {
        for &name in DecodePolicyName::ALL {
            assert_eq!(name.as_str().parse::<DecodePolicyName>().unwrap(), name);
        }
        for &name in PrefillPolicyName::ALL {
            assert_eq!(name.as_str().parse::<PrefillPolicyName>().unwrap(), name);
        }
        assert_eq!(
            " Power-of-two".parse::<DecodePolicyName>().unwrap(),
            DecodePolicyName::PowerOfTwo
        );
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let message = "fastest"
            .parse::<DecodePolicyName>()
            .unwrap_err()
            .to_string();
        assert_eq!(
            message,
            "no decode policy is called \"fastest\": expected one of round_robin, random, power_of_two, least_loaded, domain, locality"
        );
    }
}
