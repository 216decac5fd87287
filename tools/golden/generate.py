"""Golden data for the engine: what Hugging Face transformers computes, in float32, on bfloat16 weights.

    python generate.py tiny            # all tiny random checkpoints, with their weights
    python generate.py demo            # the shipped demo model, expected values only

README.md describes the files. The same versions of the packages in requirements.txt and the same seeds give the same weights and tokens;
floating-point values may differ in the last bits between processors.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "crates/engine/tests/golden"
DEMO = ROOT / "models/demo"

TINY_PROMPT_LENGTHS = [1, 17, 40]
TINY_CONTINUATION = 32
DEMO_PROMPTS = 8
DEMO_PROMPT_LENGTH = 64
DEMO_CONTINUATION = 64
DEMO_TOP = 8
DEMO_SAMPLED = 64


@dataclass
class Case:
    """A tiny checkpoint: its configuration in the older keys, and how it is written."""

    seed: int
    config: dict[str, Any]
    newest_form: bool = False
    shards: int = 1


BASE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "torch_dtype": "bfloat16",
}

CASES: dict[str, Case] = {
    "plain": Case(1, BASE),
    "untied": Case(
        2,
        BASE
        | {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
    ),
    "dense_between": Case(
        3, BASE | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "intermediate_size": 48}
    ),
    "odd_sizes": Case(
        4,
        BASE
        | {
            "hidden_size": 48,
            "head_dim": 16,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 2,
            "vocab_size": 101,
            "rope_theta": 1e6,
        },
    ),
    "sharded_new_keys": Case(5, BASE | {"num_hidden_layers": 2, "rope_theta": 50000.0}, newest_form=True, shards=2),
}


def moe_layers(config: dict[str, Any]) -> list[int]:
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"]
    return [i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0]


def random_weights(case: Case) -> dict[str, Tensor]:
    """Scaled so that activations, logits and router logits spread over a few units: near ties are rare, nothing saturates."""
    config = case.config
    generator = torch.Generator().manual_seed(case.seed)
    hidden, dim = config["hidden_size"], config["head_dim"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * gain * columns**-0.5).to(torch.bfloat16)

    def norm(size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size, generator=generator)).to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 2.0), "model.norm.weight": norm(hidden)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden, 2.0)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        weights |= {
            f"{layer}.input_layernorm.weight": norm(hidden),
            f"{layer}.post_attention_layernorm.weight": norm(hidden),
            f"{attention}.q_proj.weight": matrix(config["num_attention_heads"] * dim, hidden),
            f"{attention}.k_proj.weight": matrix(config["num_key_value_heads"] * dim, hidden),
            f"{attention}.v_proj.weight": matrix(config["num_key_value_heads"] * dim, hidden),
            f"{attention}.o_proj.weight": matrix(hidden, config["num_attention_heads"] * dim),
            f"{attention}.q_norm.weight": norm(dim),
            f"{attention}.k_norm.weight": norm(dim),
        }
        if i in moe_layers(config):
            weights[f"{layer}.mlp.gate.weight"] = matrix(config["num_experts"], hidden, 2.0)
            mlps, width = [f"{layer}.mlp.experts.{e}" for e in range(config["num_experts"])], config["moe_intermediate_size"]
        else:
            mlps, width = [f"{layer}.mlp"], config["intermediate_size"]
        for mlp in mlps:
            weights[f"{mlp}.gate_proj.weight"] = matrix(width, hidden, 1.5)
            weights[f"{mlp}.up_proj.weight"] = matrix(width, hidden, 1.5)
            weights[f"{mlp}.down_proj.weight"] = matrix(hidden, width, 1.5)
    return weights


def write_checkpoint(folder: Path, case: Case) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(case.config)
    if case.newest_form:
        config["num_local_experts"] = config.pop("num_experts")
        config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
        config["dtype"] = config.pop("torch_dtype")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = random_weights(case)
    metadata = {"format": "pt"}
    if case.shards == 1:
        save_file(weights, folder / "model.safetensors", metadata)
        return
    names = sorted(weights)
    files = [f"model-{i + 1:05}-of-{case.shards:05}.safetensors" for i in range(case.shards)]
    placed = {name: files[i * case.shards // len(names)] for i, name in enumerate(names)}
    for file in files:
        save_file({name: weights[name] for name in names if placed[name] == file}, folder / file, metadata)
    size = sum(w.numel() * w.element_size() for w in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class Reference:
    """A checkpoint in transformers, in float32, that also tells what its routers decided."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self._seen: list[tuple[Tensor, Tensor]] = []
        for layer in self.model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(lambda _module, _inputs, out: self._seen.append((out[0], out[2])))

    @torch.no_grad()
    def forward(self, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, V], router logits [T, L, E] and expert ids [T, L, k] in descending probability, L over MoE layers."""
        self._seen.clear()
        logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits, torch.stack([s[0] for s in self._seen], 1), torch.stack([s[1] for s in self._seen], 1)

    def greedy(self, tokens: list[int], count: int) -> tuple[list[int], list[float]]:
        """Continuation by the largest logit, without a cache, end-of-text ignored; and by how much each won."""
        taken, margins = [], []
        for _ in range(count):
            top = self.forward(tokens + taken)[0][-1].topk(2)
            taken.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
        return taken, margins


def describe(reference: Reference, **facts: Any) -> dict[str, str]:
    config = reference.model.config
    layers = [i for i, layer in enumerate(reference.model.model.layers) if hasattr(layer.mlp, "gate")]
    facts |= {
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32",
        "moe_layers": layers,
        "num_experts_per_tok": config.num_experts_per_tok,
    }
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}


def i32(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).contiguous()


def tiny(name: str) -> None:
    case, folder = CASES[name], GOLDEN / name
    write_checkpoint(folder, case)
    reference = Reference(folder)
    rng = np.random.default_rng(case.seed)
    out: dict[str, Tensor] = {}
    gaps, margins_seen = [], []
    for i, length in enumerate(TINY_PROMPT_LENGTHS):
        tokens = rng.integers(0, case.config["vocab_size"], length).tolist()
        logits, router, experts = reference.forward(tokens)
        greedy, margins = reference.greedy(tokens, TINY_CONTINUATION)
        out |= {
            f"{i}.tokens": i32(tokens),
            f"{i}.logits": logits.contiguous(),
            f"{i}.router_logits": router.contiguous(),
            f"{i}.experts": i32(experts),
            f"{i}.greedy": i32(greedy),
            f"{i}.margins": torch.tensor(margins),
        }
        ordered = router.sort(-1, descending=True).values
        k = case.config["num_experts_per_tok"]
        gaps.append((ordered[..., k - 1] - ordered[..., k]).flatten())
        margins_seen += margins
    save_file(out, folder / "expected.safetensors", describe(reference, prompts=len(TINY_PROMPT_LENGTHS)))
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(
        f"{name:18} {size:7} bytes, logits std {out['2.logits'].std():.2f}, router gap min {torch.cat(gaps).min():.4f}"
        f" median {torch.cat(gaps).median():.2f}, greedy margin min {min(margins_seen):.3f}, distinct {len(set(out['2.greedy'].tolist()))}"
    )


def demo() -> None:
    reference = Reference(DEMO)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    lines = [json.loads(line) for line in (DEMO / "prompts/evaluation.jsonl").read_text().splitlines()]
    domains = sorted({line["domain"] for line in lines})
    chosen = [next(line for line in lines if line["domain"] == domain) for domain in domains][:DEMO_PROMPTS]
    vocabulary = reference.model.config.vocab_size
    sampled = np.sort(np.random.default_rng(0).choice(vocabulary, DEMO_SAMPLED, replace=False))
    out: dict[str, Tensor] = {"sampled_ids": i32(sampled)}
    for i, line in enumerate(chosen):
        tokens = tokenizer(line["prompt"], add_special_tokens=False).input_ids[:DEMO_PROMPT_LENGTH]
        logits, _, experts = reference.forward(tokens)
        greedy, margins = reference.greedy(tokens, DEMO_CONTINUATION)
        top = logits.topk(DEMO_TOP)
        out |= {
            f"{i}.tokens": i32(tokens),
            f"{i}.top_ids": i32(top.indices),
            f"{i}.top_logits": top.values.contiguous(),
            f"{i}.log_sum_exp": logits.logsumexp(-1),
            f"{i}.sampled_logits": logits[:, sampled].contiguous(),
            f"{i}.experts": i32(experts),
            f"{i}.greedy": i32(greedy),
            f"{i}.margins": torch.tensor(margins),
        }
    folder = GOLDEN / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    facts = describe(reference, prompts=len(chosen), domains=[line["domain"] for line in chosen], texts=[line["prompt"] for line in chosen])
    save_file(out, folder / "expected.safetensors", facts)
    print("demo", (folder / "expected.safetensors").stat().st_size, "bytes", sum(out[f"{i}.experts"].numel() for i in range(len(chosen))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tiny", "demo"])
    what = parser.parse_args().what
    torch.set_num_threads(1)
    if what == "demo":
        demo()
        return
    for name in CASES:
        tiny(name)


if __name__ == "__main__":
    main()
