//! Maps as files: what is written is read, and nothing else is.
#![allow(clippy::unwrap_used)]

mod common;

use common::calibration;
use experts::ModelShape;
use locality::{FitConfig, FitError, LocalityMap, MAX_ITERATIONS, MAX_RESTARTS, MapError, fit};
use proptest::prelude::*;

fn bytes() -> Vec<u8> {
    let shape = ModelShape {
        layers: 2,
        experts: 8,
        top_k: 2,
    };
    let config = FitConfig {
        clusters: 3,
        ..FitConfig::default()
    };
    let file = calibration(shape, 12, 3, 40, 1);
    fit(&file, &config, &mut |_| ())
        .unwrap()
        .0
        .to_bytes()
        .unwrap()
}

/// The bytes with `from` replaced by `to`, of the same length, in the header.
fn replaced(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at = bytes
        .windows(from.len())
        .position(|window| window == from.as_bytes())
        .unwrap();
    let mut bytes = bytes.to_vec();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    bytes
}

/// The same tensors under other metadata, as anyone can write them.
fn forged(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let (_, header) = safetensors::SafeTensors::read_metadata(bytes).unwrap();
    let mut metadata = header.metadata().clone().unwrap();
    let text = metadata.get_mut("colocate_locality_map").unwrap();
    assert!(text.contains(from));
    *text = text.replace(from, to);
    let tensors = safetensors::SafeTensors::deserialize(bytes).unwrap();
    safetensors::serialize(tensors.tensors(), Some(metadata)).unwrap()
}

#[test]
fn a_map_cannot_ask_for_a_refit_without_end() {
    let good = bytes();
    for (from, to, expected) in [
        (
            "\"restarts\":4",
            "\"restarts\":101",
            "at most 100 restarts, got 101",
        ),
        (
            "\"max_iterations\":100",
            "\"max_iterations\":18446744073709551615",
            "at most 10000 iterations",
        ),
    ] {
        let error = LocalityMap::from_bytes(&forged(&good, from, to)).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    // What may be fitted may be read.
    let shape = ModelShape {
        layers: 1,
        experts: 4,
        top_k: 1,
    };
    let file = calibration(shape, 4, 2, 8, 1);
    let mut config = FitConfig {
        clusters: 2,
        restarts: MAX_RESTARTS,
        max_iterations: MAX_ITERATIONS,
        ..FitConfig::default()
    };
    let map = fit(&file, &config, &mut |_| ()).unwrap().0;
    LocalityMap::from_bytes(&map.to_bytes().unwrap()).unwrap();
    config.restarts += 1;
    assert!(matches!(
        fit(&file, &config, &mut |_| ()),
        Err(FitError::Work { .. })
    ));
}

#[test]
fn the_metadata_is_as_documented() {
    let bytes = bytes();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let text = &header.metadata().as_ref().unwrap()["colocate_locality_map"];
    let value: serde_json::Value = serde_json::from_str(text).unwrap();
    let mut fields: Vec<&str> = value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    fields.sort_unstable();
    assert_eq!(
        fields,
        [
            "checksum",
            "clustering",
            "max_iterations",
            "model",
            "quality",
            "restarts",
            "seed",
            "shape",
            "transform",
            "version"
        ]
    );
    assert_eq!(value["version"], 1);
    assert_eq!(value["clustering"], "balanced");
    assert_eq!(
        value["shape"],
        serde_json::json!({"layers": 2, "experts": 8, "top_k": 2})
    );
}

#[test]
fn damaged_and_newer_files_are_refused_with_the_reason() {
    let good = bytes();
    let check = |bytes: &[u8], expected: &str| {
        let error = LocalityMap::from_bytes(bytes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(b"", "expected a locality map (a safetensors file)");
    check(
        b"{\"not\": \"a map\", \"but\": \"json\"}",
        "expected a locality map",
    );
    check(
        &replaced(&good, "colocate_locality_map", "colocate_locality_mop"),
        "without \"colocate_locality_map\" in its metadata",
    );
    check(
        &replaced(&good, "version\\\":1", "version\\\":7"),
        "version 1 at most, got 7: made by a newer colocate",
    );
    check(
        &replaced(&good, "balanced", "balloned"),
        "metadata of the locality map: unknown variant",
    );
    check(
        &replaced(&good, "experts\\\":8", "experts\\\":9"),
        "tensor \"idf\"",
    );
    check(
        &replaced(&good, "layers\\\":2", "layers\\\":0"),
        "expected layers between 1 and",
    );
    // Still a map by its form, but not the one that was written.
    check(
        &replaced(&good, "top_k\\\":2", "top_k\\\":3"),
        "damaged locality map: expected checksum",
    );
    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    check(&flipped, "damaged locality map: expected checksum");
    assert!(matches!(
        LocalityMap::from_bytes(&flipped),
        Err(MapError::Checksum { .. })
    ));
    for length in 0..good.len() {
        assert!(
            LocalityMap::from_bytes(&good[..length]).is_err(),
            "{length} bytes"
        );
    }
    let mut longer = good;
    longer.push(0);
    assert!(LocalityMap::from_bytes(&longer).is_err());
}

proptest! {
    #[test]
    fn flipped_bits_are_refused(flips in prop::collection::vec(any::<u32>(), 1..4)) {
        let good = bytes();
        let mut bytes = good.clone();
        for flip in flips {
            let at = flip as usize % (bytes.len() * 8);
            bytes[at / 8] ^= 1 << (at % 8);
        }
        prop_assert!(bytes == good || LocalityMap::from_bytes(&bytes).is_err());
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(LocalityMap::from_bytes(&bytes).is_err());
    }
}
