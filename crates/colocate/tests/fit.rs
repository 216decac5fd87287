//! `fit` and `inspect` on a small calibration.

#![allow(clippy::unwrap_used)]

mod common;
use common::{calibration_file, json, run, stderr, stdout};

#[test]
fn fits_and_inspects() {
    let folder = tempfile::tempdir().unwrap();
    let calibration = calibration_file(folder.path(), 48, 4);
    let map = folder.path().join("map.safetensors");
    let (calibration, map) = (calibration.to_str().unwrap(), map.to_str().unwrap());

    let fitted = json(
        &run([
            "fit",
            calibration,
            "--out",
            map,
            "--clusters",
            "4",
            "--seed",
            "3",
            "--json",
        ]),
        0,
    );
    assert_eq!(fitted["clusters"], 4);
    assert_eq!(fitted["records"], 48);
    let sizes: Vec<u64> =
        serde_json::from_value(fitted["quality"]["cluster_sizes"].clone()).unwrap();
    assert_eq!(sizes, [12; 4]);
    assert!(fitted["quality"]["rho"].as_f64().unwrap() > 0.5, "{fitted}");
    assert!(
        fitted["quality"]["within_similarity"].as_f64().unwrap()
            > fitted["quality"]["between_similarity"].as_f64().unwrap()
    );

    let bytes = std::fs::read(map).unwrap();
    json(
        &run([
            "fit",
            calibration,
            "--out",
            map,
            "--clusters",
            "4",
            "--seed",
            "3",
            "--json",
        ]),
        0,
    );
    assert_eq!(
        std::fs::read(map).unwrap(),
        bytes,
        "the same seed makes the same file"
    );

    let seen = json(&run(["inspect", map, "--json"]), 0);
    assert_eq!(seen["kind"], "locality_map");
    assert_eq!(seen["clusters"], 4);
    assert_eq!(seen["transform"], fitted["transform"]);
    let seen = json(&run(["inspect", calibration, "--json"]), 0);
    assert_eq!(seen["kind"], "calibration");
    assert_eq!(seen["records"], 48);
    assert_eq!(seen["domains"]["group-0"], 12);

    for arguments in [["inspect", map], ["inspect", calibration]] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(stdout(&output).contains("made-up"), "{}", stdout(&output));
    }
}

#[test]
fn a_transform_and_every_option_can_be_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let calibration = calibration_file(folder.path(), 30, 3);
    let map = folder.path().join("map.safetensors");
    let (calibration, map) = (calibration.to_str().unwrap(), map.to_str().unwrap());
    for transform in ["count_idf", "count", "sqrt_count", "binary"] {
        let fitted = json(
            &run([
                "fit",
                calibration,
                "--out",
                map,
                "--clusters",
                "3",
                "--transform",
                transform,
                "--unbalanced",
                "--all-pairs",
                "--json",
            ]),
            0,
        );
        assert_eq!(fitted["transform"], transform);
    }
    let output = run([
        "fit",
        calibration,
        "--out",
        map,
        "--clusters",
        "3",
        "--transform",
        "gate_logit",
    ]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let output = run(["fit", calibration, "--out", map, "--clusters", "3"]);
    assert!(stdout(&output).contains("rho"), "{}", stdout(&output));
}
