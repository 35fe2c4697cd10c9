"""The limits that keep `router/` readable: names that are unique in their package, short functions, bounded modules."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROUTER = Path(__file__).parents[2] / "router"
MAX_FUNCTION_LINES = 60
MAX_LINES = 53_538
MAX_MODULE_LINES = 700
MAX_WIRING_LINES = 1_260

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROUTER)): ast.parse(path.read_text()) for path in sorted(ROUTER.rglob("*.py"))}


def functions() -> Iterator[tuple[str, Function]]:
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, Function):
                yield f"{path}:{node.lineno} {node.name}", node


def package(path: str) -> str:
    """The package of a module: its first folder; empty for a module of `router/` itself."""
    return path.rpartition("/")[0].split("/")[0]


def name_places(named: Iterator[tuple[str, str, int]]) -> dict[str, list[str]]:
    """For each package and name, where it is defined. `named`: path, name, line."""
    places = defaultdict(list)
    for path, name, line in named:
        places[f"{package(path)}: {name}"].append(f"{path}:{line}")
    return places


def repeated(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: where for name, where in places.items() if len(where) > 1}


def classes() -> Iterator[tuple[str, str, int]]:
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                yield path, node.name, node.lineno


def test_no_class_name_occurs_twice_in_a_package() -> None:
    assert not repeated(name_places(classes()))


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


def test_no_alias_has_the_name_of_a_class_or_of_an_alias_of_its_package() -> None:
    """A name with an underscore is its module's own, and may have a namesake that is an alias as well."""
    aliased = name_places((path, name, line) for path, module in modules().items() for name, line in aliases(module))
    assert not aliased.keys() & name_places(classes()).keys()
    assert not {name: where for name, where in repeated(aliased).items() if ": _" not in name}


def test_no_class_is_imported_under_another_name() -> None:
    found = {path: renamed for path, module in modules().items() if (renamed := list(renamed_imports(module)))}
    assert not found


def test_renamed_classes_and_aliases_are_found() -> None:
    source = "from router.x import Reader as FooReader\nName = Other\nText: TypeAlias = str\nLIMIT = 1"
    module = ast.parse(source)
    assert [name for name, _ in renamed_imports(module)] == ["Reader as FooReader"]
    assert [name for name, _ in aliases(module)] == ["Name", "Text"]


def test_no_function_is_longer_than_sixty_lines() -> None:
    too_long = [where for where, node in functions() if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES]
    assert not too_long


def test_no_module_is_longer_than_seven_hundred_lines() -> None:
    lengths = {path: (ROUTER / path).read_text().count("\n") for path in modules()}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_MODULE_LINES}


def test_the_house_does_not_grow() -> None:
    """Lines of all modules together. Each issue moves the limit by its budget, down or up."""
    lines = sum((ROUTER / path).read_text().count("\n") for path in modules())
    assert lines <= MAX_LINES, f"router/ has {lines:,} lines: take some away, or raise MAX_LINES here and say for what"


def test_wiring_stays_small() -> None:
    """It builds values and hands them on; what decides or waits belongs to the package that it is about."""
    lines = sum(len(path.read_text().splitlines()) for path in (ROUTER / "wiring").glob("*.py"))
    assert lines <= MAX_WIRING_LINES


def test_the_package_of_a_module_is_its_first_folder() -> None:
    assert [package(path) for path in ("errors.py", "policy/term.py", "policy/costs/effects.py")] == [
        "",
        "policy",
        "policy",
    ]
