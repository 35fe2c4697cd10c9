"""The index expects the hits that an engine reports, with windows, states, drafters and evictions."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from loadtest.mock_engine.event_publisher import encode_batch
from router.hashing import generation_seed, hash_blocks, token_array
from router.index.blockmap import BlockMap
from router.index.hit_probe import CacheHabits
from router.types import Generation, LayerType, PromptPrefix
from tests.index.decoding import decode_batch
from tests.kit.layered_pool import AHEAD, DENSE, DROPS, FULL, STATE, pod_of, served, window

POD, BLOCK = "pod", 4
MODELS: dict[str, tuple[Sequence[LayerType], CacheHabits]] = {
    "full": ((FULL,), CacheHabits()),
    "full, dense windows": ((window(9), FULL), DENSE),
    "window": ((window(9), FULL), CacheHabits()),
    "windows and a state": ((window(9), window(9), FULL, STATE), CacheHabits()),
    "full, drops": ((FULL,), DROPS),
    "window, drops": ((window(9), FULL), DROPS),
    "window, full alone drops": ((window(9), FULL), CacheHabits(drops_block=True, drafter_layer=0)),
    "state, drops": ((STATE, FULL), DROPS),
    "full, looks ahead": ((FULL,), AHEAD),
    "window, looks ahead": ((window(14), FULL), AHEAD),
    "state, looks ahead": ((STATE, FULL), AHEAD),
}
prompts = st.tuples(st.integers(1, 2), st.integers(1, 40), st.integers(0, 30), st.integers(0, 2)).map(
    lambda shape: [shape[0]] * shape[1] + [10 * shape[0] + shape[3]] * shape[2]
)
turns = st.lists(st.tuples(prompts, st.integers(1, 12)), min_size=1, max_size=12)


def expected_hit(blocks: BlockMap, prompt: Sequence[int]) -> int:
    generation, tokens = Generation(model="m", block_size_tokens=BLOCK), token_array(prompt)
    prefix = PromptPrefix(generation, tokens, hash_blocks(tokens, BLOCK, generation_seed(generation)))
    held = sum(blocks.match(prefix).get(POD, (0,)))
    return BLOCK * min(held, (len(prompt) - 1) // BLOCK)


@given(st.sampled_from(sorted(MODELS)), turns, st.sampled_from([60, 120, 10_000]))
def test_the_index_expects_what_the_engine_reports(
    model: str, history: list[tuple[list[int], int]], num_blocks: int
) -> None:
    """In every request, with shared starts, cuts and evictions, once it knows what the events do not say."""
    groups, habits = MODELS[model]
    pod, blocks = pod_of(groups, habits, BLOCK, num_blocks), BlockMap()
    blocks.add_holder(POD, Generation(model="m", block_size_tokens=BLOCK))
    blocks.learn(POD, habits)
    for prompt, answer in history:
        expected = expected_hit(blocks, prompt)
        cached, events = served(pod, prompt, range(100, 100 + answer))
        assert cached == expected
        for event in decode_batch(encode_batch(events, "map", 0.0)):
            blocks.apply(POD, event)
