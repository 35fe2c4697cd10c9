"""Attempts over HTTP: what depends on the connection. Which candidate is tried next, and what a failure or a success
changes, is in `tests/request/test_attempts.py`."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from router.config.schema import Limits
from router.decision import Direct
from router.errors import ConnectFailed, UpstreamBroken, UpstreamTimeout
from router.frontends.http.relay import read_all
from router.guards import Bound
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scripted_pods import Asked, Behaviour, Town, town
from tests.kit.step_loop import StepLoop
from tests.proxy.test_kv_transfer import ANSWERING, TOKEN, resetting

pytestmark = [pytest.mark.virtual, pytest.mark.anyio]


def plans(pods: Town) -> list[Direct]:
    return [Direct(pods.pod(name)) for name in pods.made]


@contextlib.contextmanager
def no_free_file() -> Iterator[None]:
    """This process can open no file or socket."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        yield
    finally:  # else all later tests of this process would fail, too
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.net
async def test_a_router_without_a_free_file_ejects_no_pod() -> None:
    """It is not the pods' fault that no connection can be opened. Once it can, requests are served."""
    async with town(a=ANSWERING, b=ANSWERING) as pods:
        with no_free_file():
            for _ in range(5):
                with pytest.raises(ConnectFailed, match="Too many open files"):
                    await pods.serve(pods.context(*plans(pods)))
        assert not pods.breaker._failed
        assert (await pods.serve(pods.context(*plans(pods)))).status == 200


BRIEF_S = 2.0
BRIEF = Limits(connect_timeout_s=DEADLINE_S, first_byte_timeout_s=BRIEF_S, idle_timeout_s=BRIEF_S)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("pause_s", "is_served"), [(0.75 * BRIEF_S, True), (1.25 * BRIEF_S, False)])
async def test_a_response_may_take_longer_than_any_timeout_while_data_arrives(
    pause_s: float, is_served: bool, stream: bool
) -> None:
    """Each piece begins the time anew. A longer silence is a failure of the pod."""

    async def slow(asked: Asked) -> None:
        await asked.begin()
        for event in (TOKEN, TOKEN, TOKEN, "[DONE]"):
            await asked.event(event)
            await asyncio.sleep(pause_s)
        await asked.end()

    async with town(a=slow) as pods:
        pods.pools.of(pods.pod("a")).limits = BRIEF
        with nullcontext() if is_served else pytest.raises(UpstreamTimeout):
            client = await pods.serve(pods.context(*plans(pods), stream=stream))
            assert client.finished and client.body.count(b"hello") == 3
        reply = await pods.forwarder.sender.send(pods.context().head, pods.pod("a"), b"{}")
        with nullcontext() if is_served else pytest.raises(UpstreamTimeout):
            assert (await read_all(reply, Bound("answer", 1000))).count(b"hello") == 3


def crashing(pod: str) -> Behaviour:
    """Dies of the request and accepts no connection afterwards."""

    async def behave(asked: Asked) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StepLoop)
        del loop.pods[pod]
        asked.reset()

    return behave


async def test_a_pod_that_a_request_crashes_over_a_kept_connection_has_received_it() -> None:
    """It accepts no connection afterwards, but that is not the failure of a pod that was down before."""
    async with town(retries=10, a=ANSWERING, b=ANSWERING, c=ANSWERING, d=ANSWERING) as pods:
        for plan in plans(pods):
            await pods.serve(pods.context(plan))
            pods.made[plan.pod.id].behaviour = crashing(plan.pod.id)
        with pytest.raises(UpstreamBroken):
            await pods.serve(pods.context(*plans(pods)))
        assert [len(pod.asked) for pod in pods.made.values()] == [2, 2, 1, 1]
        assert [pods.failures(pod) for pod in "abcd"] == [0, 0, 0, 0]


@pytest.mark.parametrize(("method", "asked"), [("POST", 1), ("PUT", 2)])
async def test_a_request_that_may_not_be_repeated_uses_no_kept_connection(method: str, asked: int) -> None:
    """If that died, nobody would know whether it transported the request."""
    async with town(a=ANSWERING) as pods:
        await pods.serve(pods.context(*plans(pods)))
        pods.made["a"].asked.clear()
        pods.made["a"].behaviour = resetting
        with pytest.raises(UpstreamBroken):
            await pods.serve(pods.unread(method, *plans(pods)))
        assert len(pods.made["a"].asked) == asked
