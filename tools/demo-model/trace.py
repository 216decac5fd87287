"""Record which experts an exported model uses for the calibration and evaluation prompts, in prefill and while decoding.

    python trace.py --model ../../models/demo --out WORK/trace.npz

Every prompt is cut to its first 96 tokens, then 64 tokens are sampled at temperature 0.8 (--temperature 0 takes the most likely).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

PREFILL, DECODE = 96, 64
BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, help="by default MODEL/prompts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--share", type=float, default=1.0, help="take only this share of each domain's prompts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, experts_implementation="grouped_mm").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    requests = []
    for split in ("calibration", "evaluation"):
        path = (args.prompts or args.model / "prompts") / f"{split}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for domain in sorted({line["domain"] for line in lines}):
            of_domain = [line for line in lines if line["domain"] == domain]
            requests += [(split, line) for line in of_domain[: round(len(of_domain) * args.share)]]
    prompts = torch.tensor([tokenizer(line["prompt"], add_special_tokens=False).input_ids[:PREFILL] for _, line in requests])

    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, out: seen.append(out[2].to(torch.uint8)))
    generator = torch.Generator().manual_seed(args.seed)

    def experts(rows: int, length: int) -> Tensor:
        """[rows, length, layers, top-k] of the last forward pass."""
        stacked = torch.stack([s.view(rows, length, -1) for s in seen], 2)
        seen.clear()
        return stacked

    prefill, decode = [], []
    with torch.no_grad():
        for batch in prompts.split(BATCH):
            rows = len(batch)
            out = model(batch, use_cache=True, logits_to_keep=1)
            prefill.append(experts(rows, PREFILL))
            steps = []
            for _ in range(DECODE):
                logits = out.logits[:, -1]
                logits[:, model.config.pad_token_id] = -torch.inf
                if args.temperature > 0:
                    token = torch.multinomial((logits / args.temperature).softmax(-1), 1, generator=generator)
                else:
                    token = logits.argmax(-1, keepdim=True)
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
                steps.append(experts(rows, 1))
            decode.append(torch.cat(steps, 1))
    np.savez_compressed(
        args.out,
        split=np.array([split for split, _ in requests]),
        workload=np.array([line["workload"] for _, line in requests]),
        domain=np.array([line["domain"] for _, line in requests]),
        prefill=torch.cat(prefill).numpy(),
        decode=torch.cat(decode).numpy(),
        experts=model.config.num_experts,
    )


if __name__ == "__main__":
    main()
