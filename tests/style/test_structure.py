"""The limits that keep `router/` readable: unique names, short functions, few parameters, short modules."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROUTER = Path(__file__).parents[2] / "router"
MAX_PARAMETERS = 7
MAX_FUNCTION_LINES = 60
MAX_LINES = 57_727
MAX_MODULE_LINES = 400
SHARED_FILE_NAMES = {"__init__.py", "__main__.py"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROUTER)): ast.parse(path.read_text()) for path in sorted(ROUTER.rglob("*.py"))}


def functions() -> Iterator[tuple[str, Function]]:
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, Function):
                yield f"{path}:{node.lineno} {node.name}", node


def parameter_count(function: Function) -> int:
    """All parameters but `self` and `cls`."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    starred = (arguments.vararg is not None) + (arguments.kwarg is not None)
    return len([one for one in named if one.arg not in {"self", "cls"}]) + starred


def repeated(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: where for name, where in places.items() if len(where) > 1}


def test_no_file_name_occurs_twice() -> None:
    places = defaultdict(list)
    for path in modules():
        if Path(path).name not in SHARED_FILE_NAMES:
            places[Path(path).name].append(path)
    assert not repeated(places)


def test_no_class_name_occurs_twice() -> None:
    places = defaultdict(list)
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    assert not repeated(places)


def aliases(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Names of types that a module assigns: `Name = Other`, `Name: TypeAlias = ...`, `Name = TypeVar("Name")`."""
    for node in module.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", target.id):
                yield target.id, node.lineno


def renamed_imports(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Classes of the router that are imported under another name."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("router."):
            for one in node.names:
                if one.asname not in (None, one.name) and re.match("_?[A-Z][a-z]", one.name):
                    yield f"{one.name} as {one.asname}", node.lineno


def test_no_alias_has_the_name_of_a_class_or_of_an_alias_elsewhere() -> None:
    """A name with an underscore is its module's own, and may have a namesake that is an alias as well."""
    places = defaultdict(list)
    for path, module in modules().items():
        for name, line in aliases(module):
            places[name].append(f"{path}:{line}")
    classes = {
        node.name for module in modules().values() for node in ast.walk(module) if isinstance(node, ast.ClassDef)
    }
    assert not {name: where for name, where in places.items() if name in classes}
    assert not {name: where for name, where in repeated(places).items() if not name.startswith("_")}


def test_no_class_is_imported_under_another_name() -> None:
    found = {path: renamed for path, module in modules().items() if (renamed := list(renamed_imports(module)))}
    assert not found


def test_renamed_classes_and_aliases_are_found() -> None:
    source = "from router.x import Reader as FooReader\nName = Other\nText: TypeAlias = str\nLIMIT = 1"
    module = ast.parse(source)
    assert [name for name, _ in renamed_imports(module)] == ["Reader as FooReader"]
    assert [name for name, _ in aliases(module)] == ["Name", "Text"]


def test_no_function_has_more_than_seven_parameters() -> None:
    assert not [where for where, function in functions() if parameter_count(function) > MAX_PARAMETERS]


def test_no_function_is_longer_than_sixty_lines() -> None:
    too_long = [where for where, node in functions() if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES]
    assert not too_long


def test_no_module_is_longer_than_four_hundred_lines() -> None:
    lengths = {path: (ROUTER / path).read_text().count("\n") for path in modules()}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_MODULE_LINES}


def test_the_house_does_not_grow() -> None:
    """Lines of all modules together. A change that deletes lowers the limit; one that adds finds what to delete."""
    assert sum((ROUTER / path).read_text().count("\n") for path in modules()) <= MAX_LINES


@pytest.mark.parametrize(
    ("source", "count"),
    [("def f(self, a, b): ...", 2), ("def f(a, /, b, *, c): ...", 3), ("def f(*a, **b): ...", 2)],
)
def test_parameters_are_counted(source: str, count: int) -> None:
    [function] = ast.parse(source).body
    assert isinstance(function, Function)
    assert parameter_count(function) == count
