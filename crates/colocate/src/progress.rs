//! Progress on standard error, and only when that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Shows what a command is doing, step by step. Silent when standard error is no terminal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress;

impl Progress {
    /// A step whose length is not known.
    pub(crate) fn step(self, what: impl Into<String>) -> Step {
        let bar = ProgressBar::new_spinner().with_style(style("{spinner} {msg} {elapsed}"));
        bar.set_message(what.into());
        bar.enable_steady_tick(Duration::from_millis(120));
        Step(bar)
    }

    /// A step of `length` pieces.
    pub(crate) fn bar(self, what: impl Into<String>, length: usize) -> Step {
        let bar = ProgressBar::new(length as u64)
            .with_style(style("{msg:32} {bar:40} {pos}/{len} {elapsed}"));
        bar.set_message(what.into());
        bar.enable_steady_tick(Duration::from_millis(250));
        Step(bar)
    }
}

/// A step that is being shown; gone when it is dropped.
#[derive(Debug)]
pub(crate) struct Step(ProgressBar);

impl Step {
    /// One piece is done.
    pub(crate) fn advance(&self) {
        self.0.inc(1);
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
