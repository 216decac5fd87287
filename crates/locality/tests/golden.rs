//! Against SciPy: values by `tools/golden/locality.py`.
#![allow(clippy::unwrap_used)]

use experts::{
    CalibrationFile, CalibrationHeader, CalibrationRecord, ExpertCounts, ModelShape, PromptCounts,
};
use locality::{Capacity, FitConfig, MaskChoice, Transform, assign, fit, spearman};
use serde::Deserialize;

fn read<T: serde::de::DeserializeOwned>(text: &str) -> T {
    serde_json::from_str(text).unwrap()
}

#[test]
fn spearman_is_scipys() {
    #[derive(Deserialize)]
    struct Case {
        x: Vec<f64>,
        y: Vec<f64>,
        rho: Option<f64>,
    }
    for case in read::<Vec<Case>>(include_str!("golden/spearman.json")) {
        let rho = spearman(&case.x, &case.y);
        match (rho, case.rho) {
            (Some(got), Some(expected)) => assert!((got - expected).abs() < 1e-12, "{got}"),
            (got, expected) => assert_eq!(got, expected),
        }
    }
}

#[test]
fn assignments_cost_what_scipys_do() {
    #[derive(Deserialize)]
    struct Case {
        costs: Vec<i64>,
        clusters: usize,
        at_least: usize,
        at_most: usize,
        total: i64,
    }
    for case in read::<Vec<Case>>(include_str!("golden/assign.json")) {
        let capacity = Capacity {
            at_least: case.at_least,
            at_most: case.at_most,
        };
        let labels = assign(&case.costs, case.clusters, capacity).unwrap();
        let rows = case.costs.chunks(case.clusters).zip(&labels);
        let total: i64 = rows.map(|(row, &k)| row[k as usize]).sum();
        assert_eq!(total, case.total, "{} clusters", case.clusters);
    }
}

#[derive(Deserialize)]
struct Step {
    layer: u32,
    rho: f64,
}

#[derive(Deserialize)]
struct Expected {
    rho: f64,
    path: Vec<Step>,
}

#[derive(Deserialize)]
struct Fit {
    layers: u32,
    experts: u32,
    top_k: u32,
    tokens: u32,
    prompt: Vec<Vec<u32>>,
    decode: Vec<Vec<u32>>,
    gate_probabilities: Vec<Vec<f32>>,
    gate_logits: Vec<Vec<f32>>,
    idf: Vec<f64>,
    expected: std::collections::BTreeMap<String, Expected>,
}

impl Fit {
    fn file(&self) -> CalibrationFile {
        let shape = ModelShape {
            layers: self.layers,
            experts: self.experts,
            top_k: self.top_k,
        };
        let counts = |cells: &Vec<u32>| ExpertCounts::from_vec(shape, cells.clone()).unwrap();
        let records = (0..self.prompt.len()).map(|r| CalibrationRecord {
            gate_probabilities: Some(self.gate_probabilities[r].clone()),
            gate_logits: Some(self.gate_logits[r].clone()),
            ..CalibrationRecord::new(
                PromptCounts::new(counts(&self.prompt[r]), self.tokens).unwrap(),
                Some(counts(&self.decode[r])),
            )
        });
        CalibrationFile {
            header: CalibrationHeader::new("golden", shape),
            records: records.collect(),
        }
    }
}

#[test]
fn idf_rho_and_layer_mask_are_scipys() {
    let golden: Fit = read(include_str!("golden/fit.json"));
    let file = golden.file();
    for transform in Transform::ALL {
        let config = FitConfig {
            clusters: 3,
            transform: Some(transform),
            pairs: None,
            ..FitConfig::default()
        };
        let (map, report) = fit(&file, &config, &mut |_| ()).unwrap();
        for (got, expected) in map.idf().iter().zip(&golden.idf) {
            assert!(
                (f64::from(*got) - expected).abs() < 1e-6,
                "{got} {expected}"
            );
        }
        for rated in &report.transforms {
            let expected = golden.expected[rated.transform.name()].rho;
            let got = rated.rho.unwrap();
            assert!(
                (got - expected).abs() < 1e-6,
                "{}: {got} {expected}",
                rated.transform
            );
        }
        let expected = &golden.expected[transform.name()].path;
        for (got, expected) in report.mask_path.iter().zip(expected) {
            assert_eq!(got.layer, expected.layer, "{transform}");
            assert!((got.rho - expected.rho).abs() < 1e-6, "{transform}");
        }
        assert_eq!(report.mask_path.len(), expected.len());
        let peak = expected.iter().map(|step| step.rho).fold(-1.0, f64::max);
        assert!((report.quality.rho.unwrap() - peak).abs() < 1e-6);
        // The same layers given by hand rate the same.
        let given = FitConfig {
            mask: MaskChoice::Layers(report.layers_kept.clone()),
            ..config
        };
        let (_, again) = fit(&file, &given, &mut |_| ()).unwrap();
        assert!((again.quality.rho.unwrap() - peak).abs() < 1e-6);
    }
}

#[test]
fn the_best_transform_of_counts_is_chosen() {
    let golden: Fit = read(include_str!("golden/fit.json"));
    let config = FitConfig {
        clusters: 3,
        pairs: None,
        ..FitConfig::default()
    };
    let (_, report) = fit(&golden.file(), &config, &mut |_| ()).unwrap();
    let best = Transform::ALL
        .into_iter()
        .filter(|t| t.needs_counts_only())
        .max_by(|a, b| {
            let rho = |t: &Transform| golden.expected[t.name()].rho;
            rho(a).total_cmp(&rho(b))
        });
    assert_eq!(Some(report.transform), best);
}
