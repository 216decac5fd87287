//! The calibration requests that a map carries along, packed.

use experts::{ModelShape, PromptCounts, WireError, wire};

/// What a refit clusters: the requests' counts or gate values in the layers kept.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Calibration {
    /// Counts in their wire form (its bytes, not base64), of a shape with the kept layers alone.
    Counts {
        /// All records' bytes, one after another.
        bytes: Vec<u8>,
        /// Where each record ends in `bytes`.
        ends: Vec<u64>,
    },
    /// Gate values, `records x kept layers x experts`.
    Values {
        /// Cells per record.
        dimension: usize,
        /// The values.
        values: Vec<f32>,
    },
}

impl Calibration {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Counts { ends, .. } => ends.len(),
            Self::Values { dimension, values } => values.len() / (*dimension).max(1),
        }
    }

    /// Packs counts, whose shape has the kept layers alone.
    pub(crate) fn pack(records: impl Iterator<Item = PromptCounts>) -> Self {
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for record in records {
            bytes.extend_from_slice(&wire::to_bytes(&record));
            ends.push(bytes.len() as u64);
        }
        Self::Counts { bytes, ends }
    }

    /// Unpacks counts, checking each; empty for gate values.
    pub(crate) fn unpack(&self, shape: ModelShape) -> Result<Vec<PromptCounts>, WireError> {
        let Self::Counts { bytes, ends } = self else {
            return Ok(Vec::new());
        };
        let mut start = 0usize;
        ends.iter()
            .map(|&end| {
                let record = usize::try_from(end)
                    .ok()
                    .and_then(|end| bytes.get(start..end).inspect(|_| start = end))
                    .ok_or_else(|| WireError::Truncated {
                        at: "a calibration record ends beyond the data".to_owned(),
                    })?;
                let counts = wire::from_bytes(record)?;
                shape.expect(counts.shape())?;
                Ok(counts)
            })
            .collect()
    }
}
