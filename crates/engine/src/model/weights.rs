//! The weights, packed for the kernels.

use half::bf16;
use kernels::{PackedGateUp, PackedMatrix, ShapeError};

use super::{ModelConfig, WeightBytes};
use crate::checkpoint::{Checkpoint, LoadError};

/// All weights of a model.
#[derive(Debug)]
pub(super) struct Weights {
    /// `[vocabulary, hidden]`, row-major: a step reads single rows.
    pub(super) embedding: Vec<bf16>,
    pub(super) layers: Vec<Layer>,
    pub(super) final_norm: Vec<f32>,
    /// `[vocabulary, hidden]`.
    pub(super) head: PackedMatrix,
}

/// One decoder layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) input_norm: Vec<f32>,
    /// Queries, keys and values in one product: `[(heads + 2 kv_heads) head_dim, hidden]`.
    pub(super) qkv: PackedMatrix,
    pub(super) query_norm: Vec<f32>,
    pub(super) key_norm: Vec<f32>,
    /// `[hidden, heads head_dim]`.
    pub(super) output: PackedMatrix,
    pub(super) mlp_norm: Vec<f32>,
    pub(super) mlp: Mlp,
}

/// What follows attention in a layer.
#[derive(Debug)]
pub(super) enum Mlp {
    Dense(Expert),
    Moe {
        /// `[experts, hidden]`.
        router: PackedMatrix,
        experts: Vec<Expert>,
    },
}

/// A gated MLP.
#[derive(Debug)]
pub(super) struct Expert {
    pub(super) gate_up: PackedGateUp,
    /// `[hidden, intermediate]`.
    pub(super) down: PackedMatrix,
}

impl Weights {
    /// What a step reads of the weights; see [`WeightBytes`](super::WeightBytes).
    pub(super) fn bytes(&self) -> WeightBytes {
        let mut bytes = WeightBytes {
            dense: self.head.bytes(),
            expert: 0,
        };
        for layer in &self.layers {
            bytes.dense += layer.qkv.bytes() + layer.output.bytes();
            match &layer.mlp {
                Mlp::Dense(mlp) => bytes.dense += mlp.bytes(),
                Mlp::Moe { router, experts } => {
                    bytes.dense += router.bytes();
                    bytes.expert = experts.first().map_or(0, Expert::bytes);
                }
            }
        }
        bytes
    }
}

impl Expert {
    fn bytes(&self) -> usize {
        self.gate_up.bytes() + self.down.bytes()
    }
}

/// Reads and packs, reusing its buffers.
struct Loader<'a> {
    checkpoint: &'a mut Checkpoint,
    config: &'a ModelConfig,
    padding: usize,
    first: Vec<bf16>,
    second: Vec<bf16>,
}

impl Weights {
    pub(super) fn load(
        checkpoint: &mut Checkpoint,
        config: &ModelConfig,
        padding: usize,
    ) -> Result<Self, LoadError> {
        Loader {
            checkpoint,
            config,
            padding,
            first: Vec::new(),
            second: Vec::new(),
        }
        .weights()
    }
}

impl Loader<'_> {
    fn weights(&mut self) -> Result<Weights, LoadError> {
        let (vocab, hidden) = (self.config.vocab_size, self.config.hidden_size);
        let mut embedding = Vec::new();
        self.checkpoint.append_bf16(
            "model.embed_tokens.weight",
            &[vocab, hidden],
            &mut embedding,
        )?;
        let mut layers = Vec::new();
        for layer in 0..self.config.layers {
            layers.push(self.layer(layer)?);
        }
        let final_norm = self.checkpoint.f32_vector("model.norm.weight", hidden)?;
        let head = if self.config.tie_word_embeddings {
            pack(
                "model.embed_tokens.weight",
                PackedMatrix::pack(&embedding, vocab, hidden),
            )?
        } else {
            self.matrix(&[("lm_head.weight", vocab)], hidden)?
        };
        Ok(Weights {
            embedding,
            layers,
            final_norm,
            head,
        })
    }

    fn layer(&mut self, layer: usize) -> Result<Layer, LoadError> {
        let ModelConfig {
            hidden_size: hidden,
            heads,
            kv_heads,
            head_dim,
            ..
        } = *self.config;
        let name = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
        let (query, key_value) = (heads * head_dim, kv_heads * head_dim);
        Ok(Layer {
            input_norm: self
                .checkpoint
                .f32_vector(&name("input_layernorm"), hidden)?,
            qkv: self.matrix(
                &[
                    (&name("self_attn.q_proj"), query),
                    (&name("self_attn.k_proj"), key_value),
                    (&name("self_attn.v_proj"), key_value),
                ],
                hidden,
            )?,
            query_norm: self
                .checkpoint
                .f32_vector(&name("self_attn.q_norm"), head_dim)?,
            key_norm: self
                .checkpoint
                .f32_vector(&name("self_attn.k_norm"), head_dim)?,
            output: self.matrix(&[(&name("self_attn.o_proj"), hidden)], query)?,
            mlp_norm: self
                .checkpoint
                .f32_vector(&name("post_attention_layernorm"), hidden)?,
            mlp: if self.config.is_moe_layer(layer) {
                let router = self.matrix(&[(&name("mlp.gate"), self.config.experts)], hidden)?;
                Mlp::Moe {
                    router,
                    experts: self.experts(layer)?,
                }
            } else {
                Mlp::Dense(self.mlp(
                    &format!("model.layers.{layer}.mlp"),
                    self.config.intermediate_size,
                    1,
                )?)
            },
        })
    }

    /// Experts one by one, as checkpoints have them, or fused over all experts of a layer, as transformers 5 keeps them in memory.
    fn experts(&mut self, layer: usize) -> Result<Vec<Expert>, LoadError> {
        let ModelConfig {
            hidden_size: hidden,
            moe_intermediate_size: inner,
            experts,
            ..
        } = *self.config;
        let prefix = format!("model.layers.{layer}.mlp.experts");
        let fused = format!("{prefix}.gate_up_proj");
        if !self.checkpoint.has(&fused) {
            return (0..experts)
                .map(|expert| self.mlp(&format!("{prefix}.{expert}"), inner, self.padding))
                .collect();
        }
        let down = format!("{prefix}.down_proj");
        self.first.clear();
        self.second.clear();
        self.checkpoint
            .append_bf16(&fused, &[experts, 2 * inner, hidden], &mut self.first)?;
        self.checkpoint
            .append_bf16(&down, &[experts, hidden, inner], &mut self.second)?;
        let size = inner * hidden;
        (0..experts)
            .map(|expert| {
                let (gate, up) = self.first[2 * expert * size..][..2 * size].split_at(size);
                self.pack_mlp(
                    &fused,
                    gate,
                    up,
                    &self.second[expert * size..][..size],
                    inner,
                    self.padding,
                )
            })
            .collect()
    }

    fn mlp(&mut self, prefix: &str, inner: usize, padding: usize) -> Result<Expert, LoadError> {
        let hidden = self.config.hidden_size;
        self.first.clear();
        self.second.clear();
        self.checkpoint.append_bf16(
            &format!("{prefix}.gate_proj.weight"),
            &[inner, hidden],
            &mut self.first,
        )?;
        self.checkpoint.append_bf16(
            &format!("{prefix}.up_proj.weight"),
            &[inner, hidden],
            &mut self.first,
        )?;
        self.checkpoint.append_bf16(
            &format!("{prefix}.down_proj.weight"),
            &[hidden, inner],
            &mut self.second,
        )?;
        let (gate, up) = self.first.split_at(inner * hidden);
        self.pack_mlp(prefix, gate, up, &self.second, inner, padding)
    }

    fn pack_mlp(
        &self,
        name: &str,
        gate: &[bf16],
        up: &[bf16],
        down: &[bf16],
        inner: usize,
        padding: usize,
    ) -> Result<Expert, LoadError> {
        let hidden = self.config.hidden_size;
        Ok(Expert {
            gate_up: pack(
                name,
                PackedGateUp::pack_padded(gate, up, inner, hidden, inner * padding),
            )?,
            down: pack(
                name,
                PackedMatrix::pack_padded(down, hidden, inner, hidden, inner * padding),
            )?,
        })
    }

    /// Matrices with `inputs` columns each, stacked.
    fn matrix(
        &mut self,
        parts: &[(&str, usize)],
        inputs: usize,
    ) -> Result<PackedMatrix, LoadError> {
        self.first.clear();
        for &(name, outputs) in parts {
            self.checkpoint
                .append_bf16(name, &[outputs, inputs], &mut self.first)?;
        }
        let outputs = parts.iter().map(|part| part.1).sum();
        pack(parts[0].0, PackedMatrix::pack(&self.first, outputs, inputs))
    }
}

/// Shapes were checked before: what is left is a size that the kernels do not do.
fn pack<T>(name: &str, packed: Result<T, ShapeError>) -> Result<T, LoadError> {
    packed.map_err(|source| LoadError::Pack {
        name: name.to_owned(),
        source,
    })
}
