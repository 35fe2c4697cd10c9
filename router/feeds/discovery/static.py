"""Which pods does the configuration name?

A fixed set that only its owner changes, as an async iterator of complete sets: the first at once, another after each
`replace`. This file asks no pod whether it is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from urllib.parse import urlsplit

from router.config.schema import PodConfig
from router.engines.engine_catalog import DIALECTS
from router.errors import ConfigError
from router.types import Pod, PodSpeed, Role


class StaticDiscovery:
    """The set of pods that was given last. For one reader."""

    def __init__(self, pods: Iterable[Pod] = ()) -> None:
        self._pods: tuple[Pod, ...] = ()
        self._changed = asyncio.Event()
        self.replace(pods)

    def replace(self, pods: Iterable[Pod]) -> None:
        """From now on it is these. Raises `ConfigError` if two have one id; the set then stays as it was."""
        pods = tuple(pods)
        ids = [pod.id for pod in pods]
        twice = sorted({pod_id for pod_id in ids if ids.count(pod_id) > 1})
        if twice:
            raise ConfigError(f"pods: two have the id {', '.join(twice)}")
        self._pods = pods
        self._changed.set()

    @property
    def pods(self) -> tuple[Pod, ...]:
        """The present set."""
        return self._pods

    async def __aiter__(self) -> AsyncIterator[tuple[Pod, ...]]:
        """Complete sets, the present one first; sets that were replaced before they were read are skipped."""
        while True:
            self._changed.clear()
            yield self._pods
            await self._changed.wait()


def configured_pods(config: PodConfig, speed: PodSpeed, kv_bytes_per_token: int = 0) -> tuple[Pod, ...]:
    """One definition as pods: one for each data-parallel rank, `id#rank` if there are several. The id is the URL's
    host, port and path unless one is given. Speed and KV bytes are what `prior_of` says; 0 bytes: unknown."""
    parts = urlsplit(config.url)
    pod_id = config.id or parts.netloc + parts.path
    ranks = range(config.dp_size) if config.dp_size > 1 else (None,)
    return tuple(
        Pod(
            id=pod_id if rank is None else f"{pod_id}#{rank}",
            url=config.url,
            socket=config.socket,
            engine=config.engine,
            speed=speed,
            role=config.role,
            kv_bytes_per_token=kv_bytes_per_token,
            hardware=_hardware(config),
            handoff=config.handoff,
            handoff_port=config.handoff_port,
            serves_alone=config.role is Role.BOTH or not config.handoff or DIALECTS[config.handoff].serves_alone,
            pulls=config.pulls,
            dp_rank=rank,
            host=config.host,
            rack=config.rack,
            zone=config.zone,
        )
        for rank in ranks
    )


def _hardware(config: PodConfig) -> str:
    """Pods of one name here learn together, and so must start from one speed: a speed of its own is its own name."""
    own = config.speed
    return config.hardware if own is None else f"speed {own.c0_ms:g} {own.c1_ms_per_token:g} {own.c2_ms_per_token2:g}"
