//! One step.

use half::bf16;
use kernels::{
    Attention, Isa, Renormalise, RopeTable, Rows, RowsMut, ShapeError, add, combine,
    head_norm_rope, matmul,
};
use kernels::{matmul_silu_mul, rms_norm, softmax_top_k, to_bf16, to_f32};

use super::weights::{Expert, Layer, Mlp, Weights};
use super::{
    ForwardError, ForwardOutput, KvStore, LogitsWanted, ModelConfig, Phase, SequenceSlice,
};

/// Working memory of [`Model::forward`](super::Model::forward): grows to the largest step seen and is reused, so that steps
/// allocate nothing.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Residual stream, `[rows, hidden]`.
    x: Vec<f32>,
    /// Its rows that want logits, `[logits rows, hidden]`, in the last layer.
    x_last: Vec<f32>,
    /// Normed input of the next product, `[rows, hidden]`.
    normed: Vec<bf16>,
    /// `[rows, (heads + 2 kv_heads) head_dim]`.
    qkv: Vec<f32>,
    /// `[rows, heads, head_dim]`.
    queries: Vec<bf16>,
    /// One token's keys, then values, `[kv_heads, head_dim]` each.
    key_value: Vec<bf16>,
    /// `[rows, heads, head_dim]`.
    attended: Vec<bf16>,
    /// What a product adds to the residual stream, `[rows, hidden]`.
    delta: Vec<f32>,
    /// `[rows, experts]`.
    router_logits: Vec<f32>,
    /// One row's softmax, `[experts]`.
    probabilities: Vec<f32>,
    /// `[rows, top_k]`.
    gate_weights: Vec<f32>,
    /// `[rows of one expert, intermediate]`.
    activations: Vec<bf16>,
    /// Expert outputs, `[rows, top_k, hidden]`.
    expert_outputs: Vec<f32>,
    /// How many rows chose each expert, `[experts]`; then where each expert's group begins.
    group: Vec<u32>,
    /// Rows, grouped by expert, and beside it where each row's output goes: `row * top_k + rank`.
    group_rows: Vec<u32>,
    group_slots: Vec<u32>,
    /// Rows that want logits.
    logits_rows: Vec<u32>,
    /// All rows: 0, 1, 2, ...
    all_rows: Vec<u32>,
    /// Block tables of all slices as attention wants them, one after the other.
    tables: Vec<u32>,
}

/// Gives `buffer` at least `len` elements. What they hold does not matter.
fn grow<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}

/// Gives `buffer` exactly `len` elements, to be overwritten.
fn set_len<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) {
    buffer.resize(len, T::default());
}

/// What a step works with.
pub(super) struct Step<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) weights: &'a Weights,
    pub(super) rope: &'a RopeTable,
    pub(super) isa: Isa,
    pub(super) batch: &'a [SequenceSlice<'a>],
    pub(super) scratch: &'a mut Scratch,
}

impl Step<'_> {
    pub(super) fn run(
        mut self,
        kv: &mut KvStore,
        out: &mut ForwardOutput,
    ) -> Result<(), ForwardError> {
        let rows = self.check(kv)?;
        self.prepare(rows, kv, out);
        self.embed(rows)?;
        let last = self.config.layers - 1;
        let mut moe_layer = 0;
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.attend(index, layer, rows, kv)?;
            if index == last {
                self.gather_last();
            }
            let hidden = self.config.hidden_size;
            let normed = grow(&mut self.scratch.normed, rows * hidden);
            rms_norm(
                self.isa,
                &self.scratch.x[..rows * hidden],
                &layer.mlp_norm,
                self.config.rms_norm_eps,
                normed,
            )?;
            match &layer.mlp {
                Mlp::Dense(mlp) => self.dense(mlp, rows, index == last)?,
                Mlp::Moe { router, experts } => {
                    let logits = grow(&mut self.scratch.router_logits, rows * self.config.experts);
                    let normed = Rows::dense(&self.scratch.normed[..rows * hidden], hidden);
                    matmul(
                        self.isa,
                        normed,
                        router,
                        RowsMut::dense(logits, self.config.experts),
                    )?;
                    self.choose(moe_layer, rows, out)?;
                    self.moe(moe_layer, experts, rows, index == last, out)?;
                    moe_layer += 1;
                }
            }
        }
        self.logits(out)
    }

    /// Refuses a batch that breaks the rules, before anything is written; returns its rows.
    fn check(&self, kv: &KvStore) -> Result<usize, ForwardError> {
        let mut rows = 0;
        for (index, slice) in self.batch.iter().enumerate() {
            let end = slice.first_position.saturating_add(slice.tokens.len());
            let needed = end.div_ceil(kv.block_size());
            if slice.tokens.is_empty() {
                return Err(ForwardError::Empty { slice: index });
            }
            if end > self.config.max_positions {
                return Err(ForwardError::Position {
                    slice: index,
                    end,
                    limit: self.config.max_positions,
                });
            }
            if slice.block_table.len() < needed {
                return Err(ForwardError::BlockTable {
                    slice: index,
                    expected: needed,
                    got: slice.block_table.len(),
                });
            }
            if let Some(&block) = slice.block_table[..needed]
                .iter()
                .find(|&&block| block as usize >= kv.num_blocks())
            {
                return Err(ForwardError::Block {
                    slice: index,
                    block,
                    limit: kv.num_blocks(),
                });
            }
            if let Some(&token) = slice
                .tokens
                .iter()
                .find(|&&token| token as usize >= self.config.vocab_size)
            {
                return Err(ForwardError::Token {
                    slice: index,
                    token,
                    limit: self.config.vocab_size,
                });
            }
            rows += slice.tokens.len();
        }
        Ok(rows)
    }

    fn prepare(&mut self, rows: usize, kv: &KvStore, out: &mut ForwardOutput) {
        let Self {
            config,
            batch,
            scratch,
            ..
        } = self;
        scratch.logits_rows.clear();
        scratch.tables.clear();
        let (mut first, mut gate_rows) = (0, 0);
        for slice in *batch {
            let len = slice.tokens.len();
            match slice.logits {
                LogitsWanted::None => {}
                LogitsWanted::Last => scratch.logits_rows.push((first + len - 1) as u32),
                LogitsWanted::All => scratch
                    .logits_rows
                    .extend((first..first + len).map(|row| row as u32)),
            }
            let blocks = (slice.first_position + len).div_ceil(kv.block_size());
            scratch.tables.extend(
                slice.block_table[..blocks]
                    .iter()
                    .map(|&block| kv.entry(block)),
            );
            gate_rows += if slice.gates { len } else { 0 };
            first += len;
        }
        let known = scratch.all_rows.len();
        scratch
            .all_rows
            .extend(known as u32..rows.max(known) as u32);
        let moe_layers = config.moe_layers.len();
        set_len(
            &mut out.logits,
            scratch.logits_rows.len() * config.vocab_size,
        );
        set_len(&mut out.experts, rows * moe_layers * config.top_k);
        set_len(
            &mut out.gates.probabilities,
            gate_rows * moe_layers * config.experts,
        );
        set_len(
            &mut out.gates.logits,
            gate_rows * moe_layers * config.experts,
        );
        set_len(&mut out.distinct_experts, moe_layers);
        set_len(&mut out.distinct_experts_decode, moe_layers);
    }

    fn embed(&mut self, rows: usize) -> Result<(), ShapeError> {
        let hidden = self.config.hidden_size;
        let x = grow(&mut self.scratch.x, rows * hidden);
        let tokens = self.batch.iter().flat_map(|slice| slice.tokens);
        for (&token, row) in tokens.zip(x.chunks_exact_mut(hidden)) {
            to_f32(
                self.isa,
                &self.weights.embedding[token as usize * hidden..][..hidden],
                row,
            )?;
        }
        Ok(())
    }

    fn attend(
        &mut self,
        index: usize,
        layer: &Layer,
        rows: usize,
        kv: &mut KvStore,
    ) -> Result<(), ShapeError> {
        let ModelConfig {
            hidden_size: hidden,
            heads,
            kv_heads,
            head_dim,
            rms_norm_eps: eps,
            ..
        } = *self.config;
        let Self {
            isa, rope, batch, ..
        } = *self;
        let scratch = &mut *self.scratch;
        let (query_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let width = query_width + 2 * kv_width;

        let normed = grow(&mut scratch.normed, rows * hidden);
        rms_norm(
            isa,
            &scratch.x[..rows * hidden],
            &layer.input_norm,
            eps,
            normed,
        )?;
        let qkv = grow(&mut scratch.qkv, rows * width);
        matmul(
            isa,
            Rows::dense(normed, hidden),
            &layer.qkv,
            RowsMut::dense(qkv, width),
        )?;

        let queries = grow(&mut scratch.queries, rows * query_width);
        let (keys, values) = grow(&mut scratch.key_value, 2 * kv_width).split_at_mut(kv_width);
        let mut row = 0;
        for slice in batch {
            for position in slice.first_position..slice.first_position + slice.tokens.len() {
                let (cos, sin) = rope.at(position)?;
                let (query, key_value) = qkv[row * width..][..width].split_at(query_width);
                let (key, value) = key_value.split_at(kv_width);
                let rotated = &mut queries[row * query_width..][..query_width];
                head_norm_rope(isa, query, &layer.query_norm, eps, cos, sin, rotated)?;
                head_norm_rope(isa, key, &layer.key_norm, eps, cos, sin, keys)?;
                to_bf16(isa, value, values)?;
                let block = slice.block_table[position / kv.block_size()];
                kv.write_token(index, block, position % kv.block_size(), keys, values)?;
                row += 1;
            }
        }

        let attended = grow(&mut scratch.attended, rows * query_width);
        let (mut row, mut table) = (0, 0);
        for slice in batch {
            let len = slice.tokens.len();
            let blocks = (slice.first_position + len).div_ceil(kv.block_size());
            let attention = Attention {
                layout: kv.layout(),
                heads,
                scale: 1.0 / (head_dim as f32).sqrt(),
                cache: kv.layer(index),
                table: &scratch.tables[table..table + blocks],
                first_position: slice.first_position,
            };
            let of_slice = row * query_width..(row + len) * query_width;
            attention.run(isa, &queries[of_slice.clone()], &mut attended[of_slice])?;
            row += len;
            table += blocks;
        }

        let delta = grow(&mut scratch.delta, rows * hidden);
        matmul(
            isa,
            Rows::dense(attended, query_width),
            &layer.output,
            RowsMut::dense(delta, hidden),
        )?;
        add(isa, delta, &mut scratch.x[..rows * hidden])
    }

    /// Copies the residual rows that want logits: after the last layer's attention no other row matters.
    fn gather_last(&mut self) {
        let hidden = self.config.hidden_size;
        let scratch = &mut *self.scratch;
        let x_last = grow(&mut scratch.x_last, scratch.logits_rows.len() * hidden);
        for (to, &row) in x_last.chunks_exact_mut(hidden).zip(&scratch.logits_rows) {
            to.copy_from_slice(&scratch.x[row as usize * hidden..][..hidden]);
        }
    }

    fn dense(&mut self, mlp: &Expert, rows: usize, last: bool) -> Result<(), ShapeError> {
        let hidden = self.config.hidden_size;
        let scratch = &mut *self.scratch;
        let (wanted, x) = if last {
            (
                &scratch.logits_rows[..],
                &mut scratch.x_last[..scratch.logits_rows.len() * hidden],
            )
        } else {
            (&scratch.all_rows[..rows], &mut scratch.x[..rows * hidden])
        };
        let inner = mlp.gate_up.intermediate();
        let activations = grow(&mut scratch.activations, wanted.len() * inner);
        let normed = Rows::gather(&scratch.normed, hidden, wanted);
        matmul_silu_mul(self.isa, normed, &mlp.gate_up, activations)?;
        let delta = grow(&mut scratch.delta, wanted.len() * hidden);
        matmul(
            self.isa,
            Rows::dense(activations, inner),
            &mlp.down,
            RowsMut::dense(delta, hidden),
        )?;
        add(self.isa, delta, x)
    }

    /// Every row's experts and their weights, from the router's logits; and the statistics.
    fn choose(
        &mut self,
        moe_layer: usize,
        rows: usize,
        out: &mut ForwardOutput,
    ) -> Result<(), ShapeError> {
        let ModelConfig {
            experts,
            top_k,
            norm_topk_prob,
            ..
        } = *self.config;
        let moe_layers = self.config.moe_layers.len();
        let renormalise = if norm_topk_prob {
            Renormalise::Yes
        } else {
            Renormalise::No
        };
        let scratch = &mut *self.scratch;
        grow(&mut scratch.gate_weights, rows * top_k);
        grow(&mut scratch.probabilities, experts);
        // Bit 0: chosen by any row; bit 1: chosen by a decode row.
        let seen = grow(&mut scratch.group, experts);
        seen.fill(0);
        let (mut row, mut gate_row) = (0, 0);
        for slice in self.batch {
            let mark = if slice.phase == Phase::Decode { 3 } else { 1 };
            for _ in slice.tokens {
                let logits = &scratch.router_logits[row * experts..][..experts];
                let ids = &mut out.experts[(row * moe_layers + moe_layer) * top_k..][..top_k];
                let probabilities = if slice.gates {
                    let start = (gate_row * moe_layers + moe_layer) * experts;
                    out.gates.logits[start..][..experts].copy_from_slice(logits);
                    gate_row += 1;
                    &mut out.gates.probabilities[start..][..experts]
                } else {
                    &mut scratch.probabilities[..experts]
                };
                let weights = &mut scratch.gate_weights[row * top_k..][..top_k];
                softmax_top_k(self.isa, logits, renormalise, probabilities, ids, weights)?;
                for &id in &*ids {
                    seen[usize::from(id)] |= mark;
                }
                row += 1;
            }
        }
        out.distinct_experts[moe_layer] = seen.iter().map(|mark| mark & 1).sum();
        out.distinct_experts_decode[moe_layer] = seen.iter().map(|mark| mark >> 1).sum();
        Ok(())
    }

    /// Rows grouped by expert, so that each distinct expert's weights are read once; outputs kept apart and summed per row in
    /// top-k order, so that the grouping changes no bit.
    fn moe(
        &mut self,
        moe_layer: usize,
        experts: &[Expert],
        rows: usize,
        last: bool,
        out: &ForwardOutput,
    ) -> Result<(), ShapeError> {
        let ModelConfig {
            hidden_size: hidden,
            top_k,
            ..
        } = *self.config;
        let moe_layers = self.config.moe_layers.len();
        let scratch = &mut *self.scratch;
        let (wanted, x) = if last {
            // The weights of the wanted rows move up to stand beside `x_last`; rows rise, so none is overwritten before its turn.
            for (to, &row) in scratch.logits_rows.iter().enumerate() {
                let from = row as usize * top_k;
                scratch
                    .gate_weights
                    .copy_within(from..from + top_k, to * top_k);
            }
            (
                &scratch.logits_rows[..],
                &mut scratch.x_last[..scratch.logits_rows.len() * hidden],
            )
        } else {
            (&scratch.all_rows[..rows], &mut scratch.x[..rows * hidden])
        };
        let slots = wanted.len() * top_k;
        let ids =
            |row: u32| &out.experts[(row as usize * moe_layers + moe_layer) * top_k..][..top_k];

        // A counting sort by expert: sizes, then ends, then filled from the back so that ends become starts.
        let group = grow(&mut scratch.group, experts.len());
        group.fill(0);
        for &row in wanted {
            for &id in ids(row) {
                group[usize::from(id)] += 1;
            }
        }
        let mut end = 0;
        for size in &mut *group {
            end += *size;
            *size = end;
        }
        let group_rows = grow(&mut scratch.group_rows, slots);
        let group_slots = grow(&mut scratch.group_slots, slots);
        for (to, &row) in wanted.iter().enumerate().rev() {
            for (rank, &id) in ids(row).iter().enumerate().rev() {
                let at = &mut group[usize::from(id)];
                *at -= 1;
                group_rows[*at as usize] = row;
                group_slots[*at as usize] = (to * top_k + rank) as u32;
            }
        }

        let outputs = grow(&mut scratch.expert_outputs, slots * hidden);
        for (index, expert) in experts.iter().enumerate() {
            let start = group[index] as usize;
            let end = group.get(index + 1).map_or(slots, |&next| next as usize);
            if start == end {
                continue;
            }
            let inner = expert.gate_up.intermediate();
            let activations = grow(&mut scratch.activations, (end - start) * inner);
            let normed = Rows::gather(&scratch.normed, hidden, &group_rows[start..end]);
            matmul_silu_mul(self.isa, normed, &expert.gate_up, activations)?;
            let to = RowsMut::scatter(outputs, hidden, &group_slots[start..end]);
            matmul(self.isa, Rows::dense(activations, inner), &expert.down, to)?;
        }
        combine(self.isa, &scratch.gate_weights[..slots], top_k, outputs, x)
    }

    fn logits(&mut self, out: &mut ForwardOutput) -> Result<(), ForwardError> {
        let ModelConfig {
            hidden_size: hidden,
            vocab_size: vocab,
            rms_norm_eps: eps,
            ..
        } = *self.config;
        let scratch = &mut *self.scratch;
        let elements = scratch.logits_rows.len() * hidden;
        let normed = grow(&mut scratch.normed, elements);
        rms_norm(
            self.isa,
            &scratch.x_last[..elements],
            &self.weights.final_norm,
            eps,
            normed,
        )?;
        let to = RowsMut::dense(&mut out.logits, vocab);
        Ok(matmul(
            self.isa,
            Rows::dense(normed, hidden),
            &self.weights.head,
            to,
        )?)
    }
}
