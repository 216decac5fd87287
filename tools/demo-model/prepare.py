"""Build the demo model's corpus from text that Debian, PyPI and crates.io packages ship.

    python prepare.py --work WORK

fetches the packages named below with their ordinary clients (apt-get, pip, cargo) into WORK/packages, turns them into plain
text and writes one JSON object per document to WORK/corpus/{train,heldout}/{workload}-{domain}.jsonl. SOURCES.md lists
every package with its licence. Whole documents are held out, never parts of one; a help page is held out in every language at once.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import html
import json
import random
import re
import subprocess
import sys
import sysconfig
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import problems

LANGUAGES = {
    "english": "en-us",
    "german": "de",
    "french": "fr",
    "spanish": "es",
    "russian": "ru",
    "japanese": "ja",
    "chinese": "zh-cn",
    "korean": "ko",
}
PYPI = [
    "simple-icd-10-cm==1.5.0",
    "licensedcode-data==32.1.0",
    "sympy==1.14.0",
    "django==6.1.3",
]
CRATES = {
    "aho-corasick": "1.1.5",
    "anyhow": "1.0.105",
    "arrayvec": "0.7.8",
    "axum": "0.8.9",
    "bytes": "1.12.2",
    "clap_builder": "4.6.7",
    "crossbeam-utils": "0.8.23",
    "futures-util": "0.3.34",
    "hashbrown": "0.17.2",
    "http": "1.5.0",
    "hyper": "1.12.0",
    "indexmap": "2.14.2",
    "indicatif": "0.18.6",
    "itertools": "0.14.0",
    "memchr": "2.8.3",
    "mio": "1.2.5",
    "proptest": "1.12.0",
    "rand": "0.10.4",
    "rayon": "1.12.0",
    "regex-automata": "0.4.19",
    "regex-syntax": "0.8.12",
    "reqwest": "0.13.5",
    "serde_json": "1.0.154",
    "syn": "2.0.119",
    "tokio": "1.54.1",
    "tower": "0.5.3",
    "tower-http": "0.7.1",
    "tracing-subscriber": "0.3.23",
}
OPEN_CATEGORIES = {"Permissive", "Public Domain", "CLA", "Copyleft", "Copyleft Limited", "Patent License"}
PERMISSIVE_CRATE = re.compile(r"\b(MIT|Apache-2\.0|Unlicense)\b")

MIN_CHARACTERS = 300
MAX_CHARACTERS = 20_000
TRAIN_BYTES = 4_500_000
HELD_OUT_SHARE = 0.12
HELD_OUT_BYTES = 450_000
SEED = 20_260_701


@dataclass(frozen=True)
class Document:
    """A text with the name that decides on which side of the split it falls."""

    name: str
    text: str


def run(*command: str, cwd: Path) -> None:
    print("+", " ".join(command), file=sys.stderr, flush=True)
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)


def fetch(packages: Path) -> None:
    """Downloads and unpacks every package that is not there yet."""
    packages.mkdir(parents=True, exist_ok=True)
    for code in LANGUAGES.values():
        name = f"libreoffice-help-{code}"
        if not (packages / name).exists():
            run("apt-get", "download", "-q", name, cwd=packages)
            deb = next(packages.glob(f"{name}_*.deb"))
            run("dpkg", "-x", deb.name, name, cwd=packages)
    for requirement in PYPI:
        name = requirement.replace("==", "-")
        if not (packages / name).exists():
            run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", name, requirement, cwd=packages)
            wheel = next((packages / name).glob("*.whl"))
            run(sys.executable, "-m", "zipfile", "-e", str(wheel.relative_to(packages)), name, cwd=packages)
    vendor = packages / "vendor"
    if not vendor.exists():
        manifest = packages / "crates"
        (manifest / "src").mkdir(parents=True, exist_ok=True)
        (manifest / "src/lib.rs").touch()
        lines = ["[workspace]", "[package]", 'name = "corpus"', 'version = "0.0.0"', 'edition = "2021"', "[dependencies]"]
        lines += [f'{name} = "={version}"' for name, version in CRATES.items()]
        (manifest / "Cargo.toml").write_text("\n".join(lines) + "\n")
        run("cargo", "vendor", "--quiet", "--versioned-dirs", str(vendor), cwd=manifest)


class Paragraphs:
    """Joins paragraphs into a text and leaves out the long ones that some earlier text already had."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def join(self, paragraphs: Iterable[str], longer_than: int = 40) -> str:
        kept = []
        for paragraph in paragraphs:
            digest = hashlib.blake2b(paragraph.encode(), digest_size=12).digest()
            if len(paragraph) > longer_than and digest in self._seen:
                continue
            self._seen.add(digest)
            kept.append(paragraph)
        return "\n\n".join(kept)


HIDDEN = re.compile(r'<span hidden="true" id="(?:MAC|WIN|UNIX)[^"]*"[^>]*>(?:<span[^>]*>[^<]*</span>|[^<])*</span>')
BLOCK = re.compile(r"<(p|h[1-6])\b[^>]*>(.*?)</\1>", re.S)


def help_paragraphs(page: str) -> list[str]:
    """The text of one LibreOffice help page, without navigation and code samples."""
    _, _, body = page.partition('<div id="DisplayArea"')
    body = re.sub(r"<pre\b.*?</pre>|<aside\b.*?</aside>|<footer\b.*", "", body, flags=re.S)
    body = HIDDEN.sub("", body)
    texts = (re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", match.group(2)))).strip() for match in BLOCK.finditer(body))
    return [text for text in texts if text and "noscript" not in text]


def help_pages(root: Path, untranslated: frozenset[str] = frozenset()) -> Iterator[Document]:
    """One document per help page, without repeated paragraphs and without those that stayed in English."""
    seen = Paragraphs()
    for path in sorted(root.rglob("text/**/*.html")):
        paragraphs = help_paragraphs(path.read_text("utf-8", "replace"))
        text = seen.join(p for p in paragraphs if p not in untranslated)
        yield Document(str(path.relative_to(root)).split("text/", 1)[1], text)


def rust_sources(vendor: Path) -> Iterator[Document]:
    for name, version in CRATES.items():
        crate = vendor / f"{name}-{version}"
        licence = tomllib.loads((crate / "Cargo.toml").read_text())["package"].get("license", "")
        if not PERMISSIVE_CRATE.search(licence):
            raise SystemExit(f"{crate.name}: licence {licence!r} is not one this corpus takes")
        for path in sorted((crate / "src").rglob("*.rs")):
            if "unicode_tables" not in path.parts and "gen" not in path.parts:
                yield Document(f"{crate.name}/{path.relative_to(crate)}", path.read_text("utf-8", "replace"))


def python_sources(roots: Iterable[Path]) -> Iterator[Document]:
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "encodings", "locale", "pydoc_data", "ensurepip"}
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if not skipped & set(relative.parts) and 500 < path.stat().st_size < 80_000:
                yield Document(f"{root.name}/{relative}", path.read_text("utf-8", "replace"))


def docstrings(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        if "tests" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, RecursionError):
            continue
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.FunctionDef | ast.ClassDef)]
        texts = [text for node in nodes if (text := ast.get_docstring(node)) and len(text) > 300]
        yield Document(str(path.relative_to(root)), "\n\n".join(texts))


def generated_problems(characters: int, rng: random.Random) -> Iterator[Document]:
    made = 0
    while made < characters:
        text = "\n\n".join(problems.problem(rng) for _ in range(rng.randint(4, 9)))
        made += len(text)
        yield Document(f"problems/{made}", text)


def icd_categories(path: Path) -> Iterator[Document]:
    """ICD-10-CM's tabular list, one document per three-character category."""
    notes = {
        "inclusionTerm": "Also called",
        "includes": "Includes",
        "excludes1": "Excludes",
        "excludes2": "Not included here",
        "codeFirst": "Code first",
        "useAdditionalCode": "Use additional code",
        "codeAlso": "Code also",
        "notes": "Note",
    }

    def lines(diagnosis: ElementTree.Element) -> Iterator[str]:
        yield f"{diagnosis.findtext('name', '')} {diagnosis.findtext('desc', '')}"
        for tag, label in notes.items():
            child = diagnosis.find(tag)
            texts = [note.text for note in child.findall("note") if note.text] if child is not None else []
            if texts:
                yield f"{label}: {'; '.join(texts)}"
        for below in diagnosis.findall("diag"):
            yield from lines(below)

    for section in ElementTree.parse(path).getroot().iter("section"):
        for diagnosis in section.findall("diag"):
            yield Document(diagnosis.findtext("name", ""), "\n".join(lines(diagnosis))[:6000])


def licence_texts(root: Path) -> Iterator[Document]:
    """English texts of licences that may be copied verbatim: open-source and public-domain ones, no commercial or proprietary ones."""
    seen = Paragraphs()
    for path in sorted(root.glob("licenses/*.LICENSE")):
        head, _, text = path.read_text("utf-8", "replace").removeprefix("---\n").partition("\n---\n")
        category = re.search(r"^category: (.+)$", head, re.M)
        language = re.search(r"^language: (.+)$", head, re.M)
        if category is None or category.group(1).strip() not in OPEN_CATEGORIES:
            continue
        if language is not None and language.group(1).strip() != "en":
            continue
        if sum(ord(c) > 127 for c in text) > 0.02 * max(len(text), 1):
            continue
        paragraphs = [re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", text)]
        yield Document(path.name, seen.join(part for part in paragraphs if part))


def share(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2**64


def write(out: Path, workload: str, domain: str, documents: Iterable[Document], rng: random.Random) -> None:
    pool = [Document(d.name, d.text.strip()[:MAX_CHARACTERS]) for d in documents if len(d.text.strip()) >= MIN_CHARACTERS]
    rng.shuffle(pool)
    sides: dict[str, list[Document]] = {"train": [], "heldout": []}
    room = {"train": TRAIN_BYTES, "heldout": HELD_OUT_BYTES}
    for document in pool:
        side = "heldout" if share(document.name) < HELD_OUT_SHARE else "train"
        size = len(document.text.encode())
        if size <= room[side]:
            room[side] -= size
            sides[side].append(document)
    for side, kept in sides.items():
        path = out / side / f"{workload}-{domain}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            for document in kept:
                file.write(json.dumps({"name": document.name, "text": document.text}, ensure_ascii=False) + "\n")
        print(f"{workload:8} {domain:12} {side:8} {len(kept):5} documents, {sum(len(d.text.encode()) for d in kept):8} bytes", flush=True)


def interleave(rng: random.Random, *sources: Iterable[Document]) -> list[Document]:
    documents = [document for source in sources for document in source]
    rng.shuffle(documents)
    return documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for packages and corpus, outside the repository")
    work: Path = parser.parse_args().work.resolve()
    packages, out = work / "packages", work / "corpus"
    fetch(packages)
    rng = random.Random(SEED)
    stdlib = Path(sysconfig.get_path("stdlib"))
    python = python_sources([stdlib, packages / "django-6.1.3/django"])
    code = interleave(rng, rust_sources(packages / "vendor"), python)
    mathematics = interleave(rng, generated_problems(3_500_000, rng), docstrings(packages / "sympy-1.14.0/sympy"))
    tabular = next((packages / "simple-icd-10-cm-1.5.0").rglob("icd10c-tabular-*.xml"))
    write(out, "task", "code", code, rng)
    write(out, "task", "mathematics", mathematics, rng)
    write(out, "task", "medicine", icd_categories(tabular), rng)
    write(out, "task", "law", licence_texts(packages / "licensedcode-data-32.1.0/licensedcode/data"), rng)
    english = packages / "libreoffice-help-en-us"
    in_english = frozenset(p for path in english.rglob("text/**/*.html") for p in help_paragraphs(path.read_text("utf-8", "replace")))
    for language, code_name in LANGUAGES.items():
        untranslated = frozenset() if language == "english" else in_english
        write(out, "language", language, help_pages(packages / f"libreoffice-help-{code_name}", untranslated), rng)


if __name__ == "__main__":
    main()
