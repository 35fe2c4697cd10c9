"""The protocol of discovery sources, and the source of the pods in the configuration file.

A new source is a class with `PodSource`'s one method, a member of the config union, and a line in
`wiring/fleet_parts.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from router.config.schema import PodConfig


class PodSource(Protocol):
    """Finds pods."""

    def __aiter__(self) -> AsyncIterator[Sequence[PodConfig]]:
        """Complete sets of pods: the current one first, then one after each change. After an error `supervise` iterates
        again; until then the last set stays in force."""


class ConfiguredPods:
    """The pods of the configuration file: one set that never changes."""

    def __init__(self, pods: Sequence[PodConfig]) -> None:
        self._pods = pods

    async def __aiter__(self) -> AsyncIterator[Sequence[PodConfig]]:
        yield self._pods
