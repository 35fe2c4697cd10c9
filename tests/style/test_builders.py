"""Tests get their pods, scenes and requests from the builders in `tests/kit/scenes.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
BUILDERS = TESTS / "kit/scenes.py"
BUILT = {"Pod", "Scene", "InferenceRequest"}


def built(source: str) -> Iterator[int]:
    """Lines that construct a pod, scene or request of the router, under any name."""
    nodes = list(ast.walk(ast.parse(source)))
    imports = (node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("router."))
    names = {one.asname or one.name for node in imports for one in node.names if one.name in BUILT}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node.lineno


def test_pods_scenes_and_requests_are_constructed_by_the_builders_alone() -> None:
    named = re.compile(rf"import[^#]*\b({'|'.join(BUILT)})\b")
    sources = {path: path.read_text() for path in TESTS.rglob("*.py") if path != BUILDERS}
    candidates = {path: text for path, text in sources.items() if named.search(text)}
    assert not [f"{path}:{line}" for path, text in candidates.items() for line in built(text)]


def test_constructions_are_found() -> None:
    source = "from router.types import Pod as P, Scene\ndef pod():\n    return P()\nScene()\nOther()\nPod()"
    assert sorted(built(source)) == [3, 4]
    assert list(built(BUILDERS.read_text()))
