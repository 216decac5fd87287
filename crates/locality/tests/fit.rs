//! The whole fit on records made up.
#![allow(clippy::unwrap_used)]

mod common;

use common::calibration;
use experts::ModelShape;
use locality::{FitConfig, LocalityMap, Phase, Transform, fit};

const SHAPE: ModelShape = ModelShape {
    layers: 6,
    experts: 20,
    top_k: 3,
};

#[test]
fn domains_become_clusters() {
    let file = calibration(SHAPE, 80, 4, 200, 7);
    let config = FitConfig {
        clusters: 4,
        ..FitConfig::default()
    };
    let mut phases = Vec::new();
    let (map, report) = fit(&file, &config, &mut |progress| phases.push(progress)).unwrap();
    assert_eq!(report.transforms.len(), 6);
    assert!(report.transforms.iter().all(|t| t.rho.is_some()));
    assert!(report.converged);
    assert_eq!(report.quality.cluster_sizes, [20, 20, 20, 20]);
    assert!(report.quality.rho >= report.quality.rho_all_layers);
    assert!(phases.is_sorted_by_key(|p| match p.phase {
        Phase::Transforms => 0,
        Phase::Mask => 1,
        Phase::Clusters => 2,
    }));
    // Every request's nearest centroid is its domain's.
    let mut owner = [None; 4];
    let mut similarities = [0.0; 4];
    for (r, record) in file.records.iter().enumerate() {
        let signature = map.signature(record.prompt.counts()).unwrap();
        map.similarities(&signature, &mut similarities);
        let best = (0..4)
            .max_by(|&a, &b| similarities[a].total_cmp(&similarities[b]))
            .unwrap();
        assert_eq!(*owner[r % 4].get_or_insert(best), best, "record {r}");
    }
    let bytes = map.to_bytes().unwrap();
    let again = LocalityMap::from_bytes(&bytes).unwrap();
    assert!(again.to_bytes().unwrap() == bytes, "another map was read");
    // A refit with the fit's own settings is the fit.
    let refit = again.refit(4, config.seed).unwrap();
    assert!(
        refit.to_bytes().unwrap() == bytes,
        "the refit is another map"
    );
    assert_eq!(again.refit(7, 1).unwrap().clusters(), 7);
}

#[test]
fn a_given_transform_is_taken() {
    let file = calibration(SHAPE, 30, 3, 100, 3);
    for transform in Transform::ALL {
        let config = FitConfig {
            clusters: 3,
            transform: Some(transform),
            ..FitConfig::default()
        };
        let (map, report) = fit(&file, &config, &mut |_| ()).unwrap();
        assert_eq!(map.transform(), transform);
        assert!(report.quality.rho.is_some());
        let bytes = map.to_bytes().unwrap();
        let again = LocalityMap::from_bytes(&bytes).unwrap();
        let refit = again.refit(3, config.seed).unwrap().to_bytes().unwrap();
        assert!(refit == bytes, "{transform}: the refit is another map");
    }
}
