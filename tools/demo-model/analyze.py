"""How local a model's expert use is: the figures of the model card, from a file that trace.py wrote.

    python analyze.py WORK/trace.npz

1. Correlation of per-(layer, expert) use between a request's prefill and its decode (published models: 0.70-0.92).
2. Distinct experts per layer and step of decode batches from one domain against mixed ones (published: 17-21 % fewer).
3. A small simulation of decode routing: Poisson arrivals, one token per request and step, round-robin against the locality band
   (prompt counts, balanced spherical k-means fitted on the calibration prompts, tau 0.1, least loaded inside the band).
   Distinct experts per layer and step are weighted by generated tokens.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.stats import pearsonr, spearmanr

Array = np.ndarray


class Trace:
    def __init__(self, path: Path) -> None:
        with np.load(path) as data:
            self.split, self.workload, self.domain = data["split"], data["workload"], data["domain"]
            prefill, decode, experts = data["prefill"], data["decode"], int(data["experts"])
        self.experts, self.top_k = experts, decode.shape[-1]
        self.prompt_counts = self._counts(prefill, experts)
        self.decode_counts = self._counts(decode, experts)
        bits = np.uint64(1) << decode.astype(np.uint64)
        self.used = np.bitwise_or.reduce(bits, -1)  # [request, step, layer], a bit per expert
        self.evaluation = np.flatnonzero(self.split == "evaluation")
        self.calibration = np.flatnonzero(self.split == "calibration")

    @staticmethod
    def _counts(chosen: Array, experts: int) -> Array:
        """[request, layer, expert] from [request, token, layer, top-k]."""
        requests, _, layers, _ = chosen.shape
        counts = np.zeros((requests, layers, experts), np.float32)
        for layer in range(layers):
            flat = chosen[:, :, layer].reshape(requests, -1)
            for request in range(requests):
                counts[request, layer] = np.bincount(flat[request], minlength=experts)
        return counts


def unit(rows: Array) -> Array:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def correlation(trace: Trace, requests: Array) -> str:
    a, b = (c[requests] / c[requests].sum(-1, keepdims=True) for c in (trace.prompt_counts, trace.decode_counts))
    layers = [pearsonr(a[:, i].ravel(), b[:, i].ravel())[0] for i in range(a.shape[1])]
    return f"pearson {pearsonr(a.ravel(), b.ravel())[0]:.3f} (by layer {min(layers):.2f}-{max(layers):.2f}), spearman {spearmanr(a.ravel(), b.ravel())[0]:.3f}"


def distinct(trace: Trace, groups: list[Array]) -> float:
    return float(np.mean([np.bitwise_count(np.bitwise_or.reduce(trace.used[group], 0)).mean() for group in groups]))


def same_against_mixed(trace: Trace, requests: Array, batch: int, rng: np.random.Generator) -> tuple[float, float]:
    """Each domain counts as often as it occurs among the requests."""
    same = []
    for domain in np.unique(trace.domain[requests]):
        pool = requests[trace.domain[requests] == domain]
        if len(pool) >= batch:
            same += [rng.choice(pool, batch, False) for _ in range(len(pool))]
    mixed = [rng.choice(requests, batch, False) for _ in range(400)]
    return distinct(trace, same), distinct(trace, mixed)


def balanced_centroids(points: Array, clusters: int, rng: np.random.Generator) -> Array:
    """Spherical k-means with at most ceil(n / k) points per cluster; the best of three starts."""
    points = unit(points)
    slots = np.repeat(np.arange(clusters), -(-len(points) // clusters))
    best, best_cost = points[:clusters], np.inf
    for _ in range(3):
        centres = points[rng.integers(len(points))][None]
        while len(centres) < clusters:
            nearest = (1 - points @ centres.T).min(1).clip(0)
            centres = np.vstack([centres, points[rng.choice(len(points), p=nearest / nearest.sum())]])
        for _ in range(10):
            cost = (1 - points @ centres.T)[:, slots]
            row, column = linear_sum_assignment(cost)
            owner = slots[column]
            centres = unit(np.stack([points[row[owner == k]].mean(0) for k in range(clusters)]))
        if cost[row, column].sum() < best_cost:
            best, best_cost = centres, cost[row, column].sum()
    return best


Route = Callable[[int, Array], int]


def round_robin(workers: int) -> Route:
    turn = itertools.count()
    return lambda _request, _load: next(turn) % workers


def least_loaded(_workers: int) -> Route:
    return lambda _request, load: int(load.argmin())


def locality_band(similarity: Array, tau: float) -> Route:
    def route(request: int, load: Array) -> int:
        near = similarity[request]
        band = np.flatnonzero(near >= near.max() - tau)
        return int(min(band, key=lambda worker: (load[worker], -near[worker], worker)))

    return route


def simulate(trace: Trace, requests: Array, route: Route, workers: int, batch: int, seed: int) -> tuple[float, float]:
    """Distinct experts per layer and step weighted by tokens, and the mean over steps of largest over mean load."""
    arrivals, steps = np.random.default_rng(seed), 700
    length, layers = trace.used.shape[1:]
    pending = np.zeros((workers, length, layers), np.uint64)  # experts that the running requests will use, by step from now
    load = np.zeros(workers, int)
    leaving: list[list[int]] = [[] for _ in range(steps + length + 1)]
    experts = tokens = 0.0
    skew = []
    for step in range(steps):
        for worker in leaving[step]:
            load[worker] -= 1
        for _ in range(arrivals.poisson(workers * batch / length)):
            request = int(arrivals.choice(requests))
            worker = route(request, load)
            load[worker] += 1
            pending[worker] |= trace.used[request]
            leaving[step + length].append(worker)
        if step >= 2 * length:
            now = np.bitwise_count(pending[:, 0]).mean(1)
            experts += float((now * load).sum())
            tokens += float(load.sum())
            skew.append(load.max() / max(load.mean(), 1e-9))
        pending[:, :-1] = pending[:, 1:]
        pending[:, -1] = 0
    return experts / tokens, float(np.mean(skew))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tau", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    trace = Trace(args.trace)
    rng = np.random.default_rng(0)
    pools = {"mixed": trace.evaluation}
    for workload in ("task", "language"):
        pools[workload] = trace.evaluation[trace.workload[trace.evaluation] == workload]

    print("prefill to decode correlation")
    for name, pool in pools.items():
        print(f"  {name:9} {correlation(trace, pool)}")
    print("same-domain against mixed decode batches, distinct experts per layer and step")
    for name, pool in pools.items():
        cells = []
        for batch in (4, 8, 16):
            same, mixed = same_against_mixed(trace, pool, batch, rng)
            cells.append(f"batch {batch}: {same:.1f} / {mixed:.1f} ({100 * (same / mixed - 1):+.1f} %)")
        print(f"  {name:9} {', '.join(cells)}")
    usage = trace.decode_counts[trace.evaluation].sum(0)
    usage = usage / usage.mean(-1, keepdims=True)
    print("load of the most used expert over the mean, by layer:", np.round(usage.max(-1), 2), "experts under 0.1:", (usage < 0.1).sum(-1))

    print("decode routing, distinct experts per layer and step, token-weighted; in brackets largest over mean load")
    signatures = unit(trace.prompt_counts.reshape(len(trace.domain), -1))
    for name, pool in pools.items():
        calibration = trace.calibration if name == "mixed" else trace.calibration[trace.workload[trace.calibration] == name]
        for workers in (4, 8):
            centres = balanced_centroids(signatures[calibration], workers, rng)
            for batch in (8, 16):
                makers: dict[str, Callable[[], Route]] = {
                    "round-robin": lambda workers=workers: round_robin(workers),
                    "least-loaded": lambda workers=workers: least_loaded(workers),
                    "locality": lambda centres=centres: locality_band(signatures @ centres.T, args.tau),
                }
                results = {
                    label: np.mean([simulate(trace, pool, make(), workers, batch, seed) for seed in range(args.seeds)], 0)
                    for label, make in makers.items()
                }
                base = results["round-robin"][0]
                cells = [f"{label} {v[0]:.2f} {100 * (v[0] / base - 1):+.1f} % [{v[1]:.2f}]" for label, v in results.items()]
                print(f"  {name:9} {workers} workers, batch {batch:2}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
