//! Inverse document frequency: what nearly every request uses tells nothing.

use experts::{ModelShape, PromptCounts};

use crate::config::Presence;

/// `ln((N + 1) / (df[l,e] + 1))` per layer and expert, `layers x experts`; `df` is the number of the
/// `N` records that used the expert (ELDR, "signature", step 2).
pub(crate) fn idf(shape: ModelShape, records: &[&PromptCounts], presence: Presence) -> Vec<f32> {
    let mut frequency = vec![0u32; shape.cells()];
    for record in records {
        // count > floor(tokens * top_k / E) is count > tokens * top_k / E, for integers.
        let floor = match presence {
            Presence::Selected => 0,
            Presence::FairShare => {
                let selections = u64::from(record.covered_tokens()) * u64::from(shape.top_k);
                // At most the tokens, as top_k <= E.
                (selections / u64::from(shape.experts)) as u32
            }
        };
        for (df, &count) in frequency.iter_mut().zip(record.counts().as_slice()) {
            *df += u32::from(count > floor);
        }
    }
    let total = records.len() as f64 + 1.0;
    frequency
        .into_iter()
        .map(|df| (total / (f64::from(df) + 1.0)).ln() as f32)
        .collect()
}
