//! What `config.json` and `generation_config.json` say, checked.

use std::path::{Path, PathBuf};

use experts::ModelShape;
use serde::Deserialize;
use serde_json::Value;

use crate::checkpoint::LoadError;

/// Shape and constants of a Qwen3-MoE model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Rows of the embedding and of the logits.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head, even.
    pub head_dim: usize,
    /// Intermediate size of the dense layers; 0 when every layer is an MoE layer and config.json does not say.
    pub intermediate_size: usize,
    /// Intermediate size of one expert, without padding.
    pub moe_intermediate_size: usize,
    /// Experts per MoE layer, at most 65,536.
    pub experts: usize,
    /// Experts that each token chooses.
    pub top_k: usize,
    /// Whether the chosen experts' probabilities are scaled to sum to 1.
    pub norm_topk_prob: bool,
    /// Decoder layers that are MoE layers, rising; at least one.
    pub moe_layers: Vec<usize>,
    /// Added to the mean square in every RMSNorm.
    pub rms_norm_eps: f32,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Whether the logits use the embedding's weights.
    pub tie_word_embeddings: bool,
    /// Positions from here on are outside the model's range.
    pub max_positions: usize,
    /// Tokens that end a generation: from generation_config.json, else from config.json; may be empty.
    pub eos_token_ids: Vec<u32>,
}

/// `eos_token_id` is a number in some files and a list in others.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl OneOrMany {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

/// The keys of `config.json` that matter, as they come. Absent and `null` are the same.
#[derive(Debug, Deserialize)]
struct RawConfig {
    model_type: Option<String>,
    architectures: Option<Vec<String>>,
    vocab_size: Option<u64>,
    hidden_size: Option<u64>,
    num_hidden_layers: Option<u64>,
    num_attention_heads: Option<u64>,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    intermediate_size: Option<u64>,
    moe_intermediate_size: Option<u64>,
    num_experts: Option<u64>,
    num_local_experts: Option<u64>,
    num_experts_per_tok: Option<u64>,
    norm_topk_prob: Option<bool>,
    mlp_only_layers: Option<Vec<u64>>,
    decoder_sparse_step: Option<u64>,
    hidden_act: Option<String>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<Value>,
    partial_rotary_factor: Option<f64>,
    attention_bias: Option<bool>,
    use_sliding_window: Option<bool>,
    layer_types: Option<Vec<String>>,
    tie_word_embeddings: Option<bool>,
    max_position_embeddings: Option<u64>,
    quantization_config: Option<Value>,
    eos_token_id: Option<OneOrMany>,
}

#[derive(Debug, Deserialize)]
struct RawGenerationConfig {
    eos_token_id: Option<OneOrMany>,
}

/// No size in a sane configuration is larger; products of three of them do not overflow.
const LARGEST_SIZE: u64 = 1 << 20;

impl ModelConfig {
    /// Reads `config.json` and, if there is one, `generation_config.json` in `dir`.
    ///
    /// # Errors
    /// When a file is missing, is not JSON, lacks a key, or asks for something that the engine does not do.
    pub fn read(dir: &Path) -> Result<Self, LoadError> {
        let path = dir.join("config.json");
        let raw: RawConfig = read_json(&path)?;
        let mut config = Checked { path: &path }.config(raw)?;
        let generation = dir.join("generation_config.json");
        if generation.exists() {
            let raw: RawGenerationConfig = read_json(&generation)?;
            if let Some(ids) = raw.eos_token_id {
                config.eos_token_ids = ids.into_vec();
            }
        }
        Ok(config)
    }

    /// What a router sees of the model: its MoE layers only.
    #[must_use]
    pub fn shape(&self) -> ModelShape {
        ModelShape {
            layers: self.moe_layers.len() as u32,
            experts: self.experts as u32,
            top_k: self.top_k as u32,
        }
    }

    /// Whether decoder layer `layer` is an MoE layer.
    #[must_use]
    pub fn is_moe_layer(&self, layer: usize) -> bool {
        self.moe_layers.binary_search(&layer).is_ok()
    }
}

fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, LoadError> {
    let text = std::fs::read(path).map_err(|source| LoadError::Io {
        path: path.to_path_buf(),
        source,
    })?;
    serde_json::from_slice(&text).map_err(|source| LoadError::Json {
        path: path.to_path_buf(),
        source,
    })
}

/// Turns raw keys into a configuration; every error names the file.
struct Checked<'a> {
    path: &'a Path,
}

impl Checked<'_> {
    fn path(&self) -> PathBuf {
        self.path.to_path_buf()
    }

    fn invalid(&self, reason: impl Into<String>) -> LoadError {
        LoadError::Config {
            path: self.path(),
            reason: reason.into(),
        }
    }

    fn unsupported(&self, what: impl Into<String>) -> LoadError {
        LoadError::Unsupported {
            path: self.path(),
            what: what.into(),
        }
    }

    /// A size that must be there, from 1 to [`LARGEST_SIZE`].
    fn size(&self, key: &str, value: Option<u64>) -> Result<usize, LoadError> {
        let value = value.ok_or_else(|| self.invalid(format!("missing {key}")))?;
        if value == 0 || value > LARGEST_SIZE {
            return Err(self.invalid(format!("{key} is {value}, expected 1 to {LARGEST_SIZE}")));
        }
        Ok(value as usize)
    }

    fn config(&self, raw: RawConfig) -> Result<ModelConfig, LoadError> {
        self.refuse_unsupported(&raw)?;
        let layers = self.size("num_hidden_layers", raw.num_hidden_layers)?;
        let hidden_size = self.size("hidden_size", raw.hidden_size)?;
        let heads = self.size("num_attention_heads", raw.num_attention_heads)?;
        let kv_heads = self.size(
            "num_key_value_heads",
            raw.num_key_value_heads.or(raw.num_attention_heads),
        )?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(self.invalid(format!(
                "num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )));
        }
        let head_dim = match raw.head_dim {
            Some(_) => self.size("head_dim", raw.head_dim)?,
            None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
            None => {
                return Err(self.invalid(format!("no head_dim, and hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}")));
            }
        };
        if !head_dim.is_multiple_of(2) {
            return Err(self.invalid(format!("head_dim is {head_dim}, expected an even number")));
        }
        let experts = self.size(
            "num_experts (or num_local_experts)",
            raw.num_experts.or(raw.num_local_experts),
        )?;
        if experts > usize::from(u16::MAX) + 1 {
            return Err(self.unsupported(format!("{experts} experts (at most 65536)")));
        }
        let top_k = self.size("num_experts_per_tok", raw.num_experts_per_tok)?;
        if top_k > experts {
            return Err(self.invalid(format!(
                "num_experts_per_tok is {top_k}, but there are {experts} experts"
            )));
        }
        let moe_layers = self.moe_layers(&raw, layers)?;
        let intermediate_size = if moe_layers.len() == layers {
            raw.intermediate_size.unwrap_or(0) as usize
        } else {
            self.size("intermediate_size", raw.intermediate_size)?
        };
        let rms_norm_eps = raw.rms_norm_eps.unwrap_or(1e-6);
        if !(rms_norm_eps > 0.0 && rms_norm_eps < 1.0) {
            return Err(self.invalid(format!(
                "rms_norm_eps is {rms_norm_eps}, expected a number between 0 and 1"
            )));
        }
        Ok(ModelConfig {
            vocab_size: self.size("vocab_size", raw.vocab_size)?,
            hidden_size,
            layers,
            heads,
            kv_heads,
            head_dim,
            intermediate_size,
            moe_intermediate_size: self.size("moe_intermediate_size", raw.moe_intermediate_size)?,
            experts,
            top_k,
            norm_topk_prob: raw.norm_topk_prob.unwrap_or(false),
            moe_layers,
            rms_norm_eps: rms_norm_eps as f32,
            rope_theta: self.rope_theta(&raw)?,
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            max_positions: self.size(
                "max_position_embeddings",
                Some(raw.max_position_embeddings.unwrap_or(32_768)),
            )?,
            eos_token_ids: raw
                .eos_token_id
                .map(OneOrMany::into_vec)
                .unwrap_or_default(),
        })
    }

    fn refuse_unsupported(&self, raw: &RawConfig) -> Result<(), LoadError> {
        let architecture = raw.architectures.as_ref().and_then(|names| names.first());
        let is_qwen3_moe = match (&raw.model_type, architecture) {
            (Some(name), _) => name == "qwen3_moe",
            (None, Some(name)) => name == "Qwen3MoeForCausalLM",
            (None, None) => return Err(self.invalid("neither model_type nor architectures")),
        };
        if !is_qwen3_moe {
            let name = raw
                .model_type
                .as_ref()
                .or(architecture)
                .map_or("", String::as_str);
            return Err(self.unsupported(format!("architecture {name:?} (only qwen3_moe)")));
        }
        if raw.quantization_config.is_some() {
            return Err(self.unsupported("quantised weights (quantization_config)"));
        }
        if raw.attention_bias == Some(true) {
            return Err(self.unsupported("attention_bias"));
        }
        if raw.use_sliding_window == Some(true) {
            return Err(self.unsupported("use_sliding_window"));
        }
        if let Some(kind) = raw
            .layer_types
            .iter()
            .flatten()
            .find(|kind| *kind != "full_attention")
        {
            return Err(self.unsupported(format!("layer type {kind:?} (only full_attention)")));
        }
        if let Some(act) = raw.hidden_act.as_ref().filter(|act| *act != "silu") {
            return Err(self.unsupported(format!("hidden_act {act:?} (only silu)")));
        }
        if let Some(factor) = raw.partial_rotary_factor.filter(|factor| *factor != 1.0) {
            return Err(self.unsupported(format!("partial_rotary_factor {factor}")));
        }
        Ok(())
    }

    fn moe_layers(&self, raw: &RawConfig, layers: usize) -> Result<Vec<usize>, LoadError> {
        let step = self.size(
            "decoder_sparse_step",
            Some(raw.decoder_sparse_step.unwrap_or(1)),
        )?;
        let dense = raw.mlp_only_layers.as_deref().unwrap_or_default();
        let moe: Vec<usize> = (0..layers)
            .filter(|&layer| !dense.contains(&(layer as u64)) && (layer + 1).is_multiple_of(step))
            .collect();
        if moe.is_empty() {
            return Err(self.unsupported("a model without MoE layers"));
        }
        Ok(moe)
    }

    /// `rope_theta` at the top (older files) or inside `rope_parameters` (newer ones), where `rope_type` may ask for more.
    fn rope_theta(&self, raw: &RawConfig) -> Result<f64, LoadError> {
        for (key, value) in [
            ("rope_scaling", &raw.rope_scaling),
            ("rope_parameters", &raw.rope_parameters),
        ] {
            let Some(value) = value else { continue };
            let Some(fields) = value.as_object() else {
                return Err(self.invalid(format!("{key} is not an object")));
            };
            if let Some(kind) = fields
                .get("rope_type")
                .or_else(|| fields.get("type"))
                .filter(|kind| **kind != "default")
            {
                return Err(self.unsupported(format!("{key} of type {kind} (only \"default\")")));
            }
            if fields
                .get("partial_rotary_factor")
                .and_then(Value::as_f64)
                .is_some_and(|factor| factor != 1.0)
            {
                return Err(self.unsupported(format!("partial_rotary_factor in {key}")));
            }
        }
        let inside = raw
            .rope_parameters
            .as_ref()
            .and_then(|fields| fields.get("rope_theta"));
        let theta = match (inside, raw.rope_theta) {
            (Some(theta), _) => theta
                .as_f64()
                .ok_or_else(|| self.invalid("rope_theta in rope_parameters is not a number"))?,
            (None, Some(theta)) => theta,
            (None, None) => 10_000.0,
        };
        if !(theta.is_finite() && theta > 1.0) {
            return Err(self.invalid(format!("rope_theta is {theta}, expected a number above 1")));
        }
        Ok(theta)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    fn base() -> Value {
        json!({
            "model_type": "qwen3_moe", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": true, "rope_theta": 1e6, "eos_token_id": 3,
        })
    }

    fn read(config: &Value, generation: Option<&Value>) -> Result<ModelConfig, LoadError> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        if let Some(generation) = generation {
            std::fs::write(
                dir.path().join("generation_config.json"),
                generation.to_string(),
            )
            .unwrap();
        }
        ModelConfig::read(dir.path())
    }

    fn with(changes: &Value) -> Value {
        let mut config = base();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        config
    }

    #[test]
    fn reads_both_spellings() {
        let old = read(&base(), None).unwrap();
        assert_eq!(
            (old.experts, old.rope_theta, old.moe_layers.len()),
            (8, 1e6, 4)
        );
        assert_eq!(old.eos_token_ids, [3]);
        let mut new = with(
            &json!({"num_local_experts": 8, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
        );
        new.as_object_mut().unwrap().remove("num_experts");
        new.as_object_mut().unwrap().remove("rope_theta");
        assert_eq!(read(&new, None).unwrap(), old);
    }

    #[test]
    fn generation_config_has_the_last_word_on_eos() {
        let config = read(&base(), Some(&json!({"eos_token_id": [5, 6]}))).unwrap();
        assert_eq!(config.eos_token_ids, [5, 6]);
        assert_eq!(read(&base(), Some(&json!({}))).unwrap().eos_token_ids, [3]);
    }

    #[test]
    fn finds_the_moe_layers() {
        for (changes, moe) in [
            (
                json!({"mlp_only_layers": [0, 2], "intermediate_size": 48}),
                vec![1, 3],
            ),
            (
                json!({"decoder_sparse_step": 2, "intermediate_size": 48}),
                vec![1, 3],
            ),
            (
                json!({"decoder_sparse_step": 2, "mlp_only_layers": [3], "intermediate_size": 48}),
                vec![1],
            ),
        ] {
            assert_eq!(read(&with(&changes), None).unwrap().moe_layers, moe);
        }
    }

    #[test]
    fn head_dim_falls_back_on_the_hidden_size() {
        let config = with(&json!({"head_dim": null}));
        assert_eq!(read(&config, None).unwrap().head_dim, 8);
    }

    #[test]
    fn names_what_it_refuses() {
        for (changes, words) in [
            (json!({"model_type": "mixtral"}), "architecture \"mixtral\""),
            (
                json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
                "\"yarn\"",
            ),
            (
                json!({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}),
                "\"linear\"",
            ),
            (json!({"use_sliding_window": true}), "use_sliding_window"),
            (
                json!({"layer_types": ["sliding_attention"]}),
                "sliding_attention",
            ),
            (json!({"attention_bias": true}), "attention_bias"),
            (
                json!({"quantization_config": {"quant_method": "awq"}}),
                "quantization_config",
            ),
            (json!({"hidden_act": "gelu"}), "gelu"),
            (
                json!({"mlp_only_layers": [0, 1, 2, 3]}),
                "without MoE layers",
            ),
            (json!({"num_experts": null}), "missing num_experts"),
            (json!({"num_experts": 0}), "num_experts"),
            (json!({"num_experts": 70_000}), "70000 experts"),
            (json!({"num_experts_per_tok": 9}), "there are 8 experts"),
            (json!({"num_key_value_heads": 3}), "not a multiple"),
            (json!({"head_dim": 15}), "even"),
            (json!({"hidden_size": u64::MAX}), "hidden_size"),
            (json!({"rope_theta": -1.0}), "rope_theta"),
            (json!({"vocab_size": "many"}), "config.json"),
            (json!({"mlp_only_layers": [0]}), "missing intermediate_size"),
        ] {
            let message = read(&with(&changes), None).unwrap_err().to_string();
            assert!(message.contains(words), "{changes}: {message}");
        }
        let dir = tempfile::tempdir().unwrap();
        assert!(
            ModelConfig::read(dir.path())
                .unwrap_err()
                .to_string()
                .contains("config.json")
        );
        std::fs::write(dir.path().join("config.json"), "{\"model_type\": ").unwrap();
        assert!(
            ModelConfig::read(dir.path())
                .unwrap_err()
                .to_string()
                .contains("config.json")
        );
    }
}
