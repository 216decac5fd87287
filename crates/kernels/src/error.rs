//! What a kernel says when the shapes do not fit.

/// A kernel was called with data whose shape does not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// A slice has another length than the operation needs.
    #[error("{operation}: expected {expected} elements of {what}, got {got}")]
    Length {
        /// The operation that refused.
        operation: &'static str,
        /// The argument that is wrong.
        what: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// An index points outside of its table.
    #[error("{operation}: {what} {index} is out of range, expected less than {limit}")]
    Index {
        /// The operation that refused.
        operation: &'static str,
        /// What the index selects.
        what: &'static str,
        /// The index given.
        index: usize,
        /// The first index that does not exist.
        limit: usize,
    },
    /// A size that this crate does not support.
    #[error("{operation}: {what} must be {rule}, got {got}")]
    Unsupported {
        /// The operation that refused.
        operation: &'static str,
        /// The size that is wrong.
        what: &'static str,
        /// What it has to be.
        rule: &'static str,
        /// The size given.
        got: usize,
    },
}

/// Checks a slice's length.
pub(crate) fn expect_len(
    operation: &'static str,
    what: &'static str,
    expected: usize,
    got: usize,
) -> Result<(), ShapeError> {
    if expected == got {
        Ok(())
    } else {
        Err(ShapeError::Length {
            operation,
            what,
            expected,
            got,
        })
    }
}
