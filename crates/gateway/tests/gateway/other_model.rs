//! A locality map that was fitted for another model than the one that is served.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};

use experts::{
    CalibrationFile, CalibrationHeader, CalibrationRecord, ExpertCounts, ModelShape, PromptCounts,
};
use gateway::DecodePolicyName;
use locality::{FitConfig, LocalityMap, MaskChoice, Transform};
use protocol::handoff::Extras;
use serde_json::json;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::harness::{Gateway, config};
use crate::peer::Peer;

/// The warnings of this thread.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{field}={value:?} ").unwrap();
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Eight tokens that all chose the same two experts, from `first` on.
pub(crate) fn counts(shape: ModelShape, first: u16) -> PromptCounts {
    let mut counts = ExpertCounts::zeros(shape);
    for layer in 0..shape.layers as usize {
        for _ in 0..8 {
            counts.record(layer, &[first, first + 1]).unwrap();
        }
    }
    PromptCounts::complete(counts).unwrap()
}

fn map(shape: ModelShape) -> LocalityMap {
    let records = (0..8).map(|record| CalibrationRecord::new(counts(shape, record % 4 * 2), None));
    let calibration = CalibrationFile {
        header: CalibrationHeader::new("synthetic", shape),
        records: records.collect(),
    };
    let config = FitConfig {
        clusters: 2,
        transform: Some(Transform::Count),
        mask: MaskChoice::All,
        ..FitConfig::default()
    };
    locality::fit(&calibration, &config, &mut |_| {}).unwrap().0
}

#[tokio::test]
async fn a_map_for_another_model_is_warned_of_once() {
    let shape = |layers: u32| ModelShape {
        layers,
        experts: 8,
        top_k: 2,
    };
    let warnings = Warnings::default();
    let _guard = tracing::subscriber::set_default(warnings.clone());
    for (served, expected) in [(shape(2), 0), (shape(3), 1)] {
        let (prefill, one, two) = (
            Peer::start("p").await,
            Peer::start("d1").await,
            Peer::start("d2").await,
        );
        let extras = Extras {
            prompt_counts: Some(counts(served, 0)),
            ..Extras::default()
        };
        *prefill.inner.extras.lock().unwrap() = Some(extras.to_value());
        let mut config = config(&[&prefill], &[&one, &two]);
        config.decode_policy = Some(DecodePolicyName::Locality);
        config.locality_map = Some(map(shape(2)));
        let gateway = Gateway::start(config).await;
        let body = json!({"prompt": "one two three four five six seven eight", "max_tokens": 4});
        for _ in 0..3 {
            let response = gateway.post("/v1/completions", &body).await;
            assert_eq!(response.status(), 200);
            let by_shape = response.headers()["x-colocate-reason"] == "counts_shape";
            assert_eq!(by_shape, expected == 1);
        }
        let said = warnings.0.lock().unwrap();
        let said: Vec<_> = said
            .iter()
            .filter(|line| line.contains("locality map is for"))
            .collect();
        assert_eq!(said.len(), expected, "{said:?}");
        if let Some(line) = said.first() {
            assert!(line.contains(&shape(2).to_string()) && line.contains(&shape(3).to_string()));
        }
    }
}
