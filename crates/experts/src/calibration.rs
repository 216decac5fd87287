//! The records a locality map is fitted from, and their file.
//!
//! A calibration file is JSONL. Its first line is a [`CalibrationHeader`]:
//!
//! ```json
//! {"format":"colocate-calibration","version":1,"model":"demo","shape":{"layers":8,"experts":32,"top_k":4}}
//! ```
//!
//! and every further line a record, optional fields left out where there is nothing:
//!
//! ```json
//! {"prompt_counts":"…","output_counts":"…","gate_probabilities":"…","gate_logits":"…","domain":"law","workload":"task"}
//! ```
//!
//! Counts and values have their [wire] forms. Lines are made and read one at a time,
//! so a recorder can append as it goes.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::counts::ExpertCounts;
use crate::prompt::{PromptCounts, PromptCountsError};
use crate::shape::{ModelShape, ShapeError};
use crate::wire::{self, WireError};

const FORMAT: &str = "colocate-calibration";
const VERSION: u32 = 1;

/// What one calibration request left behind.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibrationRecord {
    /// Expert counts of the prompt's tokens: what a router knows at the handoff.
    pub prompt: PromptCounts,
    /// Expert counts of the generated tokens: what it wants to foresee (ELDR Eq. 1's `p_i`). A
    /// record without them can shape clusters but not rate a transform.
    pub decode: Option<ExpertCounts>,
    /// Gate probabilities summed over the prompt's tokens, `layers x experts`, row-major.
    pub gate_probabilities: Option<Vec<f32>>,
    /// Gate logits summed over the prompt's tokens, `layers x experts`, row-major.
    pub gate_logits: Option<Vec<f32>>,
    /// The prompt's domain, such as `law`.
    pub domain: Option<String>,
    /// The workload it belongs to, such as `task` or `language`.
    pub workload: Option<String>,
}

/// The first line of a calibration file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CalibrationHeader {
    format: String,
    version: u32,
    /// Name of the model that the counts come from.
    pub model: String,
    /// Its shape.
    pub shape: ModelShape,
}

/// A whole calibration file in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibrationFile {
    /// Model and shape.
    pub header: CalibrationHeader,
    /// The records, in file order, all of the header's shape.
    pub records: Vec<CalibrationRecord>,
}

/// What is wrong with a calibration file, and where.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// The file has no header line.
    #[error("expected a calibration header line, got an empty file")]
    Empty,
    /// A line cannot be read.
    #[error("line {line}: {source}")]
    Line {
        /// Counted from 1, the header included.
        line: usize,
        /// What is wrong with it.
        source: LineError,
    },
}

/// What is wrong with one line of a calibration file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LineError {
    /// The line is not the JSON object it should be.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// The header names another format.
    #[error("expected format {FORMAT:?}, got {0:?}")]
    Format(String),
    /// The header names a version this build does not know.
    #[error("expected version {VERSION} of the calibration format, got {0}")]
    Version(u32),
    /// A shape that is not a model's, or not the header's.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A field's text is not the wire form it should be.
    #[error("{field}: {source}")]
    Field {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        source: WireError,
    },
    /// Decode counts that no run of tokens can have left.
    #[error("output_counts: {0}")]
    Counts(#[from] PromptCountsError),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt_counts: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    output_counts: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gate_probabilities: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gate_logits: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    domain: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    workload: Option<String>,
}

impl CalibrationHeader {
    /// The header of this build's format.
    #[must_use]
    pub fn new(model: impl Into<String>, shape: ModelShape) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            model: model.into(),
            shape,
        }
    }

    /// One line of JSON, without a line break.
    ///
    /// # Errors
    /// None in practice: the header is plain data.
    pub fn to_line(&self) -> Result<String, LineError> {
        Ok(serde_json::to_string(self)?)
    }

    /// Reads a header line.
    ///
    /// # Errors
    /// Not JSON, another format, a newer version, an impossible shape.
    pub fn from_line(line: &str) -> Result<Self, LineError> {
        let header: Self = serde_json::from_str(line)?;
        if header.format != FORMAT {
            return Err(LineError::Format(header.format));
        }
        if header.version != VERSION {
            return Err(LineError::Version(header.version));
        }
        header.shape.check()?;
        Ok(header)
    }
}

impl CalibrationRecord {
    /// A record of counts alone.
    #[must_use]
    pub fn new(prompt: PromptCounts, decode: Option<ExpertCounts>) -> Self {
        Self {
            prompt,
            decode,
            gate_probabilities: None,
            gate_logits: None,
            domain: None,
            workload: None,
        }
    }

    /// The model this record belongs to.
    #[must_use]
    pub fn shape(&self) -> ModelShape {
        self.prompt.shape()
    }

    /// One line of JSON, without a line break.
    ///
    /// # Errors
    /// [`LineError::Counts`] when the decode counts are not those of whole tokens.
    pub fn to_line(&self) -> Result<String, LineError> {
        let output = match &self.decode {
            Some(counts) => Some(PromptCounts::complete(counts.clone())?.encode()),
            None => None,
        };
        Ok(serde_json::to_string(&Line {
            prompt_counts: self.prompt.encode(),
            output_counts: output,
            gate_probabilities: self.gate_probabilities.as_deref().map(wire::encode_values),
            gate_logits: self.gate_logits.as_deref().map(wire::encode_values),
            domain: self.domain.clone(),
            workload: self.workload.clone(),
        })?)
    }

    /// Reads a record line of a model of `shape`.
    ///
    /// # Errors
    /// Not JSON, a field that is not its wire form, another shape.
    pub fn from_line(line: &str, shape: ModelShape) -> Result<Self, LineError> {
        let line: Line = serde_json::from_str(line)?;
        let counts = |field: &'static str, text: &str| {
            let counts = wire::decode(text).map_err(|source| LineError::Field { field, source })?;
            shape
                .expect(counts.shape())
                .map_err(|shape| LineError::Field {
                    field,
                    source: shape.into(),
                })?;
            Ok::<_, LineError>(counts)
        };
        let values = |field: &'static str, text: Option<String>| {
            text.map(|text| wire::decode_values(&text, shape))
                .transpose()
                .map_err(|source| LineError::Field { field, source })
        };
        Ok(Self {
            prompt: counts("prompt_counts", &line.prompt_counts)?,
            decode: line
                .output_counts
                .map(|text| counts("output_counts", &text))
                .transpose()?
                .map(PromptCounts::into_counts),
            gate_probabilities: values("gate_probabilities", line.gate_probabilities)?,
            gate_logits: values("gate_logits", line.gate_logits)?,
            domain: line.domain,
            workload: line.workload,
        })
    }
}

impl CalibrationFile {
    /// Reads a whole file; empty lines are skipped.
    ///
    /// # Errors
    /// The first line that cannot be read, with its number.
    pub fn parse(text: &str) -> Result<Self, CalibrationError> {
        let mut lines = text
            .lines()
            .enumerate()
            .map(|(index, line)| (index + 1, line.trim()))
            .filter(|(_, line)| !line.is_empty());
        let at = |line: usize| move |source: LineError| CalibrationError::Line { line, source };
        let (number, first) = lines.next().ok_or(CalibrationError::Empty)?;
        let header = CalibrationHeader::from_line(first).map_err(at(number))?;
        let records = lines
            .map(|(number, line)| {
                CalibrationRecord::from_line(line, header.shape).map_err(at(number))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { header, records })
    }

    /// The file's text.
    ///
    /// # Errors
    /// A record whose counts cannot be written, see [`CalibrationRecord::to_line`].
    pub fn to_jsonl(&self) -> Result<String, CalibrationError> {
        let at = |line: usize| move |source: LineError| CalibrationError::Line { line, source };
        let mut text = self.header.to_line().map_err(at(1))?;
        text.push('\n');
        for (index, record) in self.records.iter().enumerate() {
            record
                .shape()
                .expect(self.header.shape)
                .map_err(|shape| at(index + 2)(shape.into()))?;
            text.push_str(&record.to_line().map_err(at(index + 2))?);
            text.push('\n');
        }
        Ok(text)
    }
}
