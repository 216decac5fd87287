//! Tiny random models for tests, of this crate and of those above it: whole directories that load like real ones.

use std::io;
use std::path::Path;

use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value, json};

use crate::tokenizer::byte_level_alphabet;

/// Token id of `<|endoftext|>` in [`write_random_checkpoint`]'s vocabulary. Ids below are the 256 bytes.
pub const END_OF_TEXT: u32 = 256;
/// Token id of `<|im_start|>`.
pub const IM_START: u32 = 257;
/// Token id of `<|im_end|>`, which ends a generation, as [`END_OF_TEXT`] does.
pub const IM_END: u32 = 258;
/// Tokens that have a text: bytes and special tokens.
pub const VOCAB_SIZE: usize = 259;

const CHAT_TEMPLATE: &str = "{%- for message in messages %}\
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
    {%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// Shape of a random model. The default is three small MoE layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RandomModel {
    /// Rows of the embedding, at least [`VOCAB_SIZE`]; the ids above that have no text.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Decoder layers with a dense MLP instead of experts.
    pub mlp_only_layers: Vec<usize>,
    /// Intermediate size of those.
    pub intermediate_size: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Experts per MoE layer.
    pub experts: usize,
    /// Experts that each token chooses.
    pub top_k: usize,
    /// Intermediate size of an expert.
    pub moe_intermediate_size: usize,
    /// Whether the chosen experts' probabilities are scaled to sum to 1.
    pub norm_topk_prob: bool,
    /// Whether the logits use the embedding's weights.
    pub tie_word_embeddings: bool,
    /// Longest sequence.
    pub max_positions: usize,
}

impl Default for RandomModel {
    fn default() -> Self {
        Self {
            vocab_size: VOCAB_SIZE,
            hidden_size: 32,
            layers: 3,
            mlp_only_layers: Vec::new(),
            intermediate_size: 48,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            experts: 8,
            top_k: 2,
            moe_intermediate_size: 16,
            norm_topk_prob: true,
            tie_word_embeddings: true,
            max_positions: 4096,
        }
    }
}

/// Writes a random Qwen3-MoE checkpoint of this shape to `dir`, the same for the same seed: config.json, generation_config.json,
/// model.safetensors (bf16), a byte-level tokenizer (one token per byte, and three special ones) and a chat template.
///
/// Special tokens have small logits, so that a generation seldom ends by itself.
///
/// # Errors
/// When a file cannot be written.
pub fn write_random_checkpoint(dir: &Path, shape: &RandomModel, seed: u64) -> io::Result<()> {
    write_json(&dir.join("config.json"), &config(shape))?;
    write_json(
        &dir.join("generation_config.json"),
        &json!({"eos_token_id": [IM_END, END_OF_TEXT]}),
    )?;
    write_json(&dir.join("tokenizer.json"), &tokenizer())?;
    let tokenizer_config = json!({
        "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE,
    });
    write_json(&dir.join("tokenizer_config.json"), &tokenizer_config)?;
    let tensors = Random {
        generator: ChaCha8Rng::seed_from_u64(seed),
        tensors: Vec::new(),
    }
    .all(shape);
    let views: Result<Vec<_>, _> = tensors
        .iter()
        .map(|(name, shape, data)| {
            Ok((
                name,
                TensorView::new(Dtype::BF16, shape.clone(), bytemuck::cast_slice(data))?,
            ))
        })
        .collect();
    let bytes = views
        .and_then(|views| safetensors::serialize(views, None))
        .map_err(io::Error::other)?;
    std::fs::write(dir.join("model.safetensors"), bytes)
}

fn write_json(path: &Path, value: &Value) -> io::Result<()> {
    std::fs::write(path, serde_json::to_vec_pretty(value)?)
}

fn config(shape: &RandomModel) -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "mlp_only_layers": shape.mlp_only_layers,
        "decoder_sparse_step": 1,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "norm_topk_prob": shape.norm_topk_prob,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    })
}

fn tokenizer() -> Value {
    let alphabet = byte_level_alphabet();
    let chars = alphabet
        .iter()
        .enumerate()
        .filter_map(|(char, byte)| Some((char::from_u32(char as u32)?, (*byte)?)));
    let vocab: Map<String, Value> = chars
        .map(|(char, byte)| (char.to_string(), json!(byte)))
        .collect();
    let added = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
        })
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [added(END_OF_TEXT, "<|endoftext|>"), added(IM_START, "<|im_start|>"), added(IM_END, "<|im_end|>")],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [],
        },
    })
}

struct Random {
    generator: ChaCha8Rng,
    tensors: Vec<(String, Vec<usize>, Vec<bf16>)>,
}

impl Random {
    /// Uniform with the given standard deviation.
    fn sample(&mut self, deviation: f32) -> bf16 {
        let unit: f32 = self.generator.random();
        bf16::from_f32((2.0 * unit - 1.0) * 3.0_f32.sqrt() * deviation)
    }

    fn matrix(&mut self, name: String, rows: usize, columns: usize, gain: f32) {
        let deviation = gain / (columns as f32).sqrt();
        let data = (0..rows * columns)
            .map(|_| self.sample(deviation))
            .collect();
        self.tensors.push((name, vec![rows, columns], data));
    }

    fn norm(&mut self, name: String, size: usize) {
        let data = (0..size)
            .map(|_| bf16::from_f32(1.0 + self.sample(0.2).to_f32()))
            .collect();
        self.tensors.push((name, vec![size], data));
    }

    fn vocabulary(&mut self, name: &str, shape: &RandomModel) {
        let hidden = shape.hidden_size;
        self.matrix(name.to_owned(), shape.vocab_size, hidden, 2.0);
        if let Some((_, _, data)) = self.tensors.last_mut() {
            let scale = bf16::from_f32(0.125);
            let special = END_OF_TEXT as usize * hidden..VOCAB_SIZE * hidden;
            data[special].iter_mut().for_each(|weight| *weight *= scale);
        }
    }

    fn mlp(&mut self, prefix: &str, hidden: usize, inner: usize) {
        self.matrix(format!("{prefix}.gate_proj.weight"), inner, hidden, 1.5);
        self.matrix(format!("{prefix}.up_proj.weight"), inner, hidden, 1.5);
        self.matrix(format!("{prefix}.down_proj.weight"), hidden, inner, 1.5);
    }

    fn all(mut self, shape: &RandomModel) -> Vec<(String, Vec<usize>, Vec<bf16>)> {
        let hidden = shape.hidden_size;
        self.vocabulary("model.embed_tokens.weight", shape);
        for layer in 0..shape.layers {
            let name = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
            self.norm(name("input_layernorm"), hidden);
            self.matrix(
                name("self_attn.q_proj"),
                shape.heads * shape.head_dim,
                hidden,
                1.0,
            );
            self.matrix(
                name("self_attn.k_proj"),
                shape.kv_heads * shape.head_dim,
                hidden,
                1.0,
            );
            self.matrix(
                name("self_attn.v_proj"),
                shape.kv_heads * shape.head_dim,
                hidden,
                1.0,
            );
            self.norm(name("self_attn.q_norm"), shape.head_dim);
            self.norm(name("self_attn.k_norm"), shape.head_dim);
            self.matrix(
                name("self_attn.o_proj"),
                hidden,
                shape.heads * shape.head_dim,
                1.0,
            );
            self.norm(name("post_attention_layernorm"), hidden);
            if shape.mlp_only_layers.contains(&layer) {
                self.mlp(
                    &format!("model.layers.{layer}.mlp"),
                    hidden,
                    shape.intermediate_size,
                );
                continue;
            }
            self.matrix(name("mlp.gate"), shape.experts, hidden, 1.0);
            for expert in 0..shape.experts {
                self.mlp(
                    &format!("model.layers.{layer}.mlp.experts.{expert}"),
                    hidden,
                    shape.moe_intermediate_size,
                );
            }
        }
        self.norm("model.norm.weight".to_owned(), hidden);
        if !shape.tie_word_embeddings {
            self.vocabulary("lm_head.weight", shape);
        }
        self.tensors
    }
}
