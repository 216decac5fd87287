"""The same decision and the same fit, written with NumPy and SciPy as one would.

Same choices as crates/locality: six transforms, 30,000 sampled pairs, per-layer dot products so
that a greedy step is a sum and not a fresh product, balanced assignment by linear_sum_assignment
over K * ceil(N / K) slots, k-means++.
"""

import sys
import time

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.stats import rankdata


def load(path):
    raw = np.fromfile(path, "<u4")
    n, layers, experts = map(int, raw[:3])
    records = raw[5:].reshape(n, 4, layers, experts)
    return (
        np.ascontiguousarray(records[:, 0]),
        np.ascontiguousarray(records[:, 1]),
        np.ascontiguousarray(records[:, 2]).view("<f4"),
        np.ascontiguousarray(records[:, 3]).view("<f4"),
    )


def unit(x):
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30)


def layer_dots(x, i, j):
    """x [N, L, E] -> dots [L, pairs], squares [L, N]."""
    dots = np.empty((x.shape[1], len(i)), np.float32)
    squares = np.empty((x.shape[1], len(x)), np.float32)
    for layer in range(x.shape[1]):
        rows = np.ascontiguousarray(x[:, layer])
        squares[layer] = np.einsum("ne,ne->n", rows, rows)
        dots[layer] = np.einsum("pe,pe->p", rows[i], rows[j])
    return dots, squares


def ranks(dots, squares, i, j):
    inverse = 1 / np.sqrt(np.maximum(squares, 1e-30))
    return rankdata(dots * inverse[i] * inverse[j])


def pearson(a, b):
    a, b = a - a.mean(), b - b.mean()
    return (a @ b) / np.sqrt((a @ a) * (b @ b))


def kmeans(points, k, rng, iterations=100):
    n = len(points)
    capacity = -(-n // k)
    seeds = [rng.integers(n)]
    distance = 1 - points @ points[seeds[0]]
    while len(seeds) < k:
        weights = np.maximum(distance, 0)
        seeds.append(rng.choice(n, p=weights / weights.sum()))
        distance = np.minimum(distance, 1 - points @ points[seeds[-1]])
    centroids = points[seeds]
    labels = None
    for done in range(iterations):
        cost = np.repeat(1 - points @ centroids.T, capacity, axis=1)
        _, slots = linear_sum_assignment(cost)
        new = slots // capacity
        if labels is not None and (new == labels).all():
            break
        labels = new
        centroids = unit(np.stack([points[labels == c].sum(0) for c in range(k)]))
    similarity = np.einsum("nd,nd->n", points, centroids[labels]).sum()
    return similarity, centroids, labels, done + 1


def fit(prompt, decode, probability, logit, k, restarts, seed=0):
    rng = np.random.default_rng(seed)
    n, layers, _ = prompt.shape
    i, j = np.triu_indices(n, 1)
    chosen = np.sort(rng.choice(len(i), 30_000, replace=False))
    i, j = i[chosen], j[chosen]
    counts = prompt.astype(np.float32)
    idf = np.log((n + 1) / ((prompt > 0).sum(0) + 1)).astype(np.float32)
    dots, squares = layer_dots(decode.astype(np.float32), i, j)
    target = ranks(dots.sum(0), squares.sum(0), i, j)
    best = None
    for name, x in {
        "count_idf": lambda: counts * idf,
        "count": lambda: counts,
        "sqrt_count": lambda: np.sqrt(counts),
        "gate_probability": lambda: probability,
        "gate_logit": lambda: logit,
        "binary": lambda: (counts > 0).astype(np.float32),
    }.items():
        x = x()
        dots, squares = layer_dots(x, i, j)
        rho = pearson(ranks(dots.sum(0), squares.sum(0), i, j), target)
        if not name.startswith("gate") and (best is None or rho > best[0]):
            best = rho, name, x, dots, squares
    all_layers, name, x, dots, squares = best
    left, path = list(range(layers)), []
    dot_sum, square_sum = np.zeros_like(dots[0]), np.zeros_like(squares[0])
    while left:
        rhos = [
            pearson(ranks(dot_sum + dots[l], square_sum + squares[l], i, j), target) for l in left
        ]
        at = int(np.argmax(rhos))
        layer = left.pop(at)
        dot_sum, square_sum = dot_sum + dots[layer], square_sum + squares[layer]
        path.append((rhos[at], layer))
    peak = int(np.argmax([rho for rho, _ in path]))
    mask = sorted(layer for _, layer in path[: peak + 1])
    points = unit(x[:, mask].reshape(n, -1))
    runs = [kmeans(points, k, rng) for _ in range(restarts)]
    similarity, *_, iterations = max(runs, key=lambda run: run[0])
    return name, all_layers, path[peak][0], mask, similarity / n, iterations


def decision(prompt, k):
    rng = np.random.default_rng(0)
    n = len(prompt)
    idf = np.log((n + 1) / ((prompt > 0).sum(0) + 1)).astype(np.float32).ravel()
    points = unit(prompt.reshape(n, -1) * idf)
    centroids = np.ascontiguousarray(unit(points[rng.choice(n, k, replace=False)]))
    # Few prompts in turn, as ours: a gateway has just decoded the counts, so they are in the cache.
    counts = prompt.reshape(n, -1)[:16].copy()
    times = []
    for round in range(3000):
        start = time.perf_counter_ns()
        signature = counts[round % len(counts)] * idf
        signature /= np.sqrt(signature @ signature)
        similarities = centroids @ signature
        band = np.flatnonzero(similarities >= similarities.max() - 0.1)
        times.append(time.perf_counter_ns() - start)
    assert len(band)
    return np.percentile(times, 50) / 1000


def main(path, what):
    data = load(path)
    if what == "decision":
        for k in (16, 256):
            print(f"decision/K={k}: {decision(data[0], k):.1f} us (p50)")
        return
    for restarts in (1, 4):
        start, processor = time.perf_counter(), time.process_time()
        name, all_layers, rho, mask, within, iterations = fit(*data, 16, restarts)
        seconds, processor = time.perf_counter() - start, time.process_time() - processor
        print(
            f"fit/N=1000,K=16,restarts={restarts}: {seconds:.2f} s, {processor:.2f} s of processor "
            f"time; {name} rho {rho:.4f} "
            f"(all layers {all_layers:.4f}), {len(mask)} layers kept, within {within:.5f}, "
            f"{iterations} iterations"
        )


main(*sys.argv[1:])
