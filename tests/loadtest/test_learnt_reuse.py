"""The measured value of evicted blocks, where it can be computed."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from loadtest.studies.learnt_reuse import Found, UnlimitedGhosts, row
from router.types import BlockChange, Tier

CAPACITY = 1000


def looped(ghosts: UnlimitedGhosts, blocks: int, requests: int) -> None:
    """One pod that evicts the least recently used of `CAPACITY` blocks, asked for `blocks` ones in turn."""
    held: OrderedDict[int, None] = OrderedDict()
    for number in range(requests):
        block = number % blocks
        ghosts.requested([block], {"a": (int(block in held), 0, 0, 0)})
        held[block] = None
        held.move_to_end(block)
        if len(held) > CAPACITY:
            ghosts.evicted("a", BlockChange(Tier.GPU, False, [held.popitem(last=False)[0]]), CAPACITY)


def test_a_loop_just_larger_than_the_cache_is_worth_a_larger_cache() -> None:
    """Every block is asked for 50 evictions after its own: a cache larger by a tenth finds all of them."""
    ghosts = UnlimitedGhosts()
    looped(ghosts, 1050, 10_000)
    assert ghosts.reuse_if(0.1) == pytest.approx(1 / 0.1)
    assert ghosts.reuse_if(0.04) == 0


def test_a_loop_far_larger_than_the_cache_is_worth_nothing() -> None:
    ghosts = UnlimitedGhosts()
    looped(ghosts, 2000, 10_000)
    assert ghosts.reuse_if(0.25) == 0 and ghosts.reuse_if(1.0) == pytest.approx(1.0)


def test_the_slope_between_two_sizes_is_a_column() -> None:
    """A hit share of 0.5 that grows by 0.02 from a tenth less to a tenth more: h' = 0.02 / ln(1.1 / 0.9) = 0.1."""
    found = [Found(size, share, 0.3, (0.2, 0.25)) for size, share in ((0.9, 0.49), (1.0, 0.5), (1.1, 0.51))]
    assert row("a", found) == "| a | 50.0% | 0.30 | 0.25 | 0.20 | 0.20 | 0.100 |"
