"""Admin calls are this machine's alone."""

from __future__ import annotations

import pytest
from fastapi import Request
from starlette.exceptions import HTTPException

from router.api.admin import only_local


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_this_machine_may_call(host: str) -> None:
    """Over either protocol; and over a socket without addresses."""
    only_local(Request({"type": "http", "client": (host, 1)}))
    only_local(Request({"type": "http", "client": None}))


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "nonsense"])
def test_nobody_else_may(host: str) -> None:
    """403."""
    with pytest.raises(HTTPException, match="403"):
        only_local(Request({"type": "http", "client": (host, 1)}))
