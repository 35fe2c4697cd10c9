"""Sessions recorded on real engines whose layers keep windows or states: what the index expects of each request is
what the engine took from its cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from router.hashing import generation_seed, hash_blocks, token_array
from router.index.blockmap import BlockMap
from router.index.hit_probe import CacheHabits
from router.stores.prefix_store import LocalStore
from router.types import AttentionKind, BlocksRemoved, BlocksStored, Generation, LayerType, PromptPrefix, Tier
from tests.index.decoding import decode_batch
from tests.index.recorded_sessions import SESSIONS, WITH_FULL_ATTENTION, Sent, block_tokens, needs_sessions, requests
from tests.kit.scenes import make_pod

POD = "pod"


def expected_hit(blocks: BlockMap, request: Sent, block: int) -> int:
    generation = Generation(model="m", block_size_tokens=block, salt=request.salt)
    tokens = token_array(request.prompt)
    hashes = hash_blocks(tokens, block, generation_seed(generation))
    return block * sum(blocks.match(PromptPrefix(generation, tokens, hashes)).get(POD, (0,)))


@pytest.mark.parametrize("session", WITH_FULL_ATTENTION, ids=lambda session: session["name"])
def test_every_request_hits_what_was_expected_hit(session: dict[str, Any]) -> None:
    block, blocks = block_tokens(session), BlockMap()
    blocks.add_holder(POD, Generation(model="m", block_size_tokens=block))
    for request in requests(session):
        assert expected_hit(blocks, request, block) == request.cached_tokens
        for batch in request.batches:
            for event in decode_batch(batch):
                blocks.apply(POD, event)


WINDOW = LayerType(AttentionKind.WINDOW, 16, 33)
PROMPT = list(range(100, 180))


def two_groups(*, order: str) -> BlockMap:
    """Five blocks of full attention, and the last two of a window, in this order of events."""
    blocks = BlockMap()
    blocks.add_holder(POD, Generation(model="m"))
    full = BlocksStored(block_hashes=(1, 2, 3, 4, 5), tokens=token_array(PROMPT), block_size_tokens=16)
    window = BlocksStored(block_hashes=(4, 5), group=1, layers=WINDOW)
    for event in (window, full) if order == "window first" else (full, window):
        blocks.apply(POD, event)
    return blocks


def hit(blocks: BlockMap, tokens: int) -> int:
    return expected_hit(blocks, Sent((PROMPT + [7] * 16)[:tokens], "", 0, []), 16)


@pytest.mark.parametrize("order", ["window first", "full attention first"])
def test_a_window_is_hit_at_its_end_alone(order: str) -> None:
    blocks = two_groups(order=order)
    assert hit(blocks, 90) == 80
    assert hit(blocks, 70) == 0


def test_removing_a_block_of_the_window_leaves_full_attention() -> None:
    blocks = two_groups(order="window first")
    blocks.apply(POD, BlocksRemoved(block_hashes=(5,), group=1))
    assert hit(blocks, 90) == 0
    blocks.apply(POD, BlocksStored(block_hashes=(5,), group=1, layers=WINDOW))
    assert hit(blocks, 90) == 80


def test_a_window_counts_while_full_attention_has_the_block() -> None:
    blocks = two_groups(order="window first")
    blocks.apply(POD, BlocksRemoved(block_hashes=(5,), group=0))
    assert hit(blocks, 90) == 0
    tail = BlocksStored(block_hashes=(5,), parent_hash=4, tokens=token_array(PROMPT[64:]), block_size_tokens=16)
    blocks.apply(POD, tail)
    assert hit(blocks, 90) == 80


def test_groups_of_one_type_must_all_hold_a_block() -> None:
    blocks = two_groups(order="window first")
    blocks.apply(POD, BlocksStored(block_hashes=(4,), group=2, layers=WINDOW))
    assert hit(blocks, 90) == 0
    blocks.apply(POD, BlocksStored(block_hashes=(5,), group=2, layers=WINDOW))
    assert hit(blocks, 90) == 80


def test_a_block_that_was_stored_twice_is_gone_after_two_removals() -> None:
    blocks = two_groups(order="window first")
    blocks.apply(POD, BlocksStored(block_hashes=(5,), group=1, layers=WINDOW))
    blocks.apply(POD, BlocksRemoved(block_hashes=(5,), group=1))
    assert hit(blocks, 90) == 80
    blocks.apply(POD, BlocksRemoved(block_hashes=(5,), group=1))
    assert hit(blocks, 90) == 0


@pytest.mark.parametrize(("block_tokens", "window"), [(8, 33), (24, 33), (16, -5), (16, 1 << 40), (1 << 40, 7)])
def test_odd_sizes_of_a_window_break_nothing(block_tokens: int, window: int) -> None:
    """They come from a pod: a window whose blocks are no multiple of the router's is ignored."""
    blocks = two_groups(order="window first")
    odd = LayerType(AttentionKind.WINDOW, block_tokens, window)
    blocks.apply(POD, BlocksStored(block_hashes=(4, 5), group=2, layers=odd))
    assert hit(blocks, 90) in (0, 80)


def test_an_event_of_a_part_of_a_block_does_not_change_the_rule() -> None:
    """Engines with unequal blocks announce the part that a prompt ends in: hits still end after whole blocks."""
    blocks = BlockMap()
    blocks.add_holder(POD, Generation(model="m"))
    for event in (
        BlocksStored(block_hashes=(1, 2, 3, 4), group=1, layers=LayerType(AttentionKind.WINDOW, 16, 17)),
        BlocksStored(block_hashes=(2, 4), tokens=token_array(PROMPT[:64]), block_size_tokens=32),
        BlocksStored(block_hashes=(5,), parent_hash=4, tokens=token_array(PROMPT[64:80]), block_size_tokens=16),
        BlocksStored(block_hashes=(5,), group=1, layers=LayerType(AttentionKind.WINDOW, 16, 17)),
    ):
        blocks.apply(POD, event)
    assert hit(blocks, 90) == 64


def test_a_block_of_a_window_that_full_attention_does_not_name_is_noticed_when_it_is_evicted() -> None:
    """Full attention has blocks of 32 tokens, the window of 16: of its blocks every second one is named."""
    blocks = BlockMap()
    blocks.add_holder(POD, Generation(model="m"))
    blocks.apply(POD, BlocksStored(block_hashes=(3, 4), group=1, layers=WINDOW))
    blocks.apply(POD, BlocksStored(block_hashes=(2, 4), tokens=token_array(PROMPT[:64]), block_size_tokens=32))
    assert hit(blocks, 90) == 64
    blocks.apply(POD, BlocksRemoved(block_hashes=(3,), group=1))
    assert hit(blocks, 90) == 0


def test_a_drafter_finds_the_block_of_a_window_behind_the_last_one_of_full_attention() -> None:
    """Recorded: a prompt of 97 tokens and one that continues it went through the cache manager of vLLM 0.32, with a
    window of 128 tokens in blocks of 16, full attention in blocks of 32, and a drafter that drops a block."""
    blocks = BlockMap()
    blocks.add_holder(POD, Generation(model="m"))
    blocks.learn(POD, CacheHabits(drops_block=True))
    for request in json.loads((Path(__file__).parent / "unequal_blocks.json").read_text()):
        assert expected_hit(blocks, Sent(request["prompt"], "", 0, []), 16) == request["cached_tokens"]
        for batch in request["batches"]:
            for event in decode_batch(bytes.fromhex(batch)):
                blocks.apply(POD, event)


DRAFTERS = json.loads((Path(__file__).parent / "drafters.json").read_text())
"""By layers and drafter, requests that vLLM 0.32 decided (tests/live/manager_histories.py)."""


def expected_with_drafter(sent: Sequence[dict[str, Any]], drafter_layer: int = -1) -> list[int]:
    blocks, found = BlockMap(), list[int]()
    blocks.add_holder(POD, Generation(model="m"))
    blocks.learn(POD, CacheHabits(drops_block=True, drafter_layer=drafter_layer))
    for request in sent:
        found.append(expected_hit(blocks, Sent(request["prompt"], "", 0, []), 16))
        for batch in request["batches"]:
            for event in decode_batch(bytes.fromhex(batch)):
                blocks.apply(POD, event)
    return found


def hits_with_drafter(family: str) -> list[int]:
    return [request["cached_tokens"] for request in DRAFTERS[family]]


@pytest.mark.parametrize("family", sorted(DRAFTERS.keys() - {"windows and full, MTP"}))
def test_a_drafter_computes_the_last_block_of_a_hit_again(family: str) -> None:
    assert expected_with_drafter(DRAFTERS[family]) == hits_with_drafter(family)


@pytest.mark.parametrize("layers", ["full", "states and full"])
def test_mtp_hits_what_eagle_hits(layers: str) -> None:
    """The manager treats them equally where the only attention is full."""
    assert hits_with_drafter(f"{layers}, MTP") == hits_with_drafter(f"{layers}, EAGLE")


@pytest.mark.parametrize(("layers", "drafter_layer"), [("full and windows", 1), ("windows and full", 0)])
def test_only_the_layers_that_have_those_of_mtp_need_one_block_more(layers: str, drafter_layer: int) -> None:
    family = f"{layers}, MTP"
    assert expected_with_drafter(DRAFTERS[family], drafter_layer) == hits_with_drafter(family)
    assert sum(hits_with_drafter(family)) > 600


def test_a_pod_says_what_decides_its_hits() -> None:
    blocks = two_groups(order="window first")
    blocks.add_holder("dense", Generation(model="m"))
    assert [blocks.cache_of(pod).hits for pod in (POD, "dense", "unknown")] == [
        "full + window 33, by events",
        "full, by events",
        "",
    ]


def test_a_pod_has_few_types_of_layers() -> None:
    """Each type takes memory for all blocks of all pods, and time of every prompt."""
    blocks = two_groups(order="window first")
    for number in range(2, 60):
        odd = LayerType(AttentionKind.WINDOW, 16, 33 + number)
        blocks.apply(POD, BlocksStored(block_hashes=(4, 5), group=number, layers=odd))
    assert blocks.cache_of(POD).hits == "full + window 33 + window 35 + window 36, by events"


def test_a_prompt_without_tokens_hits_nothing() -> None:
    prefix = PromptPrefix(
        Generation(model="m"), (), hash_blocks(token_array(PROMPT), 16, generation_seed(Generation(model="m")))
    )
    assert two_groups(order="window first").match(prefix) == {}


def test_blocks_of_windows_count_as_blocks_of_the_pod() -> None:
    """Also those that full attention never has: what a pod may announce is bounded."""
    blocks = two_groups(order="window first")
    blocks.apply(POD, BlocksStored(block_hashes=tuple(range(100, 200)), group=1, layers=WINDOW))
    assert blocks.cache_of(POD).size_blocks == 5 + 2 + 100


def test_other_holders_of_the_same_block_keep_their_own_rule() -> None:
    blocks = two_groups(order="window first")
    blocks.add_holder("dense", Generation(model="m"))
    blocks.apply("dense", BlocksStored(block_hashes=(1, 2, 3), tokens=token_array(PROMPT[:48]), block_size_tokens=16))
    generation, tokens = Generation(model="m"), token_array(PROMPT)
    hashes = hash_blocks(tokens, 16, generation_seed(generation))
    assert blocks.match(PromptPrefix(generation, tokens, hashes)) == {"dense": (3, 0, 0, 0)}


# --- windows alone: no event says which blocks were kept ---


@needs_sessions
def test_hits_of_a_model_of_windows_alone_are_at_most_what_was_sent() -> None:
    """A prompt that is sent again or continued hits as expected; one that shares a beginning hits less."""
    session = next(each for each in SESSIONS if "no full" in each["name"])
    store, found = LocalStore(), list[tuple[int, int]]()
    store.add_holder(make_pod(POD), Generation(model="m", block_size_tokens=32))
    earlier = LayerType(AttentionKind.WINDOW, 32, 128)
    store.apply(POD, [BlocksStored(block_hashes=(1,), group=0, layers=earlier)])
    for number, request in enumerate(requests(session)):
        generation, tokens = Generation(model="m", block_size_tokens=32), token_array(request.prompt)
        prefix = PromptPrefix(generation, tokens, hash_blocks(tokens, 32, generation_seed(generation)))
        found.append((32 * store.match(prefix, float(number)).held_blocks(POD), request.cached_tokens))
        sent = store.predict(POD, prefix, ttl_s=1200.0, capacity_blocks=10_000)
        for batch in request.batches:
            store.apply(POD, decode_batch(batch))
        store.confirm(sent, number + 0.5)
    assert all(expected >= hit for expected, hit in found)
    assert store.cache_of(POD).hits == "window 128, upper bound"


def test_events_of_a_connector_belong_to_the_group_that_they_name() -> None:
    """They have neither kind nor window. A window on another tier does not make full attention of it."""
    blocks = two_groups(order="window first")
    for group in (0, 1):
        blocks.apply(POD, BlocksStored(block_hashes=(4, 5), tier=Tier.CPU, group=group))
    for group in (1, 0):
        blocks.apply(POD, BlocksRemoved(block_hashes=(4, 5), group=group))
    assert hit(blocks, 90) == 80
    blocks.apply(POD, BlocksRemoved(block_hashes=(5,), tier=Tier.CPU, group=1))
    assert hit(blocks, 90) == 0
