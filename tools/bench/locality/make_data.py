"""Calibration records made up, at the size of Qwen3-30B-A3B: L = 48, E = 128, top-8.

Twelve domains with experts of their own per layer, deeper layers telling them apart better. Written
as the Rust bench reads it (crates/locality/benches/locality.rs).
"""

import sys

import numpy as np

RECORDS, LAYERS, EXPERTS, TOP_K, TOKENS, DOMAINS = 1000, 48, 128, 8, 2048, 12


def spread(shares, tokens):
    """Shares [rows, experts] to whole counts that sum to tokens * top_k, none above tokens."""
    total = tokens * TOP_K
    counts = np.minimum(shares / shares.sum(1, keepdims=True) * total, tokens).astype(np.int64)
    order = np.argsort(-shares, axis=1)
    rows = np.arange(len(shares))
    short = total - counts.sum(1)
    at = 0
    while (short > 0).any():
        e = order[:, at % EXPERTS]
        take = (short > 0) & (counts[rows, e] < tokens)
        counts[rows[take], e[take]] += 1
        short -= take
        at += 1
    return counts.astype("<u4")


def main(path):
    rng = np.random.default_rng(1)
    depth = ((np.arange(LAYERS) + 1) / LAYERS)[:, None]
    base = rng.normal(0, 0.5, (LAYERS, EXPERTS))
    taste = base + rng.normal(0, 1.2, (DOMAINS, LAYERS, EXPERTS)) * depth
    with open(path, "wb") as out:
        np.array([RECORDS, LAYERS, EXPERTS, TOP_K, TOKENS], "<u4").tofile(out)
        for record in range(RECORDS):
            own = taste[record % DOMAINS] + rng.normal(0, 0.6, (LAYERS, EXPERTS))
            for tokens in (TOKENS, 512):
                shares = np.exp(own + rng.normal(0, 0.4, own.shape))
                if tokens == TOKENS:
                    shares[shares < np.quantile(shares, 0.15)] = 0  # experts never selected
                spread(shares, tokens).tofile(out)
            np.exp(own).astype("<f4").tofile(out)
            own.astype("<f4").tofile(out)


main(sys.argv[1])
