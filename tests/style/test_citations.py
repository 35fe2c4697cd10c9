"""Every page that a source file, a configuration or another page cites exists, and so does the section that it names.

A citation is a path ending in `.md`, in a docstring, comment, value or link, with or without `#section`: relative to
the repository, to `router/`, or to a folder of the file that cites it. A section may also be named in words:
`CONTRIBUTING.md, "How to write here"`. A file name that is a whole string, such as `"REFERENCE.md"`, cites nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.style.test_plain_english import ROOT, written_files

OTHER_SUFFIXES = {".json", ".lua", ".html", ".c", ".conf"}
PATH = r"(?:\.{0,2}/)?[\w.-]+(?:/[\w.-]+)*\.md"
IN_WORDS = r"`?(?:\]\([^)]*\))?, \"([^\"\n]+)\""
CITATION = re.compile(rf"(?<![\w./:\"'-])({PATH})(?:#([\w-]+)|{IN_WORDS})?")
OWN_SECTION = re.compile(r"\]\(#([\w-]+)\)")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([\w-]+))?\)")
CODE = re.compile(r"^([ \t]*)```[^\n]*\n.*?^\1```[ \t]*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
MADE_BY_RUNS = {"page.md", "gameday.md", "peers-2026-11-21.md"}
"""Results, and files of tests, that are not kept."""


@cache
def sections(page: Path) -> frozenset[str]:
    """The anchors of the headings of a page, as GitHub makes them; those of code blocks do no harm."""
    headings = re.findall(r"^#+ +(.+?)\s*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(anchor(heading) for heading in headings)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def cited_pages(file: Path, path: str) -> list[Path]:
    folders = (ROOT, ROOT / "router", *(folder for folder in file.parents if folder.is_relative_to(ROOT)))
    return [page for folder in folders if (page := (folder / path).resolve()).is_file()]


def dead_citations(file: Path, text: str) -> Iterator[str]:
    for path, named, quoted in CITATION.findall(text.replace("\\n", "\n")):
        pages, section = cited_pages(file, path), named or anchor(quoted)
        if path not in MADE_BY_RUNS and not any(not section or section in sections(page) for page in pages):
            yield f"{path}#{section}" if pages else path
    if file.suffix == ".md":
        yield from (f"#{section}" for section in OWN_SECTION.findall(text) if section not in sections(file))


def dead_links(page: Path, text: str) -> Iterator[str]:
    """Links of a page that lead to no file, or to no section of it. A link is relative to the page alone."""
    for path, section in LINK.findall(CODE.sub("", text)):
        target = page.parent / path
        if "://" not in path and not (target.exists() and (not section or section in sections(target))):
            yield f"{path}#{section}" if section else path


def citing_files() -> Iterator[Path]:
    yield from written_files()
    yield from sorted((ROOT / "loadtest" / "results").glob("*.md"))
    for folder in ("router", "helm", "policies", "config", "loadtest"):
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in OTHER_SUFFIXES)
    yield from (ROOT / name for name in ("Makefile", "Dockerfile", "pyproject.toml"))


def test_no_citation_is_dead() -> None:
    found = {
        str(file.relative_to(ROOT)): dead
        for file in citing_files()
        if (dead := list(dead_citations(file, file.read_text(encoding="utf-8"))))
    }
    assert not found


def test_no_link_is_dead() -> None:
    pages = [path for path in citing_files() if path.suffix == ".md"]
    assert {page: dead for page in pages if (dead := list(dead_links(page, page.read_text())))} == {}


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("[a](security.md#redis) [b](../config/router.yaml) [c](reference) [d](https://example.org/a)", []),
        ("[a](docs/security.md)", ["docs/security.md"]),  # exists, but not from here
        ("[a](security.md#no-such-section)", ["security.md#no-such-section"]),
        ("![a](no-picture.svg)", ["no-picture.svg"]),
        ("`[a](no.md)`\n```\n[b](no.md)\n```\n", []),
    ],
)
def test_dead_links_are_found(text: str, dead: list[str]) -> None:
    assert list(dead_links(ROOT / "docs" / "operate.md", text)) == dead


@pytest.mark.parametrize(
    "text",
    [
        "Source: reference/cost-model.md 4.1.",
        "docs/cost-model.md#no-such-section",
        '`CONTRIBUTING.md`, "Anything"',
        "(docs/nothing.md)",
    ],
)
def test_dead_citations_are_found(text: str) -> None:
    assert list(dead_citations(ROOT / "router" / "cost_model.py", text))


@pytest.mark.parametrize(
    "text",
    [
        "Source: docs/cost-model.md#prefill.",
        '(CONTRIBUTING.md, "How to write here")',
        "[policy](policy/README.md)",
        "https://example.org/a/page.md",
    ],
)
def test_citations_of_what_exists_are_not(text: str) -> None:
    assert not list(dead_citations(ROOT / "router" / "cost_model.py", text))
