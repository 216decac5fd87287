from pathlib import Path

import pytest

from colocate_vllm.wire import decode, encode

GOLDEN = Path(__file__).with_name("wire_golden.txt").read_text().splitlines()


@pytest.mark.parametrize("line", GOLDEN)
def test_same_bytes_as_the_rust_crate(line):
    text, cells = line.split()
    counts = decode(text)
    assert [c for row in counts.rows for c in row] == [int(c) for c in cells.split(",")]
    assert encode(counts) == text


@pytest.mark.parametrize("text", ["", "!", "AQ==", GOLDEN[0].split()[0][:-8]])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError):
        decode(text)
