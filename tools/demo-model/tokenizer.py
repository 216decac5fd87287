"""Train the byte-level BPE tokenizer on the training documents and encode both sides of the corpus.

    python tokenizer.py --work WORK

reads WORK/corpus, writes WORK/tokenizer.json and WORK/tokens/{train,heldout}/{workload}-{domain}.npy: one array of ids per domain,
every document preceded by <|endoftext|>.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT = 0
BYTES_PER_DOMAIN = 800_000

# Qwen's pattern: contractions, words, single digits, punctuation, line breaks, spaces.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def documents(path: Path) -> list[str]:
    with path.open() as file:
        return [json.loads(line)["text"] for line in file]


def sample(folder: Path) -> Iterator[str]:
    """The same number of bytes from every domain, so that each gets its share of the vocabulary."""
    for path in sorted(folder.glob("*.jsonl")):
        left = BYTES_PER_DOMAIN
        for text in documents(path):
            if left <= 0:
                break
            left -= len(text.encode())
            yield text


def train(texts: Iterator[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder given to prepare.py")
    work: Path = parser.parse_args().work
    tokenizer = train(sample(work / "corpus/train"))
    tokenizer.save(str(work / "tokenizer.json"))
    for side in ("train", "heldout"):
        (work / "tokens" / side).mkdir(parents=True, exist_ok=True)
        for path in sorted((work / "corpus" / side).glob("*.jsonl")):
            texts = documents(path)
            ids: list[int] = []
            for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
                ids += [END_OF_TEXT, *encoding.ids]
            np.save(work / "tokens" / side / f"{path.stem}.npy", np.array(ids, dtype=np.uint16))
            size = sum(len(text.encode()) for text in texts)
            print(f"{side:8} {path.stem:22} {len(ids):8} tokens, {size / len(ids):.2f} bytes per token", flush=True)


if __name__ == "__main__":
    main()
