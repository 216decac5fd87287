"""The text form of expert counts, version 1, as the Rust crate `experts` writes and reads it."""

import base64
import binascii
import struct
from collections.abc import Sequence
from dataclasses import dataclass

VERSION = 1
KEY = "colocate"
_HEADER = struct.Struct("<BHHHII")


@dataclass(frozen=True)
class Counts:
    """Selections per MoE layer and expert, over `covered` of a prompt's `tokens` tokens."""

    rows: Sequence[Sequence[int]]
    top_k: int
    covered: int
    tokens: int


def _rice(value: int, r: int) -> str:
    low = format(value & ((1 << r) - 1), f"0{r}b") if r else ""
    return "0" * (value >> r) + "1" + low


def _best(values: Sequence[int]) -> tuple[int, int]:
    """The bits that the best Rice parameter takes, and the parameter; the least on ties."""
    largest = max(values, default=0)
    return min(
        (sum((v >> r) + 1 + r for v in values), r) for r in range(max(largest, 1).bit_length())
    )


def _layer(row: Sequence[int]) -> str:
    present = [v - 1 for v in row if v]
    dense, dense_r = _best(row)
    sparse, sparse_r = _best(present)
    if dense <= sparse + len(row):
        return format(dense_r, "06b") + "".join(_rice(v, dense_r) for v in row)
    mask = "".join("1" if v else "0" for v in row)
    return format(1 << 5 | sparse_r, "06b") + mask + "".join(_rice(v, sparse_r) for v in present)


def encode(counts: Counts) -> str:
    """Write counts as base64 text."""
    shape = (len(counts.rows), len(counts.rows[0]), counts.top_k)
    head = _HEADER.pack(VERSION, *shape, counts.covered, counts.tokens)
    bits = "".join(map(_layer, counts.rows))
    bits += "0" * (-len(bits) % 8)
    return base64.b64encode(head + int(bits, 2).to_bytes(len(bits) // 8, "big")).decode()


def decode(text: str) -> Counts:
    """Read counts; ValueError says what is wrong with a text that holds none."""
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"expected standard base64: {error}") from None
    if len(data) < _HEADER.size:
        raise ValueError(f"expected a header of {_HEADER.size} bytes, got {len(data)}")
    version, layers, experts, top_k, covered, tokens = _HEADER.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"expected version {VERSION} of the counts form, got {version}")
    if not 0 < top_k <= experts or not layers:
        raise ValueError(f"expected a model's shape, got {layers} x {experts}, top-{top_k}")
    if covered > tokens:
        raise ValueError(f"expected at most {tokens} covered tokens, got {covered}")
    body = data[_HEADER.size :]
    bits = "".join(format(byte, "08b") for byte in body)
    at = 0

    def take(width: int) -> int:
        nonlocal at
        if at + width > len(bits):
            raise ValueError("truncated counts")
        at += width
        return int(bits[at - width : at], 2) if width else 0

    def rice(r: int) -> int:
        nonlocal at
        one = bits.find("1", at)
        if one < 0:
            raise ValueError("truncated counts")
        zeros, at = one - at, one + 1
        return zeros << r | take(r)

    rows = []
    for layer in range(layers):
        head = take(6)
        if head >> 5:
            mask = [take(1) for _ in range(experts)]
            row = [rice(head & 31) + 1 if bit else 0 for bit in mask]
        else:
            row = [rice(head & 31) for _ in range(experts)]
        if sum(row) != covered * top_k or max(row) > covered:
            raise ValueError(f"expected layer {layer} to sum to {covered * top_k}, got {sum(row)}")
        rows.append(row)
    if len(bits) - at >= 8 or "1" in bits[at:]:
        raise ValueError("expected nothing after the last layer, got trailing bits")
    return Counts(rows, top_k, covered, tokens)
