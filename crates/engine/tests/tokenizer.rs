//! Text and ids there and back, streaming, chat templates.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use engine::testing::{IM_END, IM_START, RandomModel, write_random_checkpoint};
use engine::tokenizer::{ChatOptions, Detokenizer, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

fn model_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_random_checkpoint(dir.path(), &RandomModel::default(), 1).unwrap();
    dir
}

/// The tiny tokenizer with another decoder, so that decoding goes through the tokenizers crate.
fn indirect(dir: &Path) -> Tokenizer {
    let path = dir.join("tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    file["decoder"] = json!({"type": "Sequence", "decoders": [file["decoder"]]});
    std::fs::write(&path, file.to_string()).unwrap();
    Tokenizer::load(dir).unwrap()
}

fn stream(tokenizer: &Tokenizer, ids: &[u32], skip: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(skip);
    let mut pieces: Vec<String> = ids
        .iter()
        .map(|&id| detokenizer.push(tokenizer, id).unwrap())
        .collect();
    pieces.push(detokenizer.finish(tokenizer).unwrap());
    pieces
}

#[test]
fn text_goes_there_and_back() {
    let dir = model_dir();
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    for text in ["", "plain", "Grüße, 世界 🦀\n\ttab", "<|im_start|>user"] {
        let ids = tokenizer.encode(text, true).unwrap();
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    }
    assert_eq!(
        tokenizer.encode("<|im_start|>a", false).unwrap(),
        [IM_START, u32::from(b'a')]
    );
    assert_eq!(tokenizer.eos_token_id(), Some(IM_END));
    assert_eq!(tokenizer.token_bytes(u32::from(b' ')).unwrap(), b" ");
    assert_eq!(tokenizer.token_bytes(0xe4).unwrap(), [0xe4]);
    assert_eq!(tokenizer.token_bytes(IM_END).unwrap(), b"<|im_end|>");
    assert!(
        tokenizer
            .token_bytes(100_000)
            .unwrap_err()
            .to_string()
            .contains("out of range")
    );
}

#[test]
fn a_character_comes_when_it_is_whole() {
    let dir = model_dir();
    let direct = Tokenizer::load(dir.path()).unwrap();
    let indirect = indirect(dir.path());
    for tokenizer in [&direct, &indirect] {
        let ids = tokenizer.encode("a€🦀", false).unwrap();
        assert_eq!(
            stream(tokenizer, &ids, true),
            ["a", "", "", "€", "", "", "", "🦀", ""]
        );
        assert_eq!(
            stream(tokenizer, &ids[..3], true),
            ["a", "", "", "\u{fffd}"]
        );
    }
}

proptest! {
    /// Any bytes, special tokens among them: pieces never hold a broken character that could still become whole, and add up.
    #[test]
    fn pieces_add_up(ids in prop::collection::vec(prop_oneof![0..256_u32, 0x80..0xf8_u32, 0xe2..0xe3_u32, 256..262_u32], 0..40), skip: bool) {
        let dir = model_dir();
        let direct = Tokenizer::load(dir.path()).unwrap();
        let indirect = indirect(dir.path());
        let whole = direct.decode(&ids, skip).unwrap();
        prop_assert_eq!(&whole, &indirect.decode(&ids, skip).unwrap());
        prop_assert_eq!(&stream(&direct, &ids, skip).concat(), &whole);
        prop_assert_eq!(&stream(&indirect, &ids, skip).concat(), &whole);
    }
}

fn with_template(template: &str) -> Result<Tokenizer, engine::LoadError> {
    let dir = model_dir();
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    Tokenizer::load(dir.path())
}

#[test]
fn renders_the_template_of_the_configuration() {
    let dir = model_dir();
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    let messages = json!([{"role": "system", "content": "Be <brief> & kind."}, {"role": "user", "content": "Hi"}]);
    let text = tokenizer
        .render_chat(&messages, &ChatOptions::default())
        .unwrap();
    assert_eq!(
        text,
        "<|im_start|>system\nBe <brief> & kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    let without = ChatOptions {
        add_generation_prompt: false,
        ..ChatOptions::default()
    };
    assert!(
        tokenizer
            .render_chat(&messages, &without)
            .unwrap()
            .ends_with("Hi<|im_end|>\n")
    );
}

#[test]
fn templates_may_use_what_python_has() {
    let template = "{%- for m in messages[::-1] %}\n    {{- m.content.strip().upper() }}\n{%- endfor %}\n\
        {%- if tools %}{{ tools | tojson }}{% endif %}\n{%- if enable_thinking is defined and not enable_thinking %} quiet{% endif %}\n\
        {%- if messages[0].content.startswith('a') %} starts{% endif %}\n{{- eos_token }}";
    let tokenizer = with_template(template).unwrap();
    let options = ChatOptions {
        tools: json!([{"name": "f", "args": {"z": 1, "a": ["<é>"]}}]),
        variables: json!({"enable_thinking": false})
            .as_object()
            .unwrap()
            .clone(),
        ..ChatOptions::default()
    };
    let messages = json!([{"role": "user", "content": "a "}, {"role": "user", "content": " b"}]);
    let text = tokenizer.render_chat(&messages, &options).unwrap();
    assert_eq!(
        text,
        "BA[{\"name\": \"f\", \"args\": {\"z\": 1, \"a\": [\"<é>\"]}}] quiet starts<|im_end|>"
    );
}

#[test]
fn says_what_is_wrong_with_a_template() {
    let message = with_template("line one\n{% if %}").unwrap_err().to_string();
    assert!(
        message.contains("chat_template.jinja") && message.contains("line 2"),
        "{message}"
    );
    let tokenizer = with_template("{{ raise_exception('roles must alternate') }}").unwrap();
    let message = tokenizer
        .render_chat(&json!([]), &ChatOptions::default())
        .unwrap_err()
        .to_string();
    assert!(message.contains("roles must alternate"), "{message}");
    let tokenizer = with_template("{{ messages[0].content.nowhere.deep }}").unwrap();
    assert!(
        tokenizer
            .render_chat(
                &json!([{"role": "user", "content": "a"}]),
                &ChatOptions::default()
            )
            .is_err()
    );
}

#[test]
fn names_the_file_that_is_missing_or_damaged() {
    let dir = model_dir();
    let path = dir.path().join("tokenizer_config.json");
    std::fs::write(&path, "{\"chat_template\": 5}").unwrap();
    assert!(
        Tokenizer::load(dir.path())
            .unwrap_err()
            .to_string()
            .contains("chat_template")
    );
    std::fs::write(&path, "{").unwrap();
    assert!(
        Tokenizer::load(dir.path())
            .unwrap_err()
            .to_string()
            .contains("tokenizer_config.json")
    );
    std::fs::remove_file(&path).unwrap();
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    let message = tokenizer
        .render_chat(&json!([]), &ChatOptions::default())
        .unwrap_err()
        .to_string();
    assert!(message.contains("no chat template"), "{message}");
    std::fs::write(dir.path().join("tokenizer.json"), "{\"version\": 1").unwrap();
    assert!(
        Tokenizer::load(dir.path())
            .unwrap_err()
            .to_string()
            .contains("tokenizer.json")
    );
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    assert!(
        Tokenizer::load(dir.path())
            .unwrap_err()
            .to_string()
            .contains("tokenizer.json")
    );
}
