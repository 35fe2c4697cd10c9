"""What does a cache that never forgets find?"""

from __future__ import annotations

from router.hashing import token_array
from router.sim.infinite import InfiniteCache

BLOCK = 4


def test_a_repeated_prompt_is_found_but_for_its_last_block_and_token() -> None:
    """Engines always compute the last token, and reuse whole blocks only."""
    cache = InfiniteCache(BLOCK)
    prompt = token_array(range(8))
    assert cache.serve(prompt, token_array([100])) == 0
    assert cache.serve(prompt, token_array([100])) == 4
    assert cache.serve(token_array(range(9)), token_array([100])) == 8


def test_the_next_turn_finds_the_answer_to_the_last_except_its_final_token() -> None:
    """Generated tokens are held once a later step has computed them."""
    cache = InfiniteCache(BLOCK)
    cache.serve(token_array(range(6)), token_array([50, 51, 52]))
    assert cache.serve(token_array([*range(6), 50, 51, 52, 9]), token_array([1])) == 8
    cache = InfiniteCache(BLOCK)
    cache.serve(token_array(range(6)), token_array([50, 51]))
    assert cache.serve(token_array([*range(6), 50, 51, 52, 9]), token_array([1])) == 4


def test_equal_blocks_behind_different_prefixes_are_different() -> None:
    """KV depends on everything before it."""
    cache = InfiniteCache(BLOCK)
    cache.serve(token_array([1, 1, 1, 1, 5, 5, 5, 5, 0]), token_array([0]))
    assert cache.serve(token_array([2, 2, 2, 2, 5, 5, 5, 5, 0]), token_array([0])) == 0
