"""How much of the router a module makes its importer load."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNT = "import sys, {module}; print(sum(name.startswith('router.') for name in sys.modules))"
MAX_IMPORTED = {"router.frontends.http.protocol": 93, "router.wiring.router": 255}
"""The parser of requests knows what it needs to admit them, and not how they are served. The whole router, without
extras, has no modules that only one other module imports: fold them into it."""


@pytest.mark.parametrize("module", MAX_IMPORTED)
def test_a_module_imports_only_what_it_needs(module: str) -> None:
    counted = subprocess.run([sys.executable, "-c", COUNT.format(module=module)], capture_output=True, check=True)
    assert int(counted.stdout) <= MAX_IMPORTED[module]


@pytest.mark.parametrize("file", ["Dockerfile", "Makefile", ".ci/run", "pyproject.toml"])
def test_a_module_that_the_build_names_exists(file: str) -> None:
    named = re.findall(r"\b((?:router|loadtest)(?:\.(?!yaml)[a-z_]+)+)\b", (ROOT / file).read_text())
    assert [module for module in named if not find_spec(module)] == []
