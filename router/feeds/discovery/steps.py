"""Divides work on many pods into steps, so that the event loop serves requests between them.

The first list of 500 pods costs 50 ms of CPU; a step costs about 2 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

STEP = 25
"""Pods that are read, built or added to the fleet at once."""

T = TypeVar("T")


class _Config(Protocol):
    @property
    def url(self) -> str: ...

    @property
    def ids(self) -> tuple[str, ...]: ...


class Listed(Protocol):
    @property
    def config(self) -> _Config: ...


L = TypeVar("L", bound=Listed)


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, with a turn of the event loop after each `STEP`."""
    for number, item in enumerate(items):
        if number % STEP == STEP - 1:
            await asyncio.sleep(0)
        yield item


def sets_between(known: Mapping[str, L], wanted: Sequence[L]) -> Iterator[list[L]]:
    """Complete sets that lead from the `known` pods, by URL, to `wanted`, the last one. Each has at most `STEP` more
    pods that are new or changed; the first one has lost all pods that are not wanted."""
    changed = [number for number, pod in enumerate(wanted) if known.get(pod.config.url) != pod]
    for end in range(STEP, len(changed), STEP):
        later = set(changed[end:])
        found = (_known(known, pod) if number in later else pod for number, pod in enumerate(wanted))
        yield [pod for pod in found if pod is not None]
    yield list(wanted)


def _known(known: Mapping[str, L], pod: L) -> L | None:
    """What is known at the URL of a pod; None under another id, which another pod may have now."""
    before = known.get(pod.config.url)
    return before if before is not None and before.config.ids == pod.config.ids else None
