"""Train the demo model until a given time.

    python train.py --work WORK --minutes 60
    python train.py --work WORK --until 2026-07-01T12:00:00Z --resume

reads WORK/tokens, writes WORK/checkpoints/{latest,MINUTES}.pt and WORK/train.log. The learning rate follows a cosine over the time budget,
so a loaded machine gives a less trained model, not a late one. --resume goes on from latest.pt within the budget it was started with,
unless told another end.

Beside the language model's loss there are two terms on the routing, `balance` and `spread`, each with its weight. The first asks that
all experts of a layer are used alike over the whole mixture (the usual load-balancing loss, against a moving average). The second, the
entropy of a sequence's mean routing, asks that each single sequence gets by with few of them: it is what sets how local routing is.
Without enough of the first, the second kills experts.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model import Model, Routing, Shape

LENGTH = 256
BATCH = 8
WARM_UP = 80
PEAK = 2e-3
FLOOR = 0.03
CHECKPOINT_SECONDS = 240
HELD_OUT_SEQUENCES = 8
DTYPE = torch.bfloat16


def batches(tokens: Path, rng: np.random.Generator) -> Iterator[Tensor]:
    """Batches with every domain in turn: half task domains, half languages."""
    arrays = {path.stem: np.load(path) for path in sorted((tokens / "train").glob("*.npy"))}
    waiting: dict[str, list[int]] = {name: [] for name in arrays}

    def sequence(name: str) -> np.ndarray:
        array = arrays[name]
        if not waiting[name]:
            starts = np.arange(rng.integers(LENGTH), len(array) - LENGTH - 1, LENGTH)
            waiting[name] = rng.permutation(starts).tolist()
        at = waiting[name].pop()
        return array[at : at + LENGTH + 1]

    tasks = [name for name in arrays if name.startswith("task")]
    languages = [name for name in arrays if name.startswith("language")]
    queue: list[str] = []
    while True:
        while len(queue) < BATCH:
            # As many sequences of the four tasks as of the eight languages.
            queue += rng.permutation(tasks * len(languages) + languages * len(tasks)).tolist()
        names, queue = queue[:BATCH], queue[BATCH:]
        yield torch.from_numpy(np.stack([sequence(name) for name in names]).astype(np.int64))


class HeldOut:
    """Loss per domain, and how many distinct experts eight sequences of one domain use at a position, against eight mixed ones."""

    def __init__(self, tokens: Path) -> None:
        self.sequences: dict[str, Tensor] = {}
        for path in sorted((tokens / "heldout").glob("*.npy")):
            array = np.load(path)
            starts = np.linspace(0, len(array) - LENGTH - 2, HELD_OUT_SEQUENCES).astype(int)
            self.sequences[path.stem] = torch.from_numpy(np.stack([array[i : i + LENGTH + 1] for i in starts]).astype(np.int64))

    @torch.no_grad()
    def measure(self, model: Model) -> dict[str, float]:
        report, used = {}, []
        for name, ids in self.sequences.items():
            hidden, routings = model(ids[:, :-1], DTYPE)
            report[name] = round(model.loss(hidden, ids[:, 1:], DTYPE).item(), 3)
            chosen = torch.stack([r.chosen.view(len(ids), LENGTH, -1) for r in routings], 2)
            used.append(torch.zeros(*chosen.shape[:3], model.shape.num_experts, dtype=torch.bool).scatter_(3, chosen, True))
        every = torch.stack(used)  # [domain, sequence, position, layer, expert]
        same = every.any(1).sum(-1).float().mean().item()
        flat = every.flatten(0, 1)
        order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))
        mixed = torch.stack([flat[part].any(0) for part in order.split(HELD_OUT_SEQUENCES)]).sum(-1).float().mean().item()
        report |= {"same_domain_experts": round(same, 2), "mixed_experts": round(mixed, 2), "change_percent": round(100 * (same / mixed - 1), 1)}
        return report


class Terms(NamedTuple):
    """The two terms on one layer's routing, and the share of tokens that each of its experts got in this batch."""

    balance: Tensor
    spread: Tensor
    share: Tensor

    @classmethod
    def of(cls, routing: Routing, usage: Tensor) -> Terms:
        probabilities, chosen = routing.probabilities, routing.chosen
        experts = probabilities.shape[-1]
        share = torch.bincount(chosen.reshape(-1), minlength=experts).float() / chosen.numel()
        balance = experts * ((0.8 * usage + 0.2 * share) * probabilities.mean((0, 1))).sum()
        per_sequence = probabilities.mean(1)
        spread = -(per_sequence * (per_sequence + 1e-9).log()).sum(-1).mean()
        return cls(balance, spread, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder given to prepare.py")
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument("--minutes", type=float, help="time budget from now")
    end.add_argument("--until", type=datetime.fromisoformat, help="end of the time budget, with time zone")
    parser.add_argument("--balance", type=float, default=0.05, help="weight of the balance term")
    parser.add_argument("--spread", type=float, default=0.01, help="weight of the spread term")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from checkpoints/latest.pt")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    checkpoints: Path = args.work / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    latest = checkpoints / "latest.pt"

    model = Model(Shape())
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), fused=True)
    usage = torch.full((model.shape.num_hidden_layers, model.shape.num_experts), 1 / model.shape.num_experts)
    begun, step, tokens = time.time(), 0, 0
    if args.resume:
        state = torch.load(latest)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        usage, begun, step, tokens = state["usage"], state["begun"], state["step"], state["tokens"]
    deadline = args.until.timestamp() if args.until else time.time() + 60 * args.minutes
    supply = batches(args.work / "tokens", np.random.default_rng(args.seed + step))
    held_out = HeldOut(args.work / "tokens")
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    log = (args.work / "train.log").open("a")

    def say(**facts: object) -> None:
        line = json.dumps({"minute": round((time.time() - begun) / 60, 1), "step": step, "tokens": tokens, **facts})
        print(line, file=log, flush=True)

    def save(*names: str) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "usage": usage, "begun": begun, "step": step, "tokens": tokens}
        for name in names:
            torch.save(state, checkpoints / "writing.pt")
            (checkpoints / "writing.pt").rename(checkpoints / name)

    say(balance=args.balance, spread=args.spread, seed=args.seed, until=deadline)
    last_save, last_line, losses = time.time(), time.time(), []
    since = tokens
    while time.time() < deadline and not stopping:
        progress = min(1.0, (time.time() - begun) / (deadline - begun))
        rate = PEAK * min(1.0, (step + 1) / WARM_UP) * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = next(supply)
        hidden, routings = model(ids[:, :-1], DTYPE)
        loss = model.loss(hidden, ids[:, 1:], DTYPE)
        terms = [Terms.of(routing, usage[layer]) for layer, routing in enumerate(routings)]
        balance = torch.stack([t.balance for t in terms]).mean()
        spread = torch.stack([t.spread for t in terms]).mean()
        (loss + args.balance * balance + args.spread * spread).backward()
        usage.lerp_(torch.stack([t.share for t in terms]), 0.02)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        tokens += ids.shape[0] * LENGTH
        losses.append(loss.item())
        if step % 50 == 0:
            load = usage * model.shape.num_experts
            speed = (tokens - since) / (time.time() - last_line)
            say(
                loss=round(float(np.mean(losses)), 3),
                balance=round(balance.item(), 3),
                spread=round(spread.item(), 3),
                load=[round(load.min().item(), 2), round(load.max().item(), 2)],
                gradient=round(norm.item(), 2),
                rate=round(rate, 6),
                tokens_per_second=round(speed),
            )
            losses, since, last_line = [], tokens, time.time()
        if time.time() - last_save > CHECKPOINT_SECONDS:
            save("latest.pt", f"{round((time.time() - begun) / 60):03}.pt")
            say(held_out=held_out.measure(model))
            last_save = time.time()
    save("latest.pt", f"{round((time.time() - begun) / 60):03}.pt")
    say(held_out=held_out.measure(model))


if __name__ == "__main__":
    main()
