"""Threads that read long prompts, so that the event loop hardly waits for them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from router.prompt.conversation import UnreadReason, Unrenderable

READ_THREADS = 3
"""Long prompts that are read at the same time."""
VERY_LONG = 256 * 1024
"""Bytes or characters: prompts with more have another thread, so that shorter ones never wait for them."""
NICE = 5
"""How much lower the priority of these threads is, in the kernel's unit: each step is 1.25 times less of a core."""
RESTS, MAX_REST_S = 2.0, 0.1
"""A thread that has read rests this many times as long before it reads on, and at most so long: reading takes the
interpreter and a core, and the requests that waited for them catch up meanwhile."""
READ_TIMEOUT_S = 2.0
"""How long a long prompt waits for a thread and its result. It is then routed without a prefix."""

_Result = TypeVar("_Result")


def _after_the_loop() -> None:
    """Where cores are few, the event loop goes before this thread. Linux alone has a priority for each thread."""
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)


class Rests(threading.local):
    """Runs work one after the other in each thread, with rests in between."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._cpu_s, self._sleep = clock, cpu_s, sleep
        self._rested_at = 0.0

    def run(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """The result of `work`. Raises what it raises."""
        if (rest_s := self._rested_at - self._clock()) > 0:
            self._sleep(rest_s)
        began_s = self._cpu_s()
        try:
            return work(*arguments)
        finally:
            self._rested_at = self._clock() + min(RESTS * (self._cpu_s() - began_s), MAX_REST_S)


class ReadThreads:
    """Threads that read long prompts of all models, `READ_THREADS` at a time, and one that reads very long ones."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(READ_THREADS, "long-prompt", _after_the_loop)
        self._very_long = ThreadPoolExecutor(1, "very-long-prompt", _after_the_loop)
        self._rests = Rests()

    async def run(self, size: int, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """The result of `work`. `size`: bytes or characters that it reads. Raises what it raises, and `Unrenderable`
        after `READ_TIMEOUT_S`: running work then continues in its thread, waiting work is dropped."""
        threads = self._very_long if size > VERY_LONG else self._long
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                # A variable for the future would be a cycle with its exception, which would keep the body in memory.
                return await asyncio.get_running_loop().run_in_executor(threads, self._rests.run, work, *arguments)
        except TimeoutError as error:
            raise Unrenderable(UnreadReason.BUSY, f"not read within {READ_TIMEOUT_S:g} s") from error
