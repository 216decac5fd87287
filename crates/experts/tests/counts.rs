//! Counting: tokens, blocks, sums and what is refused.
#![allow(clippy::unwrap_used)]

use experts::{
    BlockCounts, CalibrationFile, CalibrationHeader, CalibrationRecord, CountError, ExpertCounts,
    ModelShape, PromptCounts, PromptCountsError, RoutedExperts,
};
use proptest::prelude::*;

const SHAPE: ModelShape = ModelShape {
    layers: 2,
    experts: 5,
    top_k: 2,
};

/// A token's distinct ids per layer.
fn token() -> impl Strategy<Value = Vec<u16>> {
    (0u16..5, 1u16..5, 0u16..5, 1u16..5)
        .prop_map(|(a, b, c, d)| vec![a, (a + b) % 5, c, (c + d) % 5])
}

proptest! {
    /// Blocks summed, whatever their size and wherever they have been, equal a cold count.
    #[test]
    fn block_sums_are_the_counts_of_the_tokens(
        tokens in prop::collection::vec(token(), 0..60), size in 1usize..20,
    ) {
        let mut routed = RoutedExperts::new(SHAPE);
        let mut blocks = BlockCounts::new(SHAPE, 64);
        for (at, ids) in tokens.iter().enumerate() {
            routed.push(ids).unwrap();
            for layer in 0..2 {
                blocks.add_token(at / size, layer, &ids[layer * 2..layer * 2 + 2]).unwrap();
            }
        }
        let mut sum = ExpertCounts::zeros(SHAPE);
        let mut moved = BlockCounts::new(SHAPE, 1);
        for block in 0..tokens.len().div_ceil(size) {
            let mut bytes = Vec::new();
            blocks.write_bytes(block, &mut bytes).unwrap();
            prop_assert_eq!(bytes.len(), blocks.row_bytes());
            moved.read_bytes(0, &bytes).unwrap();
            moved.sum_into(0, &mut sum).unwrap();
            blocks.copy(block, 63).unwrap();
            prop_assert_eq!(blocks.row(63).unwrap(), blocks.row(block).unwrap());
            blocks.clear(block).unwrap();
            prop_assert!(blocks.row(block).unwrap().iter().all(|&count| count == 0));
        }
        prop_assert_eq!(&sum, &routed.counts());
        let prompt = PromptCounts::complete(sum).unwrap();
        prop_assert_eq!(prompt.covered_tokens() as usize, tokens.len());
        let ids = routed.as_slice().to_vec();
        prop_assert_eq!(RoutedExperts::from_ids(SHAPE, ids).unwrap(), routed);
    }
}

#[test]
fn a_block_saturates_instead_of_wrapping() {
    let shape = ModelShape {
        layers: 1,
        experts: 2,
        top_k: 1,
    };
    let mut blocks = BlockCounts::new(shape, 1);
    for _ in 0..65_535 {
        blocks.add_token(0, 0, &[1]).unwrap();
    }
    assert_eq!(blocks.row(0).unwrap(), [0, 65_535]);
    blocks.add_token(0, 0, &[1]).unwrap();
    assert_eq!(blocks.row(0).unwrap(), [0, 65_535]);
    // Sums over blocks are wider.
    let mut sum = ExpertCounts::zeros(shape);
    for _ in 0..3 {
        blocks.sum_into(0, &mut sum).unwrap();
    }
    assert_eq!(sum.row(0), [0, 3 * 65_535]);
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let mut counts = ExpertCounts::zeros(SHAPE);
    for (layer, ids, expected) in [
        (2, vec![0, 1], "expected a layer below 2, got 2"),
        (
            0,
            vec![0],
            "expected 2 expert ids for a token in layer 0, got 1",
        ),
        (
            1,
            vec![0, 5],
            "expected an expert id below 5 in layer 1, got 5",
        ),
    ] {
        assert_eq!(
            counts.record(layer, &ids).unwrap_err().to_string(),
            expected
        );
        let mut blocks = BlockCounts::new(SHAPE, 1);
        assert_eq!(
            blocks.add_token(0, layer, &ids).unwrap_err().to_string(),
            expected
        );
    }
    assert!(counts.is_zero());
    let mut blocks = BlockCounts::new(SHAPE, 1);
    assert!(matches!(blocks.clear(1), Err(CountError::Block { .. })));
    assert!(matches!(
        blocks.read_bytes(0, &[0; 3]),
        Err(CountError::RowBytes { .. })
    ));
    let other = ExpertCounts::zeros(ModelShape { layers: 3, ..SHAPE });
    assert_eq!(
        counts.add(&other).unwrap_err().to_string(),
        "expected a model of 2 MoE layers x 5 experts, top-2, got 3 MoE layers x 5 experts, top-2"
    );
    assert!(matches!(
        blocks.sum_into(0, &mut other.clone()),
        Err(CountError::Shape(_))
    ));
    assert!(RoutedExperts::from_ids(SHAPE, vec![0; 3]).is_err());
    assert!(RoutedExperts::new(SHAPE).push(&[0, 1, 2, 9]).is_err());
}

#[test]
fn counts_that_no_tokens_leave_are_refused() {
    let new = |cells: [u32; 10], tokens| {
        PromptCounts::new(
            ExpertCounts::from_vec(SHAPE, cells.to_vec()).unwrap(),
            tokens,
        )
    };
    assert!(new([1, 1, 0, 0, 0, 0, 0, 0, 1, 1], 1).is_ok());
    assert!(matches!(
        new([1, 1, 0, 0, 0, 0, 0, 0, 1, 1], 0),
        Err(PromptCountsError::Coverage { .. })
    ));
    assert!(matches!(
        new([1, 1, 0, 0, 0, 0, 0, 0, 1, 0], 1),
        Err(PromptCountsError::LayerSum { layer: 1, .. })
    ));
    assert!(matches!(
        new([1, 1, 1, 0, 0, 0, 0, 0, 1, 1], 2),
        Err(PromptCountsError::LayerSum { layer: 0, .. })
    ));
    assert!(matches!(
        new([2, 0, 0, 0, 0, 0, 0, 0, 1, 1], 2),
        Err(PromptCountsError::Cell { expert: 0, .. })
    ));
    let half = new([1, 1, 0, 0, 0, 0, 0, 0, 1, 1], 2).unwrap();
    assert_eq!((half.covered_tokens(), half.coverage()), (1, 0.5));
    let swapped = half.keep_layers(&[1]);
    assert_eq!(swapped.counts().as_slice(), [0, 0, 0, 1, 1]);
}

fn record(domain: &str) -> CalibrationRecord {
    let mut counts = ExpertCounts::zeros(SHAPE);
    counts.record(0, &[0, 4]).unwrap();
    counts.record(1, &[1, 2]).unwrap();
    CalibrationRecord {
        gate_logits: Some(vec![-0.5; 10]),
        domain: Some(domain.to_owned()),
        ..CalibrationRecord::new(PromptCounts::new(counts.clone(), 3).unwrap(), Some(counts))
    }
}

#[test]
fn calibration_files_round_trip() {
    let file = CalibrationFile {
        header: CalibrationHeader::new("demo", SHAPE),
        records: vec![record("law"), record("code")],
    };
    let text = file.to_jsonl().unwrap();
    assert!(text.starts_with(
        "{\"format\":\"colocate-calibration\",\"version\":1,\"model\":\"demo\",\"shape\":{\"layers\":2,\"experts\":5,\"top_k\":2}}\n"
    ));
    assert_eq!(CalibrationFile::parse(&text).unwrap(), file);
    assert_eq!(
        CalibrationFile::parse(&text.replace('\n', "\r\n\n")).unwrap(),
        file
    );
}

#[test]
fn calibration_errors_name_the_line() {
    let header = CalibrationHeader::new("demo", SHAPE).to_line().unwrap();
    let line = record("law").to_line().unwrap();
    let check = |text: &str, expected: &str| {
        let error = CalibrationFile::parse(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check("", "empty file");
    check("{}", "line 1: missing field");
    check(
        &header.replace("colocate-calibration", "x"),
        "line 1: expected format",
    );
    check(&header.replace(":1,", ":2,"), "line 1: expected version 1");
    check(
        &header.replace("\"top_k\":2", "\"top_k\":6"),
        "line 1: expected top_k between 1 and 5",
    );
    check(&format!("{header}\n{line}\n{{"), "line 3: EOF");
    check(
        &format!("{header}\n\n{}", line.replace("output_counts", "x")),
        "line 3: unknown field",
    );
    let other = header.replace("\"experts\":5", "\"experts\":6");
    check(
        &format!("{other}\n{line}"),
        "line 2: prompt_counts: expected a model of 2 MoE layers x 6",
    );
    check(
        &format!("{header}\n{{\"prompt_counts\":\"AAAA\"}}"),
        "line 2: prompt_counts: truncated",
    );
}
