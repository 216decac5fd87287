//! Which prompts are sent, in which order, and how long the answers are.

use std::collections::BTreeMap;

use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

use crate::{Prompt, Workload};

/// Which prompts of a file take part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mix {
    /// Those of one workload.
    Only(Workload),
    /// All of them, also those that name no workload.
    Mixed,
}

impl Mix {
    fn takes(self, prompt: &Prompt) -> bool {
        match self {
            Self::Only(workload) => prompt.workload == Some(workload),
            Self::Mixed => true,
        }
    }
}

/// Why no sequence could be drawn.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SequenceError {
    /// The file holds nothing of the workload asked for.
    #[error("expected prompts of the {workload} workload, got none among {prompts} prompts")]
    NothingToTake {
        /// The workload asked for.
        workload: Workload,
        /// How many prompts there were.
        prompts: usize,
    },
    /// There are no prompts.
    #[error("expected at least one prompt, got none")]
    NoPrompts,
}

/// Draws `count` indices into `prompts`: every domain has the same share (within one), no prompt comes twice before
/// its domain has been used up, and the order is shuffled. The same seed gives the same sequence.
///
/// Prompts without a domain count as one domain together.
///
/// # Errors
/// When no prompt belongs to the mix.
pub fn sequence(
    prompts: &[Prompt],
    mix: Mix,
    count: usize,
    seed: u64,
) -> Result<Vec<usize>, SequenceError> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut domains: BTreeMap<Option<&str>, Vec<usize>> = BTreeMap::new();
    for (index, prompt) in prompts.iter().enumerate() {
        if mix.takes(prompt) {
            domains
                .entry(prompt.domain.as_deref())
                .or_default()
                .push(index);
        }
    }
    if domains.is_empty() {
        return Err(match mix {
            Mix::Only(workload) if !prompts.is_empty() => SequenceError::NothingToTake {
                workload,
                prompts: prompts.len(),
            },
            _ => SequenceError::NoPrompts,
        });
    }
    let mut domains: Vec<Vec<usize>> = domains.into_values().collect();
    for members in &mut domains {
        members.shuffle(&mut rng);
    }
    // Which domains get the odd ones out is drawn too; else a short sequence would always favour the same.
    domains.shuffle(&mut rng);
    let mut drawn: Vec<usize> = (0..count)
        .map(|position| {
            let members = &domains[position % domains.len()];
            members[(position / domains.len()) % members.len()]
        })
        .collect();
    drawn.shuffle(&mut rng);
    Ok(drawn)
}

/// Draws `count` answer lengths in tokens, uniform in `[ceil(max / 2), max]`, at least 1.
///
/// Answers of one length would keep a closed loop in step with itself: all requests of a wave would end together. The lengths are
/// a function of the seed, so every policy is asked for the same.
#[must_use]
pub fn output_lengths(count: usize, max: u32, seed: u64) -> Vec<u32> {
    let max = max.max(1);
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x6c65_6e67_7468_7321);
    (0..count)
        .map(|_| rng.random_range(max.div_ceil(2)..=max))
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn prompts(sizes: &[usize]) -> Vec<Prompt> {
        let mut all = Vec::new();
        for (domain, &size) in sizes.iter().enumerate() {
            for index in 0..size {
                all.push(Prompt {
                    prompt: format!("{domain} {index}"),
                    domain: Some(format!("d{domain}")),
                    workload: Some(if domain % 2 == 0 {
                        Workload::Task
                    } else {
                        Workload::Language
                    }),
                });
            }
        }
        all
    }

    proptest! {
        #[test]
        fn balanced_complete_and_deterministic(
            sizes in prop::collection::vec(1usize..20, 1..6), count in 0usize..100, seed: u64,
        ) {
            let all = prompts(&sizes);
            let drawn = sequence(&all, Mix::Mixed, count, seed).unwrap();
            prop_assert_eq!(drawn.len(), count);
            prop_assert_eq!(&drawn, &sequence(&all, Mix::Mixed, count, seed).unwrap());
            let mut by_domain = vec![0usize; sizes.len()];
            let mut by_prompt = vec![0usize; all.len()];
            for &index in &drawn {
                let domain = all[index].domain.as_deref().unwrap()[1..].parse::<usize>().unwrap();
                by_domain[domain] += 1;
                by_prompt[index] += 1;
            }
            let spread = by_domain.iter().max().unwrap() - by_domain.iter().min().unwrap();
            prop_assert!(spread <= 1, "{:?}", by_domain);
            for (index, &times) in by_prompt.iter().enumerate() {
                let domain = all[index].domain.as_deref().unwrap()[1..].parse::<usize>().unwrap();
                prop_assert!(times <= by_domain[domain].div_ceil(sizes[domain]));
            }
        }

        #[test]
        fn lengths_stay_in_range(count in 0usize..50, max in 0u32..300, seed: u64) {
            let lengths = output_lengths(count, max, seed);
            prop_assert_eq!(lengths.len(), count);
            for length in lengths {
                prop_assert!(length >= 1 && length <= max.max(1) && length >= max / 2);
            }
        }
    }

    #[test]
    fn a_mix_takes_its_workload_only() {
        let all = prompts(&[5, 5, 5]);
        for index in sequence(&all, Mix::Only(Workload::Language), 12, 1).unwrap() {
            assert_eq!(all[index].domain.as_deref(), Some("d1"));
        }
        assert_eq!(
            sequence(&all[..5], Mix::Only(Workload::Language), 3, 1),
            Err(SequenceError::NothingToTake {
                workload: Workload::Language,
                prompts: 5
            })
        );
        assert_eq!(
            sequence(&[], Mix::Mixed, 3, 1),
            Err(SequenceError::NoPrompts)
        );
    }

    #[test]
    fn another_seed_gives_another_order() {
        let all = prompts(&[20, 20]);
        assert_ne!(
            sequence(&all, Mix::Mixed, 40, 1).unwrap(),
            sequence(&all, Mix::Mixed, 40, 2).unwrap()
        );
    }
}
