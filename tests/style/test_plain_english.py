"""Words of the old dialect stay out of names, docstrings, comments, messages and documentation.

The project is written in plain technical English (CONTRIBUTING.md, "How to write here"). This test lists the words and
names that used to make it hard to read. A match names the file, the line and what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".jinja"}
FOLDERS = ("router", "docs", "tests", "loadtest", "config", "policies", "helm", ".ci", ".github")
EXCLUDED = (Path("tests/style"), Path("loadtest/results"))
"""This test has to name the words; recorded results are left as they were recorded."""

WORDS = {
    r'"""of .*': "a docstring with a subject or a verb",
    r"(un)?told": "notified, published, given",
    r"tells?": "reports, returns, publishes",
    r"hears?|hearing|heard": "receives",
    r"heeds?": "follows",
    r"whoever|whomever": "a noun: the client, the pod, the caller",
    r"whatever": "a noun, or `any`",
    r"beside": "concurrent, alongside, next to, in addition to",
    r"so many": "a number, or `this many`",
    r"the moment that": "when",
    r"(for )?nothing but": "only",
    r"that is none|is no longer any|what is no": "say it without the inversion",
    r"goes by": "uses",
    r"spares?": "skips, avoids",
    r"promises": "guarantees",
    r"forgives": "resets",
    r"looks? after": "supervises",
    r"stands? (there|behind|for itself)": "is, follows",
    r"again, it changes nothing": "idempotent",
}
NAMES = {
    "Story": "RequestContext",
    "Legs": "UpstreamSender",
    "Patience": "ClientDeadlines or Backoff",
    "Beside": "WorkerSync or ConcurrentDecode",
    "Appointment": "Timer",
    "_Hearing": "InboundLink",
    "_Speaking": "OutboundLink",
    "GoingOn": "IncrementalPrompt",
    "Marked": "PendingPrompt",
    "ContentMatters": "ContentDependent",
    "everybodys": "global_prefix_blocks",
    "spare_the_old": "tune_gc",
    "search_by_the_clock": "gc_loop",
    "mind_cancellation": "raise_if_cancelled",
    "obstacle": "unusable_reason",
    "blame": "record_failure",
    "silent_ttl_s": "no_events_ttl_s",
    "gather_ms": "flush_interval_ms",
}
_PATTERNS = [
    (re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.IGNORECASE), better) for pattern, better in WORDS.items()
] + [(re.compile(rf"(?<![A-Za-z]){name}(?![a-z])"), better) for name, better in NAMES.items()]
_ANY = re.compile("|".join([*WORDS, *NAMES]), re.IGNORECASE)
"""Finds every line that a pattern can match, and is much faster than all of them."""


def written_files() -> Iterator[Path]:
    """Every file that people wrote for people."""
    yield from (path for path in ROOT.glob("*.md"))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            inside = path.relative_to(ROOT)
            hidden = any(part.startswith(".") for part in inside.parts[1:])
            if path.suffix in SUFFIXES and not hidden and not any(inside.is_relative_to(out) for out in EXCLUDED):
                yield path


def current(path: Path) -> str:
    """The text, without what the changelog's table says to replace: keys of earlier versions."""
    text = path.read_text()
    return re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE) if path.name == "CHANGELOG.md" else text


def dialect(text: str) -> list[str]:
    """The lines of `text` that contain a word or name of the dialect, with what to write instead."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not _ANY.search(line):
            continue
        for pattern, better in _PATTERNS:
            if match := pattern.search(line):
                found.append(f"{number}: `{match[0]}` -> {better}: {line.strip()[:100]}")
    return found


@pytest.mark.parametrize(
    "line",
    [
        "Whoever comes is told.",
        "class Story:",
        "def spare_the_old()",
        "hears of it",
        "runs beside it",
        "self.blame(pod)",
        '"""Of a tenant."""',
    ],
)
def test_words_of_the_dialect_are_found(line: str) -> None:
    assert dialect(line)


@pytest.mark.parametrize("line", ["history", "a storyline", "untolerable", "# besides that", "record_failure(pod)"])
def test_plain_words_are_not(line: str) -> None:
    assert not dialect(line)


def test_the_tree_is_written_in_plain_english() -> None:
    found = {str(path.relative_to(ROOT)): lines for path in written_files() if (lines := dialect(current(path)))}
    report = "\n".join(f"{path}:{line}" for path, lines in found.items() for line in lines)
    assert not found, f"{sum(map(len, found.values()))} lines use the old dialect:\n{report}"
