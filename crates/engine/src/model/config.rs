//! What `config.json` and `generation_config.json` say, checked.

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
    /// Intermediate size of the dense layers, if there are any.
    pub intermediate_size: usize,
    /// Intermediate size of one expert, without padding.
    pub moe_intermediate_size: usize,
    /// Experts per MoE layer, at most 65,536.
    pub experts: usize,
    /// Experts that each token chooses.
    pub top_k: usize,
    /// Whether the chosen experts' probabilities are scaled to sum to 1.
    pub norm_topk_prob: bool,
    /// Decoder layers that are MoE layers, rising.
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
