"""Admin calls are only accepted from the router's own machine."""

from __future__ import annotations

import pytest
from fastapi import Request
from starlette.exceptions import HTTPException

from router.api.admin import only_local

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_local_calls_are_accepted(host: str) -> None:
    """Over IPv4, IPv6 and Unix sockets."""
    await only_local(Request({"type": "http", "client": (host, 1)}))
    await only_local(Request({"type": "http", "client": None}))


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "nonsense"])
async def test_remote_calls_are_refused(host: str) -> None:
    """403."""
    with pytest.raises(HTTPException, match="403"):
        await only_local(Request({"type": "http", "client": (host, 1)}))
