//! What holds for every fit.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Draws, calibration, spread};
use experts::{
    CalibrationFile, CalibrationHeader, CalibrationRecord, ExpertCounts, ModelShape, PromptCounts,
};
use locality::{
    Clustering, FitConfig, FitError, MaskChoice, Presence, SignatureError, Transform, fit,
};
use proptest::prelude::*;

const SHAPE: ModelShape = ModelShape {
    layers: 3,
    experts: 8,
    top_k: 2,
};

fn config(clusters: usize) -> FitConfig {
    FitConfig {
        clusters,
        restarts: 2,
        ..FitConfig::default()
    }
}

/// Counts without decode, for clustering alone.
fn unrated(rows: &[Vec<u32>], shape: ModelShape) -> CalibrationFile {
    let records = rows.iter().map(|row| {
        let counts = ExpertCounts::from_vec(shape, row.clone()).unwrap();
        CalibrationRecord::new(PromptCounts::complete(counts).unwrap(), None)
    });
    CalibrationFile {
        header: CalibrationHeader::new("made-up", shape),
        records: records.collect(),
    }
}

fn unrated_config(clusters: usize, clustering: Clustering) -> FitConfig {
    FitConfig {
        transform: Some(Transform::Count),
        mask: MaskChoice::All,
        clustering,
        ..config(clusters)
    }
}

#[test]
fn any_number_of_clusters_up_to_the_records() {
    let file = calibration(SHAPE, 300, 5, 60, 11);
    for clusters in [1, 2, 7, 16, 256, 299, 300] {
        for clustering in [Clustering::Balanced, Clustering::Plain] {
            let config = FitConfig {
                clustering,
                restarts: 1,
                max_iterations: 8,
                ..config(clusters)
            };
            let (map, report) = fit(&file, &config, &mut |_| ()).unwrap();
            assert_eq!(map.clusters(), clusters);
            let sizes = &report.quality.cluster_sizes;
            assert_eq!(sizes.iter().sum::<u32>(), 300);
            assert!(sizes.iter().all(|&size| size >= 1), "{clusters}: {sizes:?}");
            if clustering == Clustering::Balanced {
                let most = 300usize.div_ceil(clusters) as u32;
                assert!(
                    sizes.iter().all(|&size| size <= most),
                    "{clusters}: {sizes:?}"
                );
            }
            assert_eq!(report.quality.between_similarity.is_none(), clusters == 1);
            for k in 0..clusters {
                let length: f32 = map.centroid(k).iter().map(|v| v * v).sum();
                assert!((length - 1.0).abs() < 1e-4, "{length}");
            }
        }
    }
    assert_eq!(
        fit(&file, &config(301), &mut |_| ()).unwrap_err(),
        FitError::TooFewRecords {
            records: 300,
            clusters: 301
        }
    );
    assert_eq!(
        fit(&file, &config(0), &mut |_| ()).unwrap_err(),
        FitError::NoClusters
    );
}

#[test]
fn duplicates_and_empty_prompts_are_clustered_too() {
    let shape = ModelShape {
        layers: 1,
        experts: 4,
        top_k: 1,
    };
    let a = vec![5, 0, 0, 0];
    let b = vec![0, 5, 0, 0];
    let nothing = vec![0; 4];
    for rows in [
        vec![a.clone(); 9],
        vec![nothing.clone(); 9],
        [vec![a.clone(); 5], vec![nothing.clone(); 4]].concat(),
        [
            vec![a.clone(); 4],
            vec![b.clone(); 4],
            vec![nothing.clone()],
        ]
        .concat(),
    ] {
        let file = unrated(&rows, shape);
        for clustering in [Clustering::Balanced, Clustering::Plain] {
            for clusters in [1, 2, 4, 9] {
                let config = unrated_config(clusters, clustering);
                let (map, report) = fit(&file, &config, &mut |_| ()).unwrap();
                let sizes = &report.quality.cluster_sizes;
                assert!(sizes.iter().all(|&size| size >= 1), "{sizes:?}");
                assert!(report.converged);
                let signature = map.signature(file.records[8].prompt.counts()).unwrap();
                let mut similarities = vec![f32::NAN; clusters];
                map.similarities(&signature, &mut similarities);
                assert!(similarities.iter().all(|s| s.is_finite()));
                if rows[8] == nothing {
                    assert!(signature.is_zero());
                    assert!(similarities.iter().all(|&s| s == 0.0));
                }
            }
        }
    }
    // Two kinds, two clusters: one each.
    let rows = [vec![a; 4], vec![b; 4]].concat();
    let (_, report) = fit(
        &unrated(&rows, shape),
        &unrated_config(2, Clustering::Balanced),
        &mut |_| (),
    )
    .unwrap();
    assert_eq!(report.quality.within_similarity, 1.0);
    assert_eq!(report.quality.between_similarity, Some(0.0));
}

#[test]
fn the_seed_decides_and_nothing_else() {
    let file = calibration(SHAPE, 120, 4, 50, 5);
    let bytes = |config: &FitConfig| {
        fit(&file, config, &mut |_| ())
            .unwrap()
            .0
            .to_bytes()
            .unwrap()
    };
    let base = FitConfig {
        threads: Some(1),
        pairs: Some(500),
        ..config(6)
    };
    let first = bytes(&base);
    for threads in [1, 2, 5] {
        let again = FitConfig {
            threads: Some(threads),
            ..base.clone()
        };
        assert!(bytes(&again) == first, "{threads} threads");
    }
    assert!(bytes(&FitConfig { seed: 1, ..base }) != first);
}

#[test]
fn more_restarts_are_never_worse() {
    let file = calibration(SHAPE, 100, 6, 50, 8);
    let within = |restarts| {
        let config = FitConfig {
            restarts,
            ..config(9)
        };
        fit(&file, &config, &mut |_| ())
            .unwrap()
            .1
            .quality
            .within_similarity
    };
    let runs: Vec<f64> = [1, 2, 4, 8].map(within).to_vec();
    assert!(runs.is_sorted(), "{runs:?}");
}

#[test]
fn the_order_of_records_changes_neither_idf_nor_rho_nor_mask() {
    let file = calibration(SHAPE, 40, 3, 50, 21);
    let all = FitConfig {
        pairs: None,
        ..config(4)
    };
    let (map, report) = fit(&file, &all, &mut |_| ()).unwrap();
    let mut reversed = file;
    reversed.records.reverse();
    reversed.records.swap(3, 17);
    let (other, again) = fit(&reversed, &all, &mut |_| ()).unwrap();
    assert_eq!(map.idf(), other.idf());
    assert_eq!(report.transforms, again.transforms);
    assert_eq!(report.mask_path, again.mask_path);
}

#[test]
fn rho_does_not_see_scale() {
    // The same shares over ten times the tokens: equal directions.
    let mut draws = Draws(3);
    let mut short = Vec::new();
    for _ in 0..30 {
        let shares: Vec<f64> = (0..24).map(|_| draws.normal().exp()).collect();
        let row: Vec<u32> = shares
            .chunks(8)
            .flat_map(|row| spread(row, 50, 2))
            .collect();
        short.push(row);
    }
    let file = |scale: u32| {
        let rows: Vec<Vec<u32>> = short
            .iter()
            .map(|row| row.iter().map(|count| count * scale).collect())
            .collect();
        let mut file = unrated(&rows, SHAPE);
        let decode = short
            .iter()
            .rev()
            .map(|row| ExpertCounts::from_vec(SHAPE, row.clone()));
        for (record, decode) in file.records.iter_mut().zip(decode) {
            record.decode = Some(decode.unwrap());
        }
        file
    };
    let all = FitConfig {
        pairs: None,
        ..config(2)
    };
    let (_, one) = fit(&file(1), &all, &mut |_| ()).unwrap();
    let (_, sixteen) = fit(&file(16), &all, &mut |_| ()).unwrap();
    assert_eq!(one.transforms, sixteen.transforms);
}

#[test]
fn what_cannot_be_rated_is_named() {
    let mut file = calibration(SHAPE, 20, 2, 50, 2);
    for record in &mut file.records {
        record.gate_logits = None;
    }
    file.records[4].gate_probabilities = None;
    file.records[5].decode = None;
    let (_, report) = fit(&file, &config(2), &mut |_| ()).unwrap();
    assert_eq!((report.records, report.rated_records), (20, 19));
    let why = |transform| {
        let found = report
            .transforms
            .iter()
            .find(|t| t.transform == transform)
            .unwrap();
        (found.rho.is_some(), found.left_out.clone())
    };
    assert_eq!(why(Transform::Count), (true, None));
    assert_eq!(
        why(Transform::GateProbability),
        (false, Some("1 of 19 records lack its data".to_owned()))
    );
    assert_eq!(
        why(Transform::GateLogit),
        (false, Some("19 of 19 records lack its data".to_owned()))
    );
    let logits = FitConfig {
        transform: Some(Transform::GateLogit),
        ..config(2)
    };
    assert!(matches!(
        fit(&file, &logits, &mut |_| ()).unwrap_err(),
        FitError::NoValues { missing: 20, .. }
    ));
    for record in &mut file.records {
        record.decode = None;
    }
    let error = fit(&file, &config(2), &mut |_| ()).unwrap_err();
    assert!(
        matches!(
            error,
            FitError::NotRated {
                what: "a transform",
                rated: 0
            }
        ),
        "{error}"
    );
    let greedy = FitConfig {
        transform: Some(Transform::Count),
        ..config(2)
    };
    let error = fit(&file, &greedy, &mut |_| ()).unwrap_err();
    assert!(
        matches!(error, FitError::NotRated { what: "layers", .. }),
        "{error}"
    );
    let given = FitConfig {
        mask: MaskChoice::Layers(vec![2, 0]),
        ..greedy
    };
    let (map, report) = fit(&file, &given, &mut |_| ()).unwrap();
    assert_eq!((map.mask(), report.quality.rho), (&[0, 2][..], None));
    for mask in [vec![], vec![3], vec![1, 1]] {
        let wrong = FitConfig {
            mask: MaskChoice::Layers(mask),
            ..given.clone()
        };
        assert!(matches!(
            fit(&file, &wrong, &mut |_| ()).unwrap_err(),
            FitError::Mask { .. }
        ));
    }
}

#[test]
fn a_map_refuses_another_model_and_gate_maps_refuse_counts() {
    let file = calibration(SHAPE, 20, 2, 50, 2);
    let (map, _) = fit(&file, &config(2), &mut |_| ()).unwrap();
    let other = ExpertCounts::zeros(ModelShape {
        experts: 9,
        ..SHAPE
    });
    let error = map.signature(&other).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the locality map does not fit the counts: expected a model of 3 MoE layers x 8 experts, \
         top-2, got 3 MoE layers x 9 experts, top-2"
    );
    let gates = FitConfig {
        transform: Some(Transform::GateProbability),
        ..config(2)
    };
    let (map, _) = fit(&file, &gates, &mut |_| ()).unwrap();
    let error = map.signature(file.records[0].prompt.counts()).unwrap_err();
    assert!(matches!(error, SignatureError::NeedsValues { .. }));
    let values = file.records[0].gate_probabilities.as_ref().unwrap();
    let signature = map.signature_of_values(values).unwrap();
    let mut similarities = [0.0; 2];
    map.similarities(&signature, &mut similarities);
    assert!(similarities.iter().all(|s| (0.0..1.0001).contains(s)));
}

#[test]
fn fair_share_gives_idf_a_say_where_every_expert_is_used() {
    let shape = ModelShape {
        layers: 2,
        experts: 4,
        top_k: 2,
    };
    let file = calibration(shape, 30, 3, 400, 4);
    let all_used = file
        .records
        .iter()
        .all(|r| r.prompt.counts().as_slice().iter().all(|&c| c > 0));
    let idf = |presence| {
        let config = FitConfig {
            presence,
            ..config(2)
        };
        fit(&file, &config, &mut |_| ()).unwrap().0.idf().to_vec()
    };
    if all_used {
        assert!(idf(Presence::Selected).iter().all(|&w| w == 0.0));
    }
    assert!(idf(Presence::FairShare).iter().any(|&w| w > 0.1));
}

#[test]
fn a_refit_can_be_lined_up_with_the_map_it_replaces() {
    let file = calibration(SHAPE, 120, 6, 80, 31);
    let (map, _) = fit(&file, &config(6), &mut |_| ()).unwrap();
    let refit = map.refit(6, 99).unwrap().matched_to(&map).unwrap();
    // Six domains, six clusters, twice: each continues its own.
    for k in 0..6 {
        let (a, b) = (map.centroid(k), refit.centroid(k));
        let similarity: f32 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
        assert!(similarity > 0.9, "cluster {k}: {similarity}");
    }
    assert!(map.refit(5, 99).unwrap().matched_to(&map).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Whatever the counts, a fit gives a map whose similarities are cosines.
    #[test]
    fn any_counts_fit(
        weights in prop::collection::vec(prop::collection::vec(0u8..4, 24), 3..20),
        clusters in 1usize..4,
        plain in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let rows: Vec<Vec<u32>> = weights
            .iter()
            .map(|row| {
                let shares: Vec<f64> = row.iter().map(|&w| f64::from(w) + 1e-9).collect();
                shares.chunks(8).flat_map(|row| spread(row, 9, 2)).collect()
            })
            .collect();
        let file = unrated(&rows, SHAPE);
        let clustering = if plain { Clustering::Plain } else { Clustering::Balanced };
        for transform in [Transform::CountIdf, Transform::SqrtCount, Transform::Binary] {
            let config = FitConfig {
                transform: Some(transform),
                seed,
                ..unrated_config(clusters, clustering)
            };
            let (map, report) = fit(&file, &config, &mut |_| ()).unwrap();
            prop_assert!(report.quality.within_similarity <= 1.0001);
            let mut similarities = vec![0.0; clusters];
            for record in &file.records {
                let signature = map.signature(record.prompt.counts()).unwrap();
                map.similarities(&signature, &mut similarities);
                prop_assert!(similarities.iter().all(|s| (-1e-4..1.0001).contains(s)));
            }
        }
    }
}
