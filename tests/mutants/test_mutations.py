"""Mutants are valid files that differ in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.mutations import mutants_of

PATH = Path("router/policy/x.py")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a < b", "(a <= b)"),
        ("a in b", "(a not in b)"),
        ("a + b", "(a - b)"),
        ("a and b", "(a or b)"),
        ("a if b else c", "(a if not b else c)"),
        ("not a", "(a)"),
        ("True", "False"),
        ("3", "4"),
        ("f(a)", "pass"),
    ],
)
def test_each_kind_of_change(before: str, after: str) -> None:
    assert after in [mutant.source for mutant in mutants_of(PATH, before)]


UNCHANGED = [
    '"""Text."""',
    'x = "a" + b',
    "x: Literal[3]",
    "def f(a: int) -> str: ...",
    "@dataclass(frozen=True)\nclass A(Struct, gc=False): ...",
    "x = zip(a, strict=True)",
]


@pytest.mark.parametrize("source", UNCHANGED)
def test_guards_texts_and_annotations_do_not_change(source: str) -> None:
    assert not list(mutants_of(PATH, source))


def test_all_mutants_of_a_file_parse_and_differ() -> None:
    source = Path(__file__).with_name("mutations.py").read_text()
    found = list(mutants_of(PATH, source))
    assert len(found) > 20
    for mutant in found:
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(source))
