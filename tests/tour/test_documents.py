"""The commands and configurations of the READMEs are ones that exist; `make tour` runs them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from loadtest.fleets.scenario import load_scenario
from router.cli import _app
from router.config.load import load, read_document
from router.config.names_file import read_names
from router.config.policy_files import PolicyLibrary, check
from router.config.schema import RouterConfig
from router.config.tenant_file import TenantFile
from tests.tour.__main__ import DOCUMENTS, ROOT
from tests.tour.markdown import OUTPUT, SHELL, Block, blocks_of, differences, mistakes

BLOCKS = [block for name in DOCUMENTS for block in blocks_of(ROOT / name, name)]
HERE_DOCUMENT = re.compile(r"<<'EOF'\n.*?\nEOF$", re.DOTALL | re.MULTILINE)
CLASSES = frozenset({"chat", "rag", "agent", "long_context", "one_off", "batch"})


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a block."""
    text = HERE_DOCUMENT.sub("", block.text).replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        for part in "\0".join(words).replace("\0&&\0", "\n").splitlines():
            yield part.split("\0")


def ids(value: object) -> str:
    return value.place if isinstance(value, Block) else ""


SHELL_BLOCKS = [block for block in BLOCKS if block.language == SHELL]
WORDS = [(block, words) for block in SHELL_BLOCKS for words in commands(block) if words != [""]]


@pytest.mark.parametrize(("block", "words"), [each for each in WORDS if each[1][0] == "warmroute"], ids=ids)
def test_a_command_exists_with_these_options(block: Block, words: list[str]) -> None:
    found: Any = typer.main.get_command(_app(words[1]))
    arguments = words[1:]
    while getattr(found, "commands", None) and arguments[0] != "--version":
        name = arguments.pop(0)
        assert name in found.commands, f"no such command: {name}"
        found = found.commands[name]
    known = {option for parameter in found.params for option in parameter.opts} | {"--help"}
    assert {word.partition("=")[0] for word in arguments if word.startswith("-")} <= known


@pytest.mark.parametrize(("block", "words"), [each for each in WORDS if "python" in each[1][0]], ids=ids)
def test_a_script_exists_with_these_options(block: Block, words: list[str]) -> None:
    script = next((word for word in words if word.endswith(".py")), None)
    if script is None:
        assert words[1] in ("-m", "-c")
        return
    source = (ROOT / script).read_text()
    for option in [word for word in words if word.startswith("--")]:
        assert option in source or re.search(rf"\b{option.removeprefix('--').replace('-', '_')}\b", source), option


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml" and not block.skip], ids=ids)
def test_a_configuration_is_valid(block: Block, tmp_path: Path) -> None:
    """A part of router.yaml, tenants, names, a policy or a scenario."""
    keys = re.findall(r"^(\w+):", block.text, re.MULTILINE)
    name = re.search(r"^name: (\w+)", block.text, re.MULTILINE)
    path = tmp_path / f"{name[1] if name else 'router'}.yaml"
    path.write_text(block.text)
    if "sessions" in keys:
        load_scenario(str(path))
    elif "about" in keys:
        check(PolicyLibrary(tmp_path), path.stem, CLASSES)
    elif block.text.startswith("tenants:\n"):
        assert TenantFile(path).read().by_name
    elif "\nnames:\n" in f"\n{block.text}":
        assert read_names(path).exact
    else:
        load(path, RouterConfig)
        assert read_document(path).data


def test_makefile_targets_exist() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {words[1] for _, words in WORDS if words[0] == "make"} <= set(targets)


def test_only_blocks_that_need_what_is_not_here_are_skipped() -> None:
    """A cluster, Docker, other routers, hours."""
    assert {block.skip.split()[0] for block in SHELL_BLOCKS if block.skip} <= {"needs"}
    assert len([block for block in SHELL_BLOCKS if block.skip]) <= 16


@pytest.mark.parametrize(
    ("quoted", "printed", "missing"),
    [
        ("pods 2  12.5 ms", "pods 4 7 ms\n", []),
        ("a: ...", "a: anything\n", []),
        ("a\n...\nb", "a\nx\ny\nb\n", []),
        ("a\nb", "a\nx\nb\n", ["b"]),
        ("b", "a\n", ["b"]),
    ],
)
def test_output_is_compared_except_for_figures(quoted: str, printed: str, missing: list[str]) -> None:
    """And for what `...` stands for."""
    assert differences(quoted, printed) == missing


def test_a_replacement_must_be_in_its_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- tour: replace gone by there -->\n```sh\ntrue\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:2: 'gone' is not in the block"):
        blocks_of(page, "page.md")


ENGINE_FLAGS = {
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--kv-events-config",
}
ENGINE = re.compile(r"(?:^|[ `])(?:vllm serve|vLLM  +--)(?:[^\n]*\\\n)*[^\n]*(?:\n +--[^\n]*)*", re.MULTILINE)
ENGINE_PAGES = (*DOCUMENTS, "helm/templates/NOTES.txt")


def engine_lines(page: str) -> list[str]:
    """The command lines of vLLM in a page, with those that continue them."""
    return ENGINE.findall((ROOT / page).read_text())


@pytest.mark.parametrize("page", [page for page in ENGINE_PAGES if engine_lines(page)])
def test_every_command_line_of_vllm_has_the_flags_that_matching_and_bills_need(page: str) -> None:
    assert [line for line in engine_lines(page) if not all(flag in line for flag in ENGINE_FLAGS)] == []


def test_the_command_lines_of_vllm_are_found() -> None:
    assert {page for page in ENGINE_PAGES if engine_lines(page)} >= {"README.md", "helm/README.md", *ENGINE_PAGES[-1:]}


def test_every_block_names_its_language() -> None:
    """So that no command is left out."""
    assert [block.place for block in BLOCKS if not block.language] == []


def test_quoted_output_follows_its_command() -> None:
    languages = [block.language for block in BLOCKS]
    assert OUTPUT in languages
    assert all(before == SHELL for before, after in pairwise(languages) if after == OUTPUT)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("until curl localhost:8080/readyz; do sleep 1; done", "may never end"),
        ("true && while true; do sleep 1; done", "may never end"),
        ("for _ in $(seq 60); do curl localhost/readyz && break; sleep 1; done", ""),
        ("warmroute pods | while read -r pod rest; do echo $pod; done", ""),
        ("pip install '.[demo]'", "untested versions"),
        (".venv/bin/pip install -q .", "untested versions"),
        ("pip install -c constraints.txt '.[demo]'", ""),
        ("pip install ./dist/warmroute.whl", ""),
        ("for x in 1 2; do", "syntax error"),
    ],
)
def test_what_would_stop_a_reader_is_found_without_running_it(text: str, mistake: str) -> None:
    """A loop without an end, versions that nobody tested, broken shell."""
    found = mistakes(Block("page.md", 1, SHELL, text))
    assert len(found) == bool(mistake) and all(mistake in one for one in found)
