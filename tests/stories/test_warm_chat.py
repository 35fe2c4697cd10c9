"""How many rooms does a warm chat pass, and in how many shapes?

One chat whose prompt is cached is traced, from the client's bytes to the last sink. What runs meanwhile (feeds, the
mock engine) does not count. `pytest -s` prints its way.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from inspect import isclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import router
from tests.stories.conftest import Deploy

pytestmark = [pytest.mark.net, pytest.mark.anyio]

ROUTER = str(Path(router.__file__).parent) + "/"
ASIDE = (f"{ROUTER}feeds/", f"{ROUTER}observe/loop_lag.py", str(Path(ROUTER).parent / "loadtest") + "/")
CHAT = [{"role": "user", "content": " ".join(f"tides {number}" for number in range(300))}]
MAX_MODULES, MAX_CLASSES, MAX_CALLS = 84, 41, 470
"""To be lowered with each step of unifying."""


@dataclass(eq=False)
class Way:
    """Calls of the router's functions, and the lines that they ran."""

    calls: Counter[CodeType] = field(default_factory=Counter)
    lines: dict[CodeType, set[int]] = field(default_factory=dict)
    names: dict[CodeType, dict[str, Any]] = field(default_factory=dict)
    """The globals of each function."""

    def enter(self, frame: FrameType, _event: str, _value: object) -> Any:
        """Trace function for `sys.settrace`."""
        code = frame.f_code
        if not code.co_filename.startswith(ROUTER) or _is_aside(frame):
            return None
        self.calls[code] += not code.co_name.startswith("<")
        self.names[code] = frame.f_globals
        return self._within

    def _within(self, frame: FrameType, event: str, _value: object) -> Any:
        if event == "line":
            self.lines.setdefault(frame.f_code, set()).add(frame.f_lineno)
        return self._within

    def modules(self) -> list[str]:
        return list(dict.fromkeys(code.co_filename.removeprefix(ROUTER) for code in self.calls))

    def classes(self) -> set[str]:
        """The router's classes that the lines make."""
        made = set[str]()
        for code, lines in self.lines.items():
            names = self.names[code]
            for line in lines:
                called = [names.get(name) for name in _called(code.co_filename).get(line, ())]
                made |= {one.__name__ for one in called if isclass(one) and one.__module__.startswith("router.")}
        return made

    def __str__(self) -> str:
        calls = Counter[str]()
        for code, count in self.calls.items():
            calls[code.co_filename.removeprefix(ROUTER)] += count
        rows = [f"{calls[module]:5} calls in {module}" for module in self.modules()]
        total = f"{sum(calls.values())} calls, {len(rows)} modules, {len(self.classes())} classes"
        return "\n".join([*rows, total, ", ".join(sorted(self.classes()))])


def _is_aside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(ASIDE):
            return True
        frame = frame.f_back
    return False


@cache
def _called(path: str) -> dict[int, list[str]]:
    """By line, the names that a module's code calls there."""
    found: dict[int, list[str]] = {}
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.setdefault(node.lineno, []).append(node.func.id)
    return found


async def test_a_warm_chat_passes_few_modules_in_few_shapes(deploy: Deploy) -> None:
    """The least of several, because an event of an engine or a rare duty may come between."""
    async with deploy(pods=2) as deployment:
        ways = []
        for _ in range(8):
            await deployment.apply_events()
            way = Way()
            sys.settrace(way.enter)
            try:
                answer = await deployment.chat(CHAT)
            finally:
                sys.settrace(None)
            assert answer.status_code == 200
            ways.append(way)
    least = min(ways, key=lambda way: way.calls.total())
    sys.stdout.write(f"\n{least}\n")
    assert len(least.modules()) <= MAX_MODULES, str(least)
    assert len(least.classes()) <= MAX_CLASSES, str(least)
    assert least.calls.total() <= MAX_CALLS, str(least)
