"""Mutants are valid files that differ in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, folders_of, packages, sample, survivors
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
        ("f(3)", "f(4)"),
        ("A = True", "A = False"),
        ("f(a)", "pass"),
    ],
)
def test_each_kind_of_change(before: str, after: str) -> None:
    assert after in [mutant.applied(before) for mutant in mutants_of(PATH, before)]


UNCHANGED = [
    '"""Text."""',
    'x = "a" + b',
    "x: Literal[3]",
    "def f(a: int) -> str: ...",
    "@dataclass(frozen=True)\nclass A(Struct, gc=False): ...",
    "x = zip(a, strict=True)",
    "MAX_BYTES, MAX_TOKENS = 16 * 1024, 1 << 31",
    "class A(Struct):\n    bytes: int = 3",
]


@pytest.mark.parametrize("source", UNCHANGED)
def test_guards_texts_annotations_and_named_numbers_do_not_change(source: str) -> None:
    assert not list(mutants_of(PATH, source))


def test_all_mutants_of_a_file_parse_and_differ() -> None:
    source = Path(__file__).with_name("mutations.py").read_text()
    found = list(mutants_of(PATH, source))
    assert len(found) > 20
    for mutant in found:
        assert ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source))


def test_survivors_are_found_again_in_an_output() -> None:
    first, *others = sample(["policy"], 3, seed=1)
    left = [f"SURVIVED {one}" for one in ("router/gone.py:1: 1  ->  2", *others)]
    assert {*survivors("\n".join([f"killed   {first}", *left, f"  {first}"]))} == {*others}


def test_every_package_has_tests_that_answer_for_it() -> None:
    folders = [folder for name in packages(ROOT / "router") for folder in folders_of(Path("router", name, "x.py"))]
    assert folders and all((ROOT / folder).is_dir() for folder in folders)
    assert folders_of(Path("router/frontends/extproc/answers.py")) == ["tests/extproc"]


def test_two_commits_are_judged_by_the_same_mutants(tmp_path: Path) -> None:
    now, before = tmp_path / "now" / "router", tmp_path / "before" / "router"
    for router, text in ((now, "a < b\nnew + 1\nc < d\na < b\n"), (before, "c < d\na < b\nold - 1\na < b\n")):
        (router / "x").mkdir(parents=True)
        (router / "x" / "y.py").write_text(text)
    drawn = [str(mutant).split(": ")[1] for mutant in sample(["x"], 9, 1, now, before)]
    assert drawn == [str(mutant).split(": ")[1] for mutant in sample(["x"], 9, 1, before, now)]
    assert sorted(drawn) == ["1  ->  2", "a < b  ->  (a <= b)", "a < b  ->  (a <= b)", "c < d  ->  (c <= d)"]
