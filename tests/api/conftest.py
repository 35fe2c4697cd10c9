"""Which event loop the tests of this folder run on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.virtual_time import VirtualTimeLoop


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """In virtual time where a test is marked so."""
    return "asyncio", {"loop_factory": VirtualTimeLoop} if request.node.get_closest_marker("virtual") else {}
