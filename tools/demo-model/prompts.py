"""Cut the prompts for calibration and evaluation out of held-out documents.

    python prompts.py --work WORK --out ../../models/demo/prompts

A document serves one of the two files only. A prompt begins at a paragraph's or line's start and has 96 to 128 tokens, cut so that it
ends with a whole character. Half of each file is task domains, half languages.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

from tokenizers import Tokenizer

from prepare import SEED, share

LEAST, MOST = 96, 128
PER_TASK, PER_LANGUAGE = 80, 40
FILES = ("calibration", "evaluation")


def starts(text: str) -> list[int]:
    """Where a prompt may begin: after each blank line, or after each line end where a text has few of those."""
    breaks = [0] + [m.end() for m in re.finditer(r"\n\s*\n", text)]
    if len(breaks) < len(text) / 1500:
        breaks = [0] + [m.end() for m in re.finditer(r"\n+", text)]
    return breaks


def cut(text: str, tokenizer: Tokenizer, length: int) -> str | None:
    """The longest prefix of at most `length` tokens that ends with a whole character, or None where the text is too short."""
    encoding = tokenizer.encode(text[: 12 * length], add_special_tokens=False)
    for tokens in range(min(length, len(encoding.ids)), LEAST - 1, -1):
        prompt = tokenizer.decode(encoding.ids[:tokens], skip_special_tokens=False)
        if not prompt.endswith("\ufffd") and text.startswith(prompt):
            again = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
            if LEAST <= again <= MOST:
                return prompt
    return None


def candidates(text: str, tokenizer: Tokenizer, rng: random.Random) -> list[str]:
    """Prompts from one document that do not overlap."""
    found, free = [], 0
    for start in starts(text):
        if start < free:
            continue
        prompt = cut(text[start:], tokenizer, rng.randint(LEAST + 4, MOST))
        if prompt is not None:
            found.append(prompt)
            free = start + len(prompt)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder given to prepare.py")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    rng = random.Random(SEED)
    lines: dict[str, list[dict[str, str]]] = {name: [] for name in FILES}
    for path in sorted((args.work / "corpus/heldout").glob("*.jsonl")):
        workload, domain = path.stem.split("-")
        wanted = PER_TASK if workload == "task" else PER_LANGUAGE
        documents = [json.loads(line) for line in path.read_text().splitlines()]
        for index, name in enumerate(FILES):
            side = [d for d in documents if int(share("prompts " + d["name"]) * 2) == index]
            piles = [pile for d in side if (pile := candidates(d["text"], tokenizer, rng))]
            rng.shuffle(piles)
            # One prompt from each document, then a second from each that has one, and so on.
            depth = max(map(len, piles))
            prompts = [pile[i] for i in range(depth) for pile in piles if i < len(pile)]
            prompts = list(dict.fromkeys(prompts))[:wanted]
            if len(prompts) < wanted:
                raise SystemExit(f"{path.stem}: only {len(prompts)} prompts for {name}")
            lines[name] += [{"prompt": p, "domain": domain, "workload": workload} for p in prompts]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, entries in lines.items():
        rng.shuffle(entries)
        text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        (args.out / f"{name}.jsonl").write_text(text)
        print(f"{name}: {len(entries)} prompts, {len(text.encode())} bytes")


if __name__ == "__main__":
    main()
