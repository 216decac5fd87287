//! The wire form: round trips, its bound on size, and whatever else a text may hold.
#![allow(clippy::unwrap_used)]

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use experts::wire::{self, max_encoded_len};
use experts::{ExpertCounts, ModelShape, PromptCounts, WireError};
use proptest::prelude::*;

const LARGE: ModelShape = ModelShape {
    layers: 48,
    experts: 128,
    top_k: 8,
};

/// Counts of one layer that sum to `tokens * top_k`, none above `tokens`, as `weights` say.
fn layer(weights: &[f64], tokens: u32, top_k: u32) -> Vec<u32> {
    let total: f64 = weights.iter().sum();
    let sum = u64::from(tokens) * u64::from(top_k);
    let mut row: Vec<u32> = weights
        .iter()
        .map(|w| ((w / total * sum as f64) as u32).min(tokens))
        .collect();
    let mut short = sum.saturating_sub(row.iter().map(|&c| u64::from(c)).sum());
    for cell in &mut row {
        let more = short.min(u64::from(tokens - *cell));
        *cell += more as u32;
        short -= more;
    }
    row
}

fn prompt(shape: ModelShape, tokens: u32, weights: impl Fn(usize, usize) -> f64) -> PromptCounts {
    let cells = (0..shape.layers as usize)
        .flat_map(|l| {
            let row: Vec<f64> = (0..shape.experts as usize).map(|e| weights(l, e)).collect();
            layer(&row, tokens, shape.top_k)
        })
        .collect();
    PromptCounts::new(ExpertCounts::from_vec(shape, cells).unwrap(), tokens).unwrap()
}

#[test]
fn eight_thousand_tokens_fit_in_16_kib_however_spread() {
    assert_eq!(max_encoded_len(LARGE, 8192), 11_332);
    let noise = |l: usize, e: usize| ((l * 7919 + e * 104_729) % 1009) as f64 / 1009.0;
    type Weights = Box<dyn Fn(usize, usize) -> f64>;
    let spreads: [(&str, Weights); 9] = [
        ("even", Box::new(|_, _| 1.0)),
        ("one above even", Box::new(|_, e| 1.0 + 1e-3 * e as f64)),
        (
            "all on top-k",
            Box::new(|l, e| if (e + l) % 16 == 0 { 1.0 } else { 1e-12 }),
        ),
        (
            "half the experts",
            Box::new(|_, e| if e % 2 == 0 { 1.0 } else { 0.0 }),
        ),
        ("geometric", Box::new(|_, e| 0.9f64.powi(e as i32))),
        ("steep", Box::new(|_, e| 0.5f64.powi(e as i32))),
        ("random", Box::new(noise)),
        (
            "heavy tail",
            Box::new(move |l, e| 1.0 / (1e-3 + noise(l, e))),
        ),
        ("lognormal", Box::new(move |l, e| (3.0 * noise(l, e)).exp())),
    ];
    for (name, weights) in spreads {
        let prompt = prompt(LARGE, 8192, weights);
        let text = prompt.encode();
        assert!(text.len() <= 11_332, "{name}: {}", text.len());
        assert_eq!(PromptCounts::decode(&text).unwrap(), prompt, "{name}");
    }
}

/// For every Rice parameter the spread that is worst for it: counts just above multiples of 2^r.
#[test]
fn spreads_made_against_the_code_stay_within_its_bound() {
    for tokens in [1, 17, 512, 8192, 65_536] {
        let bound = max_encoded_len(LARGE, tokens);
        for r in 0..17 {
            for offset in [0u32, 1] {
                let step = f64::from((1u32 << r) + offset);
                let prompt = prompt(LARGE, tokens, |_, e| step * (1 + e % 3) as f64);
                let text = prompt.encode();
                assert!(
                    text.len() <= bound,
                    "{tokens} tokens, r {r}: {}",
                    text.len()
                );
                assert_eq!(PromptCounts::decode(&text).unwrap(), prompt);
            }
        }
    }
}

#[test]
fn short_prompts_are_small() {
    let text = prompt(LARGE, 100, |l, e| ((l + e) % 40) as f64 + 0.1).encode();
    assert!(text.len() < 5000, "{}", text.len());
}

/// The layout, byte by byte: another implementation must write the same.
#[test]
fn the_layout_is_as_documented() {
    let shape = ModelShape {
        layers: 2,
        experts: 4,
        top_k: 2,
    };
    let counts = ExpertCounts::from_vec(shape, vec![3, 1, 1, 1, 3, 3, 0, 0]).unwrap();
    let prompt = PromptCounts::new(counts, 5).unwrap();
    let bytes = wire::to_bytes(&prompt);
    assert_eq!(bytes[..15], [1, 2, 0, 4, 0, 2, 0, 3, 0, 0, 0, 5, 0, 0, 0]);
    let bits: String = bytes[15..].iter().map(|b| format!("{b:08b}")).collect();
    // Dense with r = 1, 9 bits; then dense with r = 0, 10 bits as the sparse form would take too.
    let first = ["000001", "011", "11", "11", "11"];
    let second = ["000000", "0001", "0001", "1", "1"];
    let expected = first.concat() + &second.concat();
    assert_eq!(bits.trim_end_matches('0'), expected);
    assert_eq!(STANDARD.encode(&bytes), prompt.encode());
    assert_eq!((prompt.covered_tokens(), prompt.prompt_tokens()), (3, 5));
}

/// Any shape and counts that tokens can leave.
fn any_prompt() -> impl Strategy<Value = PromptCounts> {
    (1u32..6, 1u32..40, 0u32..3000)
        .prop_flat_map(|(layers, experts, tokens)| {
            (
                Just((layers, experts, tokens)),
                1..=experts,
                prop::collection::vec(
                    prop_oneof![Just(0.0), 0.0..1.0f64, 0.0..1000.0f64],
                    (layers * experts) as usize,
                ),
                0u32..50,
            )
        })
        .prop_map(|((layers, experts, tokens), top_k, weights, more)| {
            let shape = ModelShape {
                layers,
                experts,
                top_k,
            };
            let cells = weights
                .chunks(experts as usize)
                .flat_map(|row| {
                    let row: Vec<f64> = row.iter().map(|w| w + 1e-9).collect();
                    layer(&row, tokens, top_k)
                })
                .collect();
            let counts = ExpertCounts::from_vec(shape, cells).unwrap();
            PromptCounts::new(counts, tokens + more).unwrap()
        })
}

proptest! {
    #[test]
    fn round_trip(prompt in any_prompt()) {
        let text = prompt.encode();
        prop_assert!(text.len() <= max_encoded_len(prompt.shape(), prompt.covered_tokens()));
        prop_assert_eq!(PromptCounts::decode(&text).unwrap(), prompt);
    }

    #[test]
    fn every_truncation_is_an_error(prompt in any_prompt()) {
        let bytes = wire::to_bytes(&prompt);
        for length in 0..bytes.len() {
            prop_assert!(wire::from_bytes(&bytes[..length]).is_err());
        }
        let mut longer = bytes;
        longer.push(0);
        prop_assert_eq!(wire::from_bytes(&longer), Err(WireError::Trailing));
    }

    /// Whatever is read keeps to the invariant, and is written back to something equal.
    #[test]
    fn flipped_bits_never_panic(prompt in any_prompt(), flips in prop::collection::vec(any::<u16>(), 1..5)) {
        let mut bytes = wire::to_bytes(&prompt);
        for flip in flips {
            let at = flip as usize % (bytes.len() * 8);
            bytes[at / 8] ^= 1 << (at % 8);
        }
        if let Ok(read) = wire::from_bytes(&bytes) {
            let again = PromptCounts::new(read.counts().clone(), read.prompt_tokens()).unwrap();
            prop_assert_eq!(&again, &read);
            prop_assert_eq!(wire::from_bytes(&wire::to_bytes(&read)).unwrap(), read);
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = wire::from_bytes(&bytes);
        let _ = PromptCounts::decode(&STANDARD.encode(&bytes));
        // Past the version and the shape.
        let mut headed = vec![1, 2, 0, 8, 0, 2, 0];
        headed.extend(bytes);
        let _ = wire::from_bytes(&headed);
    }

    #[test]
    fn random_text_never_panics(text in "\\PC*") {
        prop_assert!(PromptCounts::decode(&text).is_err());
    }
}

#[test]
fn errors_name_what_is_wrong() {
    let shape = ModelShape {
        layers: 1,
        experts: 4,
        top_k: 2,
    };
    let good = wire::to_bytes(&prompt(shape, 3, |_, _| 1.0));
    let check = |change: &dyn Fn(&mut Vec<u8>), expected: &str| {
        let mut bytes = good.clone();
        change(&mut bytes);
        let error = wire::from_bytes(&bytes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(
        &|b| b[0] = 2,
        "expected version 1 of the counts form, got 2",
    );
    check(&|b| b[1] = 0, "expected layers between 1 and 1024, got 0");
    check(&|b| b[4] = 0xff, "expected experts between 1 and 8192");
    check(&|b| b[5] = 5, "expected top_k between 1 and 4, got 5");
    check(
        &|b| b[7] = 4,
        "expected counts of at most 3 prompt tokens, got 4",
    );
    check(&|b| b[7] = 2, "layer 0");
    check(&|b| b.truncate(15), "expected at least 1 bytes");
    check(&|b| b.truncate(9), "expected a header of 15 bytes, got 9");
    check(&|b| b.extend([0, 0]), "nothing after the last layer");
    // A shape of a thousand layers needs a text to match.
    check(&|b| (b[1], b[2]) = (0, 4), "expected at least 512 bytes");
    let long = "A".repeat(wire::MAX_TEXT + 4);
    assert!(matches!(
        PromptCounts::decode(&long),
        Err(WireError::TooLong { .. })
    ));
    assert!(matches!(
        PromptCounts::decode("not base64!"),
        Err(WireError::Base64(_))
    ));
    assert!(matches!(
        PromptCounts::decode(""),
        Err(WireError::Truncated { .. })
    ));
}

#[test]
fn gate_values_travel_too() {
    let shape = ModelShape {
        layers: 2,
        experts: 2,
        top_k: 1,
    };
    let values = [0.5, -1.25, 3.0, f32::MIN_POSITIVE];
    let text = wire::encode_values(&values);
    assert_eq!(wire::decode_values(&text, shape).unwrap(), values);
    assert!(matches!(
        wire::decode_values(&wire::encode_values(&values[1..]), shape),
        Err(WireError::Shape(_))
    ));
    assert!(matches!(
        wire::decode_values(&wire::encode_values(&[0.0, f32::NAN, 0.0, 0.0]), shape),
        Err(WireError::NotFinite { index: 1, .. })
    ));
}

/// The fixture that the Python package reads and writes too: one line each of text and counts.
/// `COLOCATE_WRITE_FIXTURES=1` writes it anew.
#[test]
fn the_fixture_shared_with_python_holds() {
    let small = ModelShape {
        layers: 3,
        experts: 8,
        top_k: 2,
    };
    let even = prompt(small, 21, |_, _| 1.0);
    let steep = prompt(LARGE, 500, |l, e| 0.7f64.powi(((e + l) % 128) as i32));
    let sparse = prompt(LARGE, 3, |l, e| f64::from(u8::from((e + l) % 16 == 0)));
    let part = PromptCounts::new(even.counts().clone(), 40).unwrap();
    let lines: Vec<String> = [even, steep, sparse, part]
        .iter()
        .map(|counts| {
            let cells: Vec<String> = counts
                .counts()
                .as_slice()
                .iter()
                .map(u32::to_string)
                .collect();
            format!("{} {}\n", wire::encode(counts), cells.join(","))
        })
        .collect();
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../python/colocate-vllm/tests/wire_golden.txt"
    );
    if std::env::var_os("COLOCATE_WRITE_FIXTURES").is_some() {
        std::fs::write(path, lines.concat()).unwrap();
    }
    let golden = std::fs::read_to_string(path).unwrap();
    assert_eq!(golden, lines.concat());
}
