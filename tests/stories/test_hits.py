"""A router finds out by which rule an engine takes cached tokens, and says so of each pod."""

from __future__ import annotations

from typing import Any

import pytest

from router.index.hit_probe import CacheHabits
from router.types import AttentionKind, LayerType
from tests.kit.layered_pool import layered
from tests.stories.conftest import Deploy

pytestmark = [pytest.mark.net, pytest.mark.anyio]

FULL, STATE = LayerType(AttentionKind.FULL, 0), LayerType(AttentionKind.STATE, 0)
WINDOW = LayerType(AttentionKind.WINDOW, 0, 128)
DROPS = CacheHabits(drops_block=True)


@pytest.mark.parametrize(
    ("groups", "habits", "hits"),
    [
        ((FULL,), CacheHabits(), "full"),
        ((STATE, STATE, FULL), CacheHabits(), "full + state, checkpoints"),
        ((*[WINDOW] * 5, FULL), DROPS, "full + window 128, checkpoints, drops a block"),
    ],
)
async def test_a_pod_says_what_decides_its_hits(
    groups: tuple[LayerType, ...], habits: CacheHabits, hits: str, deploy: Deploy
) -> None:
    """After five prompts that the router has sent: before, only what events say is known."""
    async with deploy(pods=1, engine={"new_pool": layered(groups, habits)}) as deployment:

        async def is_known() -> bool:
            pods: list[dict[str, Any]] = await deployment.pods()
            return [pod["hits"] for pod in pods] == [hits]

        await deployment.until(is_known)
