"""Texts that people read use the field's terms: `docs/glossary.md` lists them.

The first edition had words of its own for common notions. Each stands here beside the term to use,
and occurs in no tracked text: documents, cards, page texts, results, help, errors and comments.
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {
    ".css",
    ".html",
    ".jinja",
    ".js",
    ".json",
    ".jsonl",
    ".md",
    ".py",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
    "",
}
DATA = ("assets/checkpoints/", "assets/tour/", "tests/core/risk_messages.jsonl")
"""Tokenizers and what models and seekers write: not our prose, except for the cards."""

PRIVATE_TERMS = {
    r"\bcommonest\b": "majority class, most frequent",
    r"\b(?:outside|inside) the intervals?\b": "the 95 % CI excludes (includes) 0",
    r"[\w)`'] less (?:sft|ur|urp|por|prm|orm|pure|unifireward|compeer|one|two|other)[\w-]*\b": (
        "difference (A - B)"
    ),
    r"\bsurprise of\b": "NLL under ...",
    r"\bnats a token\b": "nats/token",
    r"\bloops \(a 4-gram": "repetition rate (4-gram >= 3x)",
    r"\bsampled, not chosen\b": "uncurated sample",
    r"\bthe form is right\b": "valid format",
    r"\bquotation made up\b": "hallucinated quote",
    r"\bprocessor is enough\b": "runs on CPU",
    r"\bputs right above wrong\b": "higher AUROC",
    r"\bAgain: `": "Reproduce: `command`",
    r"\bis told so\b": "is reported",
    r"\b(?:goes|gone|going) on with\b": "is resumed, continues",
    r"\bwhoever asks\b": "the caller, the client",
    r"\bwhat came of\b": "the result",
    r"\bno folder and no name\b": "neither a path nor a Hub ID",
}


def is_prose(path: str) -> bool:
    """Whether people read a tracked file."""
    if path in {"tests/test_language.py", "requirements.lock", "LICENSE"}:
        return False
    is_data = path.startswith(DATA) and not path.endswith(
        ("README.md", "figures.toml", "notes.toml")
    )
    return not is_data and Path(path).suffix in SUFFIXES


def tracked() -> list[str]:
    """The files of the repository; without git, those below its folders."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def private_terms(text: str) -> list[str]:
    """The first edition's words in a text, each with the term to use."""
    # sentences run over lines, in comments with a mark between
    flat = re.sub(r"\s+(?:(?:#|//|\*|>)\s+)?", " ", text)
    return [
        f"{match[0]!r} (use: {term})"
        for pattern, term in PRIVATE_TERMS.items()
        for match in re.finditer(pattern, flat, re.IGNORECASE)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "always the commonest",
        "a difference outside\n    # the interval",
        '"of": "urp less sft"',
        "unifireward less prm-orm",
        "Again: `python`",
    ],
)
def test_a_private_term_is_found_even_across_lines(text):
    assert private_terms(text)


@pytest.mark.parametrize(
    "text", ["one is less than two", "less memory", "careless users", "is told"]
)
def test_ordinary_english_passes(text):
    assert private_terms(text) == []


def test_no_text_of_the_repository_uses_a_private_term():
    used = {
        path: terms
        for path in tracked()
        if is_prose(path) and (terms := private_terms((ROOT / path).read_text(encoding="utf-8")))
    }

    assert used == {}
