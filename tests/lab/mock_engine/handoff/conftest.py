"""Two engines that hand KV over to each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from loadtest.mock_engine.mock_config import HandoffConfig, HandoffDialect, MockEngineConfig
from loadtest.mock_engine.mock_engine import running_engines
from router.types import Role
from tests.lab.mock_engine.handoff.pair import OpenPair, Pair

DEADLINE_S = 30.0


@pytest.fixture
def open_pair(make_config: Callable[..., MockEngineConfig]) -> OpenPair:
    """Starts a prefill and a decode engine. `handoff` configures the handoff of both; other fields are the engines'."""

    @asynccontextmanager
    async def opened(
        dialect: HandoffDialect, handoff: dict[str, Any] | None = None, **overrides: Any
    ) -> AsyncIterator[Pair]:
        given = {"dialect": dialect, "store": HandoffConfig().store, **(handoff or {})}
        configs = [make_config(handoff=HandoffConfig(role=role, **given), **overrides) for role in list(Role)[1:]]
        async with (
            asyncio.timeout(DEADLINE_S),
            running_engines(configs) as (prefill, decode),
            httpx.AsyncClient(base_url=prefill.url) as to_prefill,
            httpx.AsyncClient(base_url=decode.url) as to_decode,
        ):
            yield Pair(prefill, decode, to_prefill, to_decode)

    return opened
