"""Sentences of the README, the changelog and `docs/` are short, and words of this project are explained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.cli import REMOVED
from router.config.mistakes import REMOVED_KEYS

ROOT = Path(__file__).parents[2]
WORDS = ROOT / "docs" / "words.md"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_WORDS = 30
MAX_CHANGELOG_LINES = 120
NOT_PROSE = re.compile(r"^\s*```.*?^\s*```|<!--.*?-->|^    [^ ].*?$", re.DOTALL | re.MULTILINE)
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. |\||#)")
LINK, CODE = re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), re.compile(r"`[^`]*`")
END = re.compile(r"(?<=[.!?:])[\"*)]*\s+")
"""A colon ends a sentence, too: what it introduces is read by itself."""


def sentences(markdown: str) -> Iterator[str]:
    """The sentences of a page, and those of each cell of its tables. Code counts as one word."""
    for paragraph in PARAGRAPH.split(NOT_PROSE.sub("", markdown)):
        for part in paragraph.split("|") if paragraph.lstrip().startswith("|") else [paragraph]:
            yield from END.split(" ".join(CODE.sub("`x`", LINK.sub(r"\1", part)).split()))


def words(sentence: str) -> int:
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_sentence_has_at_most_30_words(page: Path) -> None:
    assert [f"{words(one)} words: {one}" for one in sentences(page.read_text()) if words(one) > MAX_WORDS] == []


def test_long_sentences_are_found_and_commands_are_not() -> None:
    long = "word " * 31
    assert max(map(words, sentences(f"Short. {long}\nand on.\n"))) == 33
    assert max(map(words, sentences(f"Short.\n\n```sh\n{long}\n```\n\n`{long}` is one: {'word ' * 30}."))) == 30


def explained_words() -> list[str]:
    """The words of the glossary, as its first column has them."""
    return re.findall(r"^\| \*\*(.+?)\*\*", WORDS.read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if page != WORDS], ids=lambda page: page.name)
def test_a_word_of_the_house_is_linked_to_its_explanation_where_it_first_occurs(page: Path) -> None:
    """In or before the paragraph with its first occurrence; the glossary explains all of them."""
    link, unexplained = f"({'docs/' if page.parent == ROOT else ''}{WORDS.name}", ""
    for paragraph in PARAGRAPH.split(NOT_PROSE.sub("", page.read_text())):
        if link in paragraph:
            break
        prose = CODE.sub("", paragraph)
        found = [word for word in explained_words() if re.search(rf"\b{word}(s|d)?\b", prose, re.IGNORECASE)]
        unexplained = unexplained or (f"{found}: {' '.join(paragraph.split())[:120]}" if found else "")
    assert not unexplained, f"link the first one to {link}): {unexplained}"


def test_the_changelog_is_one_page_that_names_every_removed_key_and_command() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text.splitlines()) <= MAX_CHANGELOG_LINES
    assert [name for name in REMOVED_KEYS if f"{name.split('.')[-1]}`" not in text] == []
    assert [name for name in REMOVED if f"{name}`" not in text] == []
