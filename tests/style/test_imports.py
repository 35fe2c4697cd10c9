"""How much of the router a module makes its importer load."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = "import sys, {module}; print(sum(name.startswith('router.') for name in sys.modules))"
MAX_IMPORTED = {"router.frontends.http.protocol": 93, "router.wiring.router": 236}
"""The parser of requests knows what it needs to admit them, and not how they are served. The whole router, without
extras, has no modules that only one other module imports: fold them into it."""


@pytest.mark.parametrize("module", MAX_IMPORTED)
def test_a_module_imports_only_what_it_needs(module: str) -> None:
    counted = subprocess.run([sys.executable, "-c", COUNT.format(module=module)], capture_output=True, check=True)
    assert int(counted.stdout) <= MAX_IMPORTED[module]
