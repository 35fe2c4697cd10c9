"""Requests that fail leave no reference cycles, which would keep their bodies in memory for minutes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from weakref import ref

import pytest
from msgspec.structs import replace

from router.errors import MalformedRequest, UpstreamBroken
from router.types import InferenceRequest, PromptPrefix
from tests.kit.scripted_pods import Town, town
from tests.proxy.test_kv_transfer import ANSWERING, resetting, silent

pytestmark = [pytest.mark.virtual, pytest.mark.anyio]


class Marker:
    """Lives as long as the fields of its request."""


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Disable the cycle collector for the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def failing(pods: Town, error: type[BaseException]) -> ref[Marker]:
    """Serve a request that fails with this error."""
    marker, context = Marker(), pods.context()
    context.request = replace(context.request, prompt={**context.request.prompt, "marker": marker})
    with pytest.raises(error):
        await pods.forward(context)
    return ref(marker)


async def test_a_request_that_all_pods_fail_leaves_nothing() -> None:
    async with town(a=resetting, b=resetting) as pods:
        left = await failing(pods, UpstreamBroken)
        await pods.until(lambda: left() is None)


async def test_a_request_whose_prompt_is_refused_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(request: InferenceRequest) -> PromptPrefix | None:
        await asyncio.sleep(0)
        raise MalformedRequest("no prompt")

    async with town(a=ANSWERING) as pods:
        monkeypatch.setattr(pods, "read", read)
        left = await failing(pods, MalformedRequest)
        await pods.until(lambda: left() is None)


@pytest.mark.parametrize("reading", [False, True])
async def test_a_request_whose_client_leaves_leaves_nothing(monkeypatch: pytest.MonkeyPatch, reading: bool) -> None:
    """While its prompt is read, or while a pod computes it."""

    async def read(request: InferenceRequest) -> PromptPrefix | None:
        await asyncio.Event().wait()
        return None

    async with town(a=silent) as pods:
        if reading:
            monkeypatch.setattr(pods, "read", read)
        serving = asyncio.create_task(failing(pods, asyncio.CancelledError))
        await pods.until(lambda: pods.counted("warmroute_in_flight_requests") and (reading or pods.made["a"].working))
        serving.cancel()
        left = await serving
        await pods.until(lambda: left() is None)
