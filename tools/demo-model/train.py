"""Train the demo model until a given time.

    python train.py --work WORK --minutes 60
    python -m torch.distributed.run --nproc-per-node 2 train.py --work WORK --until 2026-07-01T12:00:00Z --resume

reads WORK/tokens, writes WORK/checkpoints/{latest,MINUTES}.pt and WORK/train.log. The learning rate follows a cosine over the time budget,
so a loaded machine gives a less trained model, not a late one. --resume goes on from latest.pt within the budget it was started with,
unless told another end. With two processes of one thread each, as in the second line, two cores go faster than with two threads in one
process, most of all where other programs want them too: the processes meet once a step, the threads at every operation.

Beside the language model's loss there are two terms on the routing. `balance` asks that all experts of a layer are used alike over the
whole mixture: the usual load-balancing loss, against a moving average. `locality` holds every single sequence near a given
concentration, experts * sum of squared shares, which is 1 where a sequence uses all experts alike and 16 where it uses four: the
load-balancing loss of one sequence, with the sign and strength of its distance from the target. Small models left to themselves separate
languages far more than large ones do, and kinds of text less.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model import Model, Routing, Shape

LENGTH = 256
BATCH = 6  # sequences per process
WARM_UP = 80
PEAK = 2e-3
FLOOR = 0.03
CHECKPOINT_SECONDS = 240
HELD_OUT_SEQUENCES = 8
MOST_PULL = 4.0
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
        for workload in ("task", "language", ""):
            of_workload = every[[name.startswith(workload) for name in self.sequences]]
            same = of_workload.any(1).sum(-1).float().mean().item()
            flat = of_workload.flatten(0, 1)
            order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))
            mixed = torch.stack([flat[part].any(0) for part in order.split(HELD_OUT_SEQUENCES)]).sum(-1).float().mean().item()
            report[f"same_domain_percent_{workload or 'mixed'}"] = round(100 * (same / mixed - 1), 1)
        return report


class Team:
    """The training processes on this machine. Each step they average one flat vector: all gradients, then some statistics."""

    def __init__(self, parameters: list[nn.Parameter], statistics: int) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        count = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(count + statistics)
        self.gradients, self.statistics = self.flat[:count], self.flat[count:]
        at = 0
        for parameter in parameters:
            parameter.grad = self.flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        if self.size > 1:
            dist.init_process_group("gloo")
            shared = f"/dev/shm/demo-model-{os.environ['MASTER_PORT']}"
            # Two sets of buffers in turn: whoever passes the barrier of one step has read those of the step before.
            whole = torch.from_file(shared, shared=True, size=2 * self.size * len(self.flat))
            self.buffers = whole.view(2, self.size, len(self.flat))
            dist.barrier()
            if self.rank == 0:
                os.unlink(shared)
        self._turn = 0

    def average(self) -> None:
        if self.size == 1:
            return
        buffers = self.buffers[self._turn]
        self._turn = 1 - self._turn
        buffers[self.rank].copy_(self.flat)
        dist.barrier()
        torch.mean(buffers, 0, out=self.flat)


class Terms(NamedTuple):
    """The two terms on one layer's routing, with what they are made from."""

    balance: Tensor
    locality: Tensor
    share: Tensor  # [experts], of this batch's tokens
    concentration: Tensor  # [batch]

    @classmethod
    def of(cls, routing: Routing, usage: Tensor, target: float) -> Terms:
        probabilities = routing.probabilities.mean(1)
        batch, experts = probabilities.shape
        counts = torch.zeros(batch, experts).scatter_add_(
            1, routing.chosen.reshape(batch, -1), torch.ones(batch, routing.chosen.numel() // batch)
        )
        shares = counts / counts.sum(1, keepdim=True)
        share = shares.mean(0)
        concentration = experts * shares.square().sum(1)
        balance = experts * ((0.8 * usage + 0.2 * share) * probabilities.mean(0)).sum()
        pull = (concentration - target).clamp(-MOST_PULL, MOST_PULL)
        locality = (pull * experts * (shares * probabilities).sum(1)).mean()
        return cls(balance, locality, share, concentration)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder given to prepare.py")
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument("--minutes", type=float, help="time budget from now")
    end.add_argument("--until", type=datetime.fromisoformat, help="end of the time budget, with time zone")
    parser.add_argument("--balance", type=float, default=0.05, help="weight of the balance term")
    parser.add_argument("--locality", type=float, default=0.01, help="weight of the locality term")
    parser.add_argument("--concentration", type=float, default=4.0, help="what the locality term holds each sequence near")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from checkpoints/latest.pt")
    args = parser.parse_args()

    torch.set_num_threads(args.threads if "RANK" not in os.environ else 1)
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
    team = Team(list(model.parameters()), usage.numel() + 4)
    first = team.rank == 0
    supply = batches(args.work / "tokens", np.random.default_rng([args.seed, step, team.rank]))
    held_out = HeldOut(args.work / "tokens")
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    log = (args.work / "train.log").open("a")

    def say(**facts: object) -> None:
        if not first:
            return
        line = json.dumps({"minute": round((time.time() - begun) / 60, 1), "step": step, "tokens": tokens, **facts})
        print(line, file=log, flush=True)

    def save(*names: str) -> None:
        if not first:
            return
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "usage": usage, "begun": begun, "step": step, "tokens": tokens}
        for name in names:
            torch.save(state, checkpoints / "writing.pt")
            (checkpoints / "writing.pt").rename(checkpoints / name)

    say(balance=args.balance, locality=args.locality, concentration=args.concentration, seed=args.seed, until=deadline)
    last_save, last_line, since, losses = time.time(), time.time(), tokens, []
    team.statistics[3] = (time.time() - begun) / (deadline - begun)
    team.average()
    progress = team.statistics[3].item()
    while progress < 1:
        rate = PEAK * min(1.0, (step + 1) / WARM_UP) * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        team.flat.zero_()
        ids = next(supply)
        hidden, routings = model(ids[:, :-1], DTYPE)
        loss = model.loss(hidden, ids[:, 1:], DTYPE)
        terms = [Terms.of(routing, usage[layer], args.concentration) for layer, routing in enumerate(routings)]
        balance = torch.stack([t.balance for t in terms]).mean()
        locality = torch.stack([t.locality for t in terms]).mean()
        (loss + args.balance * balance + args.locality * locality).backward()
        with torch.no_grad():
            concentration = torch.stack([t.concentration for t in terms]).mean()
            ahead = float(team.size) if stopping else (time.time() - begun) / (deadline - begun)
            team.statistics[:4] = torch.stack([loss.detach(), balance.detach(), concentration, torch.tensor(ahead)])
            team.statistics[4:] = torch.stack([t.share for t in terms]).flatten()
            team.average()
            usage.lerp_(team.statistics[4:].view_as(usage), 0.02)
            norm = team.gradients.norm()
            team.gradients.mul_((1 / norm).clamp(max=1.0))
        optimizer.step()
        # What every process reads is the same average, so all of them end at the same step.
        mean_loss, balance, concentration, progress = team.statistics[:4].tolist()
        step += 1
        tokens += team.size * ids.shape[0] * LENGTH
        losses.append(mean_loss)
        if step % 50 == 0:
            load = usage * model.shape.num_experts
            say(
                loss=round(float(np.mean(losses)), 3),
                balance=round(balance, 3),
                concentration=round(concentration, 2),
                load=[round(load.min().item(), 2), round(load.max().item(), 2)],
                gradient=round(norm.item(), 2),
                rate=round(rate, 6),
                tokens_per_second=round((tokens - since) / (time.time() - last_line)),
            )
            losses, since, last_line = [], tokens, time.time()
        if time.time() - last_save > CHECKPOINT_SECONDS:
            save("latest.pt", f"{round((time.time() - begun) / 60):03}.pt")
            if first:
                say(held_out=held_out.measure(model))
            last_save = time.time()
    save("latest.pt", f"{round((time.time() - begun) / 60):03}.pt")
    if first:
        say(held_out=held_out.measure(model))


if __name__ == "__main__":
    main()
