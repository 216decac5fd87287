"""Write a training checkpoint as a Hugging Face Qwen3-MoE directory and check it against transformers.

    python export.py --work WORK --checkpoint WORK/checkpoints/latest.pt --out ../../models/demo
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from model import Model, Shape
from tokenizer import SPECIAL

LARGEST_FILE = 30_000_000
LARGEST_DIFFERENCE = 2e-3

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "eos_token_id": SPECIAL.index("<|endoftext|>"),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.moe_intermediate_size * shape.num_experts_per_tok,
        "max_position_embeddings": shape.max_position_embeddings,
        "max_window_layers": shape.num_hidden_layers,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape.moe_intermediate_size,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_attention_heads,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "output_router_logits": False,
        "pad_token_id": SPECIAL.index("<|endoftext|>"),
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def tensors(model: Model) -> dict[str, Tensor]:
    """The weights under the names that Qwen3-MoE checkpoints have, one matrix per expert."""
    named = {"model.embed_tokens.weight": model.embeddings, "model.norm.weight": model.norm}
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}"
        named |= {
            f"{prefix}.input_layernorm.weight": layer.input_norm,
            f"{prefix}.post_attention_layernorm.weight": layer.post_norm,
            f"{prefix}.mlp.gate.weight": layer.router,
        }
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            named[f"{prefix}.self_attn.{name}.weight"] = getattr(layer, name)
        for e in range(model.shape.num_experts):
            gate, up = layer.gate_up[e].chunk(2)
            expert = f"{prefix}.mlp.experts.{e}"
            named |= {
                f"{expert}.gate_proj.weight": gate,
                f"{expert}.up_proj.weight": up,
                f"{expert}.down_proj.weight": layer.down[e],
            }
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in named.items()}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_tokenizer(source: Path, out: Path) -> None:
    (out / "tokenizer.json").write_text(source.read_text())
    write_json(
        out / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "bos_token": None,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": Shape().max_position_embeddings,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {
                str(i): {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
                for i, token in enumerate(SPECIAL)
            },
        },
    )


@torch.no_grad()
def check(model: Model, out: Path) -> None:
    """The exported weights give the same logits in transformers as in the training code; the tokenizer comes back whole."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16).float())
    reference = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "fn main() { println!(\"hello\"); } Die Zelle enthält 1234 表のセルを選択します。"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if tokenizer.decode(ids) != text:
        raise SystemExit("the tokenizer does not give the text back")
    batch = torch.cat([torch.tensor([ids]), torch.randint(len(SPECIAL), model.shape.vocab_size, (3, len(ids)))])
    ours = model.logits(model(batch, torch.float32)[0])
    difference = (ours - reference(batch).logits).abs().max().item()
    low = (AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()(batch).logits.float() - ours).abs()
    print(f"largest logit difference to transformers: float32 {difference:.2e}, bfloat16 {low.max():.2f} (mean {low.mean():.3f})")
    if difference > LARGEST_DIFFERENCE:
        raise SystemExit("transformers computes something else")
    print(tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder given to prepare.py")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    state = torch.load(args.checkpoint, mmap=True)
    model = Model(Shape())
    model.load_state_dict(state["model"])
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "config.json", config(model.shape))
    write_json(args.out / "generation_config.json", {"eos_token_id": [0, 2], "pad_token_id": 0, "do_sample": False})
    write_tokenizer(args.work / "tokenizer.json", args.out)
    weights = args.out / "model.safetensors"
    save_file(tensors(model), weights, {"format": "pt", "steps": str(state["step"]), "tokens": str(state["tokens"])})
    weights.chmod(0o644)
    size = weights.stat().st_size
    print(f"{weights}: {size} bytes, step {state['step']}, {state['tokens']} tokens")
    if size > LARGEST_FILE:
        raise SystemExit(f"more than {LARGEST_FILE} bytes")
    check(model, args.out)


if __name__ == "__main__":
    main()
