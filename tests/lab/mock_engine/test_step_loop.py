"""Tokens are ready when their steps end, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from loadtest.engine_model.pod import SimRequest
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.step_loop import StepLoop, StreamLost, TokenStream
from router.hashing import token_array
from router.types import BlocksStored, KvEvent, PodLoad, PodSpeed

pytestmark = pytest.mark.net
MakeConfig = Callable[..., MockEngineConfig]


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run(story: Coroutine[Any, Any, None]) -> None:
    """Run a test on a virtual clock; waiting for nothing fails at once."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(asyncio.wait_for(story, timeout=1000))


def request(name: str, prompt_tokens: int, output_tokens: int) -> SimRequest:
    """Prompts of different names share nothing."""
    prompt = token_array(range(ord(name) * 1000, ord(name) * 1000 + prompt_tokens))
    return SimRequest(id=name, prompt=prompt, output=list(range(output_tokens)))


SPEED = PodSpeed(10.0, 1.0, 0.0, 50.0)
"""A prefill of n tokens takes 10 + n ms, a decode step 50 ms."""


def test_the_first_token_follows_the_prefill_and_the_next_a_decode_step(make_config: MakeConfig) -> None:
    """Both scaled by `time_scale`."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        steps = StepLoop(make_config(speed=SPEED, time_scale=0.5), lambda events: None)
        reply = steps.submit(request("a", 40, 3))
        assert await reply.wait_for(1) == 1
        assert loop.time() == pytest.approx(0.025)
        assert await reply.wait_for(3) == 3
        assert loop.time() == pytest.approx(0.075)

    run(story())


def test_an_idle_engine_starts_its_clock_with_the_next_request(make_config: MakeConfig) -> None:
    """Idle time is not made up for."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        steps = StepLoop(make_config(speed=SPEED, time_scale=1.0), lambda events: None)
        await steps.submit(request("a", 40, 1)).wait_for(1)
        await asyncio.sleep(5.0)
        await steps.submit(request("b", 20, 1)).wait_for(1)
        assert loop.time() == pytest.approx(0.05 + 5.0 + 0.03)

    run(story())


def test_a_late_loop_does_not_make_later_steps_later(make_config: MakeConfig) -> None:
    """Steps are due one after the other: the delay of a step does not delay the next."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        steps = StepLoop(make_config(speed=SPEED, time_scale=1.0), lambda events: None)
        reply = steps.submit(request("a", 40, 4))
        await reply.wait_for(1)
        loop._now_s += 0.12
        await reply.wait_for(4)
        assert loop.time() == pytest.approx(0.05 + 3 * 0.05)

    run(story())


def test_a_throttled_engine_takes_longer_from_its_next_step_on(make_config: MakeConfig) -> None:
    """Until the factor is 1 again."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        steps = StepLoop(make_config(speed=SPEED, time_scale=1.0), lambda events: None)
        steps.slowdown = 3.0
        await steps.submit(request("a", 40, 1)).wait_for(1)
        assert loop.time() == pytest.approx(0.15)
        steps.slowdown = 1.0
        await steps.submit(request("b", 20, 1)).wait_for(1)
        assert loop.time() == pytest.approx(0.15 + 0.03)

    run(story())


def test_with_time_scale_zero_nothing_waits(make_config: MakeConfig) -> None:
    """The clock never moves."""

    async def story() -> None:
        steps = StepLoop(make_config(), lambda events: None)
        assert await steps.submit(request("a", 40, 64)).wait_for(64) == 64
        assert asyncio.get_running_loop().time() == 0.0

    run(story())


def test_events_are_published_when_their_step_ends(make_config: MakeConfig) -> None:
    """Not earlier: the blocks are not computed yet."""

    async def story() -> None:
        published: list[KvEvent] = []
        steps = StepLoop(make_config(speed=SPEED, time_scale=1.0), published.extend)
        reply = steps.submit(request("a", 40, 1))
        await asyncio.sleep(0.049)
        assert published == []
        await reply.wait_for(1)
        assert [type(event) for event in published] == [BlocksStored]

    run(story())


def test_a_cancelled_stream_ends_and_the_others_continue(make_config: MakeConfig) -> None:
    """Its reader is woken at once, its place in the pod is free at once."""

    async def story() -> None:
        steps = StepLoop(make_config(speed=SPEED, time_scale=1.0), lambda events: None)
        gone, stays = steps.submit(request("a", 40, 9)), steps.submit(request("b", 20, 2))
        reader = asyncio.ensure_future(gone.wait_for(9))
        await asyncio.sleep(0.001)
        assert steps.pod.load.running == 1 and steps.pod.load.waiting == 1
        steps.cancel(gone)
        assert steps.pod.load.running + steps.pod.load.waiting == 1
        with pytest.raises(StreamLost):
            await reader
        assert await stays.wait_for(2) == 2
        assert steps.pod.load == PodLoad()

    run(story())


def test_cancelling_a_finished_stream_affects_no_other(make_config: MakeConfig) -> None:
    """Not even a later request with the same id."""

    async def story() -> None:
        steps = StepLoop(make_config(), lambda events: None)
        old = steps.submit(request("a", 4, 1))
        await old.wait_for(1)
        new = steps.submit(request("a", 4, 2))
        steps.cancel(old)
        assert await new.wait_for(2) == 2

    run(story())


def test_a_restart_ends_every_stream_and_empties_the_pod(make_config: MakeConfig) -> None:
    """The new epoch starts empty and serves."""

    async def story() -> None:
        steps = StepLoop(make_config(speed=SPEED, time_scale=1.0), lambda events: None)
        await steps.submit(request("a", 40, 1)).wait_for(1)
        reply = steps.submit(request("b", 40, 9))
        await asyncio.sleep(0.001)
        steps.restart()
        with pytest.raises(StreamLost):
            await reply.wait_for(1)
        assert (steps.pod.load, steps.pod.counters.prompt_tokens) == (PodLoad(), 0)
        fresh = steps.submit(request("a", 40, 1))
        assert await fresh.wait_for(1) == 1 and fresh.cached_tokens == 0

    run(story())


def test_a_reader_gets_all_that_is_ready() -> None:
    """A slow reader is not woken for each token; one that asks for more waits."""

    async def story() -> None:
        reply = TokenStream("a")
        reader = asyncio.ensure_future(reply.wait_for(3))
        for _ in range(2):
            reply.advance()
            await asyncio.sleep(0)
        assert not reader.done()
        for _ in range(2):
            reply.advance()
        assert await reader == 4

    run(story())


def test_cancelling_a_finished_stream_releases_its_pinned_blocks(make_config: MakeConfig) -> None:
    """So that a prefill leg without a handoff leaks nothing."""

    async def story() -> None:
        steps = StepLoop(make_config(), lambda events: None)
        reply = steps.submit(replace(request("a", 40, 1), pinned=True))
        await reply.wait_for(1)
        assert steps.pod.cache.used_blocks == 3
        steps.cancel(reply)
        assert steps.pod.cache.used_blocks == 0

    run(story())
