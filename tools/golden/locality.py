"""Golden values for crates/locality, from SciPy: crates/locality/tests/golden/*.json.

    python -m venv .venv && .venv/bin/pip install numpy scipy
    .venv/bin/python tools/golden/locality.py

The committed files were made with Python 3.12, NumPy 2.5 and SciPy 1.18.
"""

import json
import pathlib

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr

OUT = pathlib.Path(__file__).parents[2] / "crates/locality/tests/golden"


def write(name, value):
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / name).write_text(json.dumps(value, separators=(",", ":")) + "\n")


def spearman(rng):
    cases = []
    for size, levels in [(2, 9), (3, 2), (10, 4), (50, 5), (200, 1000), (200, 3)]:
        x, y = rng.integers(0, levels, (2, size))
        y = y + (x if size % 4 else 0)
        rho = spearmanr(x, y).statistic
        cases.append(
            {"x": x.tolist(), "y": y.tolist(), "rho": None if np.isnan(rho) else float(rho)}
        )
    cases.append({"x": [1, 1, 1], "y": [1, 2, 3], "rho": None})
    write("spearman.json", cases)


def assignment(rng):
    cases = []
    for points, clusters in [(7, 3), (20, 4), (33, 8), (16, 16), (12, 1), (60, 7), (45, 20)]:
        for levels in (1000, 4):
            for at_least in (0, 1):
                costs = rng.integers(0, levels, (points, clusters))
                at_most = -(-points // clusters)
                slots = np.repeat(costs, at_most, axis=1)
                must = 0
                if at_least:  # the first slot of a cluster is taken before anything else
                    must = 10_000
                    slots[:, ::at_most] -= must
                rows, columns = linear_sum_assignment(slots)
                total = int(slots[rows, columns].sum()) + must * clusters
                cases.append(
                    {
                        "costs": costs.ravel().tolist(),
                        "clusters": clusters,
                        "at_least": at_least,
                        "at_most": at_most,
                        "total": total,
                    }
                )
    write("assign.json", cases)


def rho_of(x, target):
    """x [N, dim]; distances rounded, so that what is equal ties, and 1 from a zero vector."""
    distances = np.round(np.nan_to_num(pdist(x, "cosine"), nan=1.0), 10)
    if (distances == distances[0]).all():
        return -2.0  # undefined: after everything else
    return float(spearmanr(distances, target).statistic)


def fit(rng):
    records, layers, experts, top_k, tokens = 14, 5, 12, 2, 60
    domain = rng.normal(0, 1, (3, layers, experts)) * (np.arange(layers) + 0.5)[:, None] / 2
    draw = {"prompt": [], "decode": []}
    logits = []
    for record in range(records):
        own = domain[record % 3] + rng.normal(0, 0.5, (layers, experts))
        logits.append((own + rng.normal(0, 0.2, own.shape)).astype(np.float32))
        for kind, length in (("prompt", tokens), ("decode", 30)):
            counts = np.zeros((layers, experts), int)
            for layer in range(layers):
                shares = np.exp(own[layer]) / np.exp(own[layer]).sum()
                for _ in range(length):
                    counts[layer, rng.choice(experts, top_k, replace=False, p=shares)] += 1
            draw[kind].append(counts)
    prompt, decode, logits = np.array(draw["prompt"]), np.array(draw["decode"]), np.array(logits)
    probabilities = np.exp(logits.astype(np.float64)).astype(np.float32)
    idf = np.log((records + 1) / ((prompt > 0).sum(0) + 1))
    target = np.round(pdist(decode.reshape(records, -1), "cosine"), 10)
    transforms = {
        "count_idf": prompt * idf,
        "count": prompt,
        "sqrt_count": np.sqrt(prompt),
        "gate_probability": probabilities.astype(np.float64),
        "gate_logit": logits.astype(np.float64),
        "binary": (prompt > 0).astype(float),
    }
    expected = {}
    for name, x in transforms.items():
        left, path = list(range(layers)), []
        while left:
            taken = [step["layer"] for step in path]
            rhos = [rho_of(x[:, [*taken, l]].reshape(records, -1), target) for l in left]
            best = int(np.argmax(rhos))
            path.append({"layer": left.pop(best), "rho": rhos[best]})
        expected[name] = {"rho": rho_of(x.reshape(records, -1), target), "path": path}
    write(
        "fit.json",
        {
            "layers": layers,
            "experts": experts,
            "top_k": top_k,
            "tokens": tokens,
            "prompt": prompt.reshape(records, -1).tolist(),
            "decode": decode.reshape(records, -1).tolist(),
            "gate_probabilities": [[float(v) for v in row.ravel()] for row in probabilities],
            "gate_logits": [[float(v) for v in row.ravel()] for row in logits],
            "idf": idf.ravel().tolist(),
            "expected": expected,
        },
    )


def main():
    rng = np.random.default_rng(20260700466)
    spearman(rng)
    assignment(rng)
    fit(rng)


main()
