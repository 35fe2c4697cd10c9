"""Which event loop the tests of this folder run on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.step_loop import StepLoop


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """In virtual time with connections in memory where a test is marked so and needs no socket."""
    marked = {mark.name for mark in request.node.iter_markers()}
    return "asyncio", {"loop_factory": StepLoop} if "virtual" in marked and "net" not in marked else {}
