"""The demo model as it is trained: Qwen3-MoE's computation, written so that two CPU cores train it in about an hour.

Matrix products run in bfloat16, the residual stream, the norms and the router in float32. The experts of a layer are one batched
product over [experts, capacity, hidden], where capacity is the largest expert's token count rounded up: few distinct shapes, so that
the matrix library reuses its generated kernels, and no token is ever dropped. Its backward pass is written by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CAPACITY_STEP = 64
LOSS_ROWS = 256
ATTENTION_ROWS = 8


@dataclass(frozen=True)
class Shape:
    """Named as in a Qwen3-MoE config.json."""

    vocab_size: int = 4096
    hidden_size: int = 160
    num_hidden_layers: int = 6
    num_experts: int = 64
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048


class Routing(NamedTuple):
    """What one layer's router decided for the tokens of a batch."""

    chosen: Tensor  # [tokens, top-k] expert ids, most probable first
    probabilities: Tensor  # [batch, length, experts]


class Experts(torch.autograd.Function):
    """Per token, the sum over its experts of weight * down(silu(gate(x)) * up(x))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
        tokens, k = chosen.shape
        experts, _, hidden = gate_up.shape
        flat = chosen.reshape(-1)
        order = torch.argsort(flat)
        counts = torch.bincount(flat, minlength=experts)
        capacity = -(-int(counts.max()) // CAPACITY_STEP) * CAPACITY_STEP
        slots = experts * capacity
        by_expert = flat[order]
        sorted_slot = torch.arange(flat.numel()) + (torch.arange(experts) * capacity - (torch.cumsum(counts, 0) - counts))[by_expert]
        slot = torch.empty_like(sorted_slot)
        slot[order] = sorted_slot
        source = torch.zeros(slots, dtype=torch.long)
        source[slot] = torch.arange(flat.numel()) // k

        gate_up, down = gate_up.to(dtype), down.to(dtype)
        scale = torch.zeros(slots, dtype=dtype)
        scale[slot] = weights.reshape(-1).to(dtype)
        # A slot past its expert's count holds token 0 with weight 0: it adds nothing, forward or backward.
        inputs = x.to(dtype).index_select(0, source).view(experts, capacity, hidden)
        both = torch.bmm(inputs, gate_up.transpose(1, 2))
        gate, up = both.chunk(2, 2)
        active = F.silu(gate) * up
        scaled = active * scale.view(experts, capacity, 1)
        out = torch.bmm(scaled, down.transpose(1, 2)).view(slots, hidden)
        ctx.save_for_backward(inputs, both, active, scaled, scale, gate_up, down, slot, source)
        ctx.k = k
        return out.index_select(0, slot).view(tokens, k, hidden).sum(1, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, both, active, scaled, scale, gate_up, down, slot, source = ctx.saved_tensors
        experts, capacity, hidden = inputs.shape
        dtype = inputs.dtype
        d_out = grads[0].to(dtype).index_select(0, source).view(experts, capacity, hidden)
        d_down = torch.bmm(d_out.transpose(1, 2), scaled)
        d_scaled = torch.bmm(d_out, down)
        d_weights = (d_scaled * active).sum(2, dtype=torch.float32).view(-1)[slot].view(-1, ctx.k)
        d_active = d_scaled * scale.view(experts, capacity, 1)
        gate, up = both.chunk(2, 2)
        d_both = torch.cat([torch.ops.aten.silu_backward(d_active * up, gate), d_active * F.silu(gate)], 2)
        d_gate_up = torch.bmm(d_both.transpose(1, 2), inputs)
        d_inputs = torch.bmm(d_both, gate_up).view(-1, hidden)
        d_x = d_inputs.index_select(0, slot).view(-1, ctx.k, hidden).sum(1, dtype=torch.float32)
        return d_x, None, d_weights, d_gate_up.float(), d_down.float(), None


class Attention(torch.autograd.Function):
    """Causal attention. The library's own backward kernel is several times slower on a CPU at these sizes than this one."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        batch, heads, length, dim = q.shape
        scale = dim**-0.5
        future = torch.full((length, length), -torch.inf).triu(1)
        d_out = grads[0].contiguous()
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        flat = [t.view(batch * heads, length, dim) for t in (q, k, v, d_out, d_q, d_k, d_v)]
        log_sum = log_sum.reshape(batch * heads, length, 1)
        delta = (d_out.float() * out.float()).sum(-1).view(batch * heads, length, 1)
        for at in range(0, batch * heads, ATTENTION_ROWS):
            q_, k_, v_, d_out_, d_q_, d_k_, d_v_ = (t[at : at + ATTENTION_ROWS] for t in flat)
            shares = torch.bmm(q_, k_.transpose(1, 2)).float().mul_(scale).add_(future).sub_(log_sum[at : at + ATTENTION_ROWS]).exp_()
            low = shares.to(q.dtype)
            torch.bmm(low.transpose(1, 2), d_out_, out=d_v_)
            d_scores = torch.bmm(d_out_, v_.transpose(1, 2)).float().sub_(delta[at : at + ATTENTION_ROWS]).mul_(shares)
            low = d_scores.mul_(scale).to(q.dtype)
            torch.bmm(low, k_, out=d_q_)
            torch.bmm(low.transpose(1, 2), q_, out=d_k_)
        return d_q, d_k, d_v


class TiedLoss(torch.autograd.Function):
    """Mean cross-entropy of hidden @ embeddings^T, a few rows at a time, so that the logits stay in cache; gradients on the way."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, embeddings: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        rows = hidden.shape[0]
        matrix, states = embeddings.to(dtype), hidden.to(dtype)
        d_hidden, d_matrix = torch.empty_like(states), torch.zeros_like(embeddings)
        total = torch.zeros(())
        for at in range(0, rows, LOSS_ROWS):
            part, wanted = states[at : at + LOSS_ROWS], targets[at : at + LOSS_ROWS, None]
            logits = torch.mm(part, matrix.t()).float()
            log_sum = logits.logsumexp(1, keepdim=True)
            total += (log_sum - logits.gather(1, wanted)).sum()
            grad = logits.sub_(log_sum).exp_()
            grad.scatter_add_(1, wanted, torch.full(wanted.shape, -1.0))
            grad = grad.to(dtype)
            torch.mm(grad, matrix, out=d_hidden[at : at + LOSS_ROWS])
            d_matrix += torch.mm(grad.t(), part)
        ctx.save_for_backward(d_hidden, d_matrix)
        ctx.rows = rows
        return total / rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_matrix = ctx.saved_tensors
        scale = grads[0] / ctx.rows
        return d_hidden.float() * scale, d_matrix * scale, None, None


def matrix(*size: int, std: float = 0.02) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size) * std)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, heads, kv_heads, dim = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        experts, width = shape.num_experts, shape.moe_intermediate_size
        towards_residual = 1 / math.sqrt(2 * shape.num_hidden_layers)
        self.shape = shape
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.q_proj = matrix(heads * dim, hidden)
        self.k_proj = matrix(kv_heads * dim, hidden)
        self.v_proj = matrix(kv_heads * dim, hidden)
        self.o_proj = matrix(hidden, heads * dim, std=0.02 * towards_residual)
        self.q_norm = nn.Parameter(torch.ones(dim))
        self.k_norm = nn.Parameter(torch.ones(dim))
        self.post_norm = nn.Parameter(torch.ones(hidden))
        self.router = matrix(experts, hidden)
        self.gate_up = matrix(experts, 2 * width, hidden, std=0.04)
        self.down = matrix(experts, hidden, width, std=0.04 * towards_residual)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.rms_norm_eps)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        batch, length, _ = x.shape
        shape = self.shape
        heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        projections = torch.cat([self.q_proj, self.k_proj, self.v_proj]).to(dtype)
        qkv = F.linear(x.to(dtype), projections).view(batch, length, heads + 2 * kv_heads, dim).transpose(1, 2)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)

        def rotate(states: Tensor, weight: Tensor) -> Tensor:
            states = self.norm(states.float().contiguous(), weight)
            a, b = states.chunk(2, -1)
            return states * cos + torch.cat([-b, a], -1) * sin

        groups = heads // kv_heads
        keys = rotate(k, self.k_norm).to(dtype).repeat_interleave(groups, 1)
        values = v.repeat_interleave(groups, 1)
        mixed = Attention.apply(rotate(q, self.q_norm).to(dtype), keys, values)
        return F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), self.o_proj.to(dtype)).float()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Routing]:
        batch, length, hidden = x.shape
        x = x + self.attention(self.norm(x, self.input_norm), cos, sin, dtype)
        states = self.norm(x, self.post_norm).view(-1, hidden)
        probabilities = F.linear(states, self.router).softmax(-1)
        weights, chosen = probabilities.topk(self.shape.num_experts_per_tok, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = Experts.apply(states, chosen, weights, self.gate_up, self.down, dtype)
        return x + out.view_as(x), Routing(chosen, probabilities.view(batch, length, -1))


class Model(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = matrix(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.num_hidden_layers)])
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        frequencies = 1 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.arange(shape.max_position_embeddings).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, list[Routing]]:
        """The final hidden states [batch, length, hidden] after the last norm, and every layer's routing."""
        length = ids.shape[1]
        x = F.embedding(ids, self.embeddings)
        routings = []
        for layer in self.layers:
            x, routing = layer(x, self.cos[:length], self.sin[:length], dtype)
            routings.append(routing)
        return F.rms_norm(x, (x.shape[-1],), self.norm, self.shape.rms_norm_eps), routings

    def loss(self, hidden: Tensor, targets: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return TiedLoss.apply(hidden.reshape(-1, hidden.shape[-1]), self.embeddings, targets.reshape(-1), dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embeddings)
