"""Clients get the same bytes with and without the router, but for ids and times.

Each program runs against a pod, and against a router in front of it, in up to `ROUNDS` rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.live_clients.clients import STEPS, run
from tests.live_clients.comparison import differences
from tests.live_clients.recording_proxy import Exchange
from tests.live_clients.sides import Sides

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]
ROUNDS = 4


async def compared(program: str, kind: str, of: Sides) -> Sequence[str]:
    """What differs. First, each side runs once, so that both have the prompts in their caches."""
    await asyncio.gather(run(program, kind, of.direct), run(program, kind, of.routed))
    direct: list[Sequence[Exchange]] = []
    routed: list[Sequence[Exchange]] = []
    for _ in range(ROUNDS):
        one, other = await run(program, kind, of.direct), await run(program, kind, of.routed)
        assert one.errors == other.errors
        direct.append(one.exchanges)
        routed.append(other.exchanges)
        if not (found := differences(direct, routed)):
            break
    return found


@pytest.mark.parametrize(
    ("program", "kind"), [(program, kind) for program, kinds in STEPS.items() for kind in kinds], ids=" ".join
)
async def test_a_client_gets_the_same_bytes_with_and_without_the_router(
    sides: dict[str, Sides], program: str, kind: str
) -> None:
    found = await compared(program, kind, sides[kind])
    assert not found, f"{len(found)} requests differ\n" + "\n".join(found)


@pytest.mark.parametrize("program", [program for program, kinds in STEPS.items() if "generation" in kinds])
async def test_a_pod_that_forces_usage_looks_as_one_that_does_not(sides: dict[str, Sides], program: str) -> None:
    """The bytes of a pod without `--enable-force-include-usage`, from one with it."""
    found = await compared(program, "generation", sides["generation, forced usage"])
    assert not found, f"{len(found)} requests differ\n" + "\n".join(found)
