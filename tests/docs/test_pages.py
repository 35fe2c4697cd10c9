"""The pages of `docs/` are short, complete and current."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from docs.reference_pages import pages
from loadtest.commands.mock_engine_command import mock_tokenizer
from router.config.schema import RouterConfig
from router.prompt.template import ChatTemplate

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITTEN = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_reference_page_is_current(page: Path) -> None:
    """Renewed by `python -m docs.reference_pages`."""
    assert page.read_text() == pages()[page]


def test_every_section_of_the_configuration_has_its_own_heading() -> None:
    text = (DOCS / "reference" / "configuration.md").read_text()
    assert set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == set(RouterConfig.model_fields)


def test_the_readme_has_at_most_200_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_a_page_has_at_most_250_lines(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 250


def test_every_page_is_on_the_start_page_and_in_the_navigation() -> None:
    start, navigation = (DOCS / "README.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    names = {str(page.relative_to(DOCS)) for page in [*WRITTEN, *pages()]} - {"README.md"}
    assert {name for name in names if f"({name})" not in start} == set()
    assert {name for name in names if f": {name}\n" not in navigation} == set()


def test_the_site_asks_no_other_host() -> None:
    """Fonts are those of the reader's system."""
    text = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in text
    assert not re.findall(r"https?://", text)


def test_a_warning_fails_the_build_of_the_site() -> None:
    """A quiet build counts no warnings, not even a strict one."""
    assert "strict: true" in (ROOT / "mkdocs.yml").read_text()
    assert "mkdocs build\n" in (ROOT / "Makefile").read_text()


def test_the_site_is_no_dependency_of_the_product() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    assert not [line for line in [*project["dependencies"], *extras] if "mkdocs" in line]


def test_the_request_that_is_followed_is_the_second_one_of_the_readme() -> None:
    """So that what a reader sees in "Try it" is what the picture and `docs/how-it-decides.md` explain."""
    readme = (ROOT / "README.md").read_text()
    question = re.search(r'^ask second "(.+)"$', readme, re.MULTILINE)
    assert question is not None
    document = (ROOT / "LICENSE").read_text()[:8000]
    tokenizer = mock_tokenizer()
    chat = {"messages": [{"role": "system", "content": document}, {"role": "user", "content": question[1]}]}
    prompt = f"{len(tokenizer.encode(ChatTemplate(tokenizer).render(chat))):,} "
    for name in ("README.md", "docs/how-it-decides.md", "docs/one-request.svg"):
        assert f"A prompt of {prompt}tokens" in (ROOT / name).read_text(), name
