"""What counts as cached while an attempt runs, and after each way in which it can end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from router.decision import Direct, Plan, Pull
from router.errors import RouterError
from router.hashing import hash_array, token_array
from router.types import Generation, PodId, PromptPrefix
from tests.kit.scripted_pods import Asked, Behaviour, Client, Town, town
from tests.proxy.test_kv_transfer import (
    ANSWERING,
    OFFERING,
    TOKEN,
    answer,
    erring_in_its_stream,
    pair,
    refusing_handoffs,
    resetting,
    saying,
    silent,
    streaming,
)

pytestmark = [pytest.mark.virtual, pytest.mark.anyio]


def prompt(*hashes: int) -> PromptPrefix:
    return PromptPrefix(Generation(model="m"), token_array(range(16 * len(hashes))), hash_array(hashes))


LONG, SHORT = prompt(1, 2, 3), prompt(1, 2)


async def cached(pods: Town) -> Mapping[PodId, int]:
    """Blocks of the long prompt by pod."""
    match = pods.store.match(LONG, asyncio.get_running_loop().time())
    return {pod: match.held_blocks(pod) for pod in match.blocks}


async def serve(pods: Town, *plans: Plan, asked: PromptPrefix = LONG, stream: bool = False) -> None:
    """A request, whose error does not matter."""
    try:
        await pods.serve(pods.context(*plans, prompt=asked, stream=stream))
    except RouterError:
        pass


async def begun(asked: Asked) -> None:
    """One token, and no end."""
    await asked.begin()
    await asked.event(TOKEN)
    await asked.hung_up()


@pytest.mark.parametrize(
    ("behaviour", "stream", "left"),
    [(silent, True, {}), (begun, True, {"a": 3}), (silent, False, {})],
    ids=["before the first token", "after the first token", "unstreamed"],
)
async def test_a_prompt_counts_as_cached_while_it_is_computed(
    behaviour: Behaviour, stream: bool, left: Mapping[PodId, int]
) -> None:
    """After the client has disconnected, only where it is known to be computed."""
    async with town(a=behaviour) as pods:
        client = Client()
        context = pods.context(Direct(pods.pod("a")), prompt=LONG, stream=stream, expected_ms=60_000.0)
        serving = asyncio.create_task(pods.serve(context, client))
        await pods.until(lambda: client.wrote.is_set() if behaviour is begun else pods.made["a"].working)
        assert await cached(pods) == {"a": 3}
        serving.cancel()
        await asyncio.wait([serving])
        assert await cached(pods) == left


async def test_an_unstreamed_prompt_counts_as_computed_after_its_expected_time() -> None:
    """Its first token cannot be seen; the client may disconnect long after it."""
    async with town(a=silent) as pods:
        serving = asyncio.create_task(pods.serve(pods.context(Direct(pods.pod("a")), prompt=LONG)))
        await pods.until(lambda: pods.ledger.inflight() and not pods.ledger.inflight()["a"].prefill_requests)
        serving.cancel()
        await asyncio.wait([serving])
        assert await cached(pods) == {"a": 3}


ANSWERED = answer("h", 16)
ANSWERED["choices"][0]["finish_reason"] = "stop"


@pytest.mark.parametrize(
    ("dialect", "prefill", "decode", "left"),
    [
        ("nixl", OFFERING, streaming, {"p": 3, "d": 3}),
        ("nixl", saying({}, 500), streaming, {}),
        ("nixl", saying({}, 400), streaming, {}),
        ("nixl", OFFERING, saying({}, 500), {"p": 3}),
        ("nixl", OFFERING, erring_in_its_stream, {"p": 3}),
        ("bootstrap", OFFERING, streaming, {"p": 3, "d": 3}),
        ("bootstrap", silent, streaming, {"p": 3, "d": 3}),
        ("bootstrap", resetting, silent, {}),
        ("trtllm", saying(ANSWERED), streaming, {"p": 3}),
    ],
    ids=[
        "served",
        "failed prefill",
        "refused prefill",
        "failed decode",
        "error event",
        "served at once",
        "the decode pod is first",
        "failed at once",
        "answered by the prefill pod",
    ],
)
async def test_each_pod_of_a_split_has_what_it_computed_or_received(
    dialect: str, prefill: Behaviour, decode: Behaviour, left: Mapping[PodId, int]
) -> None:
    async with town(p=prefill, d=decode) as pods:
        await serve(pods, pair(pods, dialect), stream=True)
        assert await cached(pods) == left


async def test_a_failed_pull_leaves_nothing() -> None:
    """Until the next candidate computes the prompt."""
    async with town(a=refusing_handoffs(500), holder=ANSWERING) as pods:
        pulling = Direct(pods.pod("a"), Pull("holder", 32))
        await serve(pods, pulling)
        assert await cached(pods) == {}
        await serve(pods, pulling, Direct(pods.pod("a")))
        assert await cached(pods) == {"a": 3}
