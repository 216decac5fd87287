//! Bad directories are errors that name the file or the tensor, never panics.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use engine::testing::{RandomModel, write_random_checkpoint};
use engine::{LoadError, LoadOptions, Model};
use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};

fn model_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_random_checkpoint(
        dir.path(),
        &RandomModel {
            layers: 2,
            ..RandomModel::default()
        },
        3,
    )
    .unwrap();
    dir
}

fn load(dir: &Path) -> Result<Model, LoadError> {
    Model::load(dir, &LoadOptions::default())
}

fn message(dir: &Path) -> String {
    load(dir).unwrap_err().to_string()
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn read(dir: &Path) -> Tensors {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(name, view)| {
            (
                name.to_owned(),
                (view.dtype(), view.shape().to_vec(), view.data().to_vec()),
            )
        })
        .collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn change(dir: &Path, edit: impl FnOnce(&mut Tensors)) {
    let mut tensors = read(dir);
    edit(&mut tensors);
    write(&dir.join("model.safetensors"), &tensors);
}

fn set_config(dir: &Path, key: &str, value: Value) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config[key] = value;
    std::fs::write(path, config.to_string()).unwrap();
}

fn values(tensor: &(Dtype, Vec<usize>, Vec<u8>)) -> Vec<f32> {
    tensor
        .2
        .chunks_exact(2)
        .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
        .collect()
}

#[test]
fn names_a_tensor_that_is_missing_or_of_another_shape() {
    for name in [
        "model.norm.weight",
        "model.layers.1.mlp.experts.7.down_proj.weight",
        "model.layers.0.self_attn.k_norm.weight",
    ] {
        let dir = model_dir();
        change(dir.path(), |tensors| {
            tensors.remove(name);
        });
        assert!(message(dir.path()).contains(&format!("no tensor {name}")));

        let dir = model_dir();
        change(dir.path(), |tensors| {
            tensors.get_mut(name).unwrap().1.insert(0, 1)
        });
        let text = message(dir.path());
        assert!(
            text.contains(name) && text.contains("expected") && text.contains("[1, "),
            "{text}"
        );
    }
    let dir = model_dir();
    set_config(dir.path(), "hidden_size", json!(33));
    let text = message(dir.path());
    assert!(
        text.contains("model.embed_tokens.weight has shape [259, 32], expected [259, 33]"),
        "{text}"
    );
    let dir = model_dir();
    set_config(dir.path(), "tie_word_embeddings", json!(false));
    assert!(message(dir.path()).contains("no tensor lm_head.weight"));
}

#[test]
fn refuses_what_it_does_not_compute() {
    let integers = (Dtype::I32, vec![32], vec![0; 128]);
    for (name, tensor, words) in [
        (
            "model.norm.weight",
            integers.clone(),
            "tensor model.norm.weight of type I32",
        ),
        (
            "model.layers.0.self_attn.q_proj.bias",
            (Dtype::BF16, vec![64], vec![0; 128]),
            "q_proj.bias",
        ),
        (
            "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv",
            integers,
            "weight_scale_inv",
        ),
    ] {
        let dir = model_dir();
        change(dir.path(), |tensors| {
            tensors.insert(name.to_owned(), tensor);
        });
        let text = message(dir.path());
        assert!(
            text.contains("not supported") && text.contains(words),
            "{text}"
        );
    }
    let dir = model_dir();
    for padding in [0, 1025] {
        let error = Model::load(
            dir.path(),
            &LoadOptions {
                expert_padding: padding,
            },
        )
        .unwrap_err();
        assert!(error.to_string().contains("padding"));
    }
}

#[test]
fn a_tensor_that_nobody_needs_is_fine() {
    let dir = model_dir();
    change(dir.path(), |tensors| {
        tensors.insert(
            "model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(),
            (Dtype::F32, vec![2], vec![0; 8]),
        );
    });
    load(dir.path()).unwrap();
}

#[test]
fn a_file_that_is_cut_or_scrambled_is_an_error() {
    let dir = model_dir();
    let path = dir.path().join("model.safetensors");
    let good = std::fs::read(&path).unwrap();
    for len in [0, 1, 7, 8, 9, 100, good.len() / 2, good.len() - 1] {
        std::fs::write(&path, &good[..len]).unwrap();
        let text = message(dir.path());
        assert!(text.contains("model.safetensors"), "{len}: {text}");
    }
    std::fs::write(&path, [good.clone(), vec![0]].concat()).unwrap();
    assert!(message(dir.path()).contains("damaged"));
    std::fs::remove_file(&path).unwrap();
    assert!(message(dir.path()).contains("model.safetensors"));

    // Any byte of the header, or of the configuration, may be anything: an error or a model, never a panic.
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    for _ in 0..300 {
        let mut bad = good.clone();
        for _ in 0..rng.random_range(1..4) {
            bad[rng.random_range(0..header)] = rng.random();
        }
        std::fs::write(&path, bad).unwrap();
        let _ = load(dir.path());
    }
    std::fs::write(&path, &good).unwrap();
    let config_path = dir.path().join("config.json");
    let config = std::fs::read(&config_path).unwrap();
    for _ in 0..300 {
        let mut bad = config.clone();
        let at = rng.random_range(0..bad.len());
        bad[at] = b"0123456789,:\"{}[]eE-nt "[rng.random_range(0..23)];
        std::fs::write(&config_path, bad).unwrap();
        let _ = load(dir.path());
    }
}

#[test]
fn shards_may_be_wrong_too() {
    let dir = model_dir();
    let tensors = read(dir.path());
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let (mut first, mut second) = (Tensors::new(), Tensors::new());
    let mut map = BTreeMap::new();
    for (i, (name, tensor)) in tensors.into_iter().enumerate() {
        let (shard, tensors) = if i % 2 == 0 {
            ("a.safetensors", &mut first)
        } else {
            ("b.safetensors", &mut second)
        };
        map.insert(name.clone(), shard.to_owned());
        tensors.insert(name, tensor);
    }
    write(&dir.path().join("a.safetensors"), &first);
    write(&dir.path().join("b.safetensors"), &second);
    let index = dir.path().join("model.safetensors.index.json");
    let write_index = |map: &BTreeMap<String, String>| {
        std::fs::write(&index, json!({"weight_map": map}).to_string()).unwrap()
    };
    write_index(&map);
    load(dir.path()).unwrap();

    let mut outside = map.clone();
    outside.insert(
        "model.norm.weight".to_owned(),
        "../model.safetensors".to_owned(),
    );
    write_index(&outside);
    assert!(message(dir.path()).contains("expected a file of this folder"));

    let mut swapped = map.clone();
    for shard in swapped.values_mut() {
        *shard = "a.safetensors".to_owned();
    }
    write_index(&swapped);
    let text = message(dir.path());
    assert!(text.contains("a.safetensors: no tensor"), "{text}");

    write_index(&map);
    std::fs::remove_file(dir.path().join("b.safetensors")).unwrap();
    assert!(message(dir.path()).contains("b.safetensors"));
    std::fs::write(&index, "{\"weight_map\": 1}").unwrap();
    assert!(message(dir.path()).contains("index.json"));
}

#[test]
fn other_float_types_are_rounded_to_bf16() {
    let dir = model_dir();
    let tokens: Vec<u32> = (0..20).collect();
    let reference = common::whole(&load(dir.path()).unwrap(), &tokens);
    // bf16 values are exact in f32; small random ones are nearly all exact in f16.
    change(dir.path(), |tensors| {
        for tensor in tensors.values_mut() {
            *tensor = (
                Dtype::F32,
                tensor.1.clone(),
                values(tensor)
                    .iter()
                    .flat_map(|x| x.to_le_bytes())
                    .collect(),
            );
        }
    });
    assert_eq!(
        common::whole(&load(dir.path()).unwrap(), &tokens),
        reference
    );
    let dir = model_dir();
    change(dir.path(), |tensors| {
        for (name, tensor) in tensors.iter_mut().filter(|(name, _)| name.contains("norm")) {
            assert!(
                values(tensor)
                    .iter()
                    .all(|&x| f16::from_f32(x).to_f32() == x),
                "{name}"
            );
            let halves = values(tensor)
                .iter()
                .flat_map(|&x| f16::from_f32(x).to_le_bytes())
                .collect();
            *tensor = (Dtype::F16, tensor.1.clone(), halves);
        }
    });
    assert_eq!(
        common::whole(&load(dir.path()).unwrap(), &tokens),
        reference
    );
}

#[test]
fn fused_experts_are_the_same_experts() {
    let dir = model_dir();
    let tokens: Vec<u32> = (0..20).collect();
    let reference = common::whole(&load(dir.path()).unwrap(), &tokens);
    change(dir.path(), |tensors| {
        for layer in 0..2 {
            let prefix = format!("model.layers.{layer}.mlp.experts");
            let (mut gate_up, mut down) = (Vec::new(), Vec::new());
            for expert in 0..8 {
                let mut take = |part: &str| {
                    tensors
                        .remove(&format!("{prefix}.{expert}.{part}_proj.weight"))
                        .unwrap()
                        .2
                };
                gate_up.extend(take("gate"));
                gate_up.extend(take("up"));
                down.extend(take("down"));
            }
            tensors.insert(
                format!("{prefix}.gate_up_proj"),
                (Dtype::BF16, vec![8, 32, 32], gate_up),
            );
            tensors.insert(
                format!("{prefix}.down_proj"),
                (Dtype::BF16, vec![8, 32, 16], down),
            );
        }
    });
    assert_eq!(
        common::whole(&load(dir.path()).unwrap(), &tokens),
        reference
    );
}
