"""Compares the block map with the cache of a real vLLM.

The recording (`tests/live/record_goldens.py`) has the requests of a vLLM with a small cache, their cached tokens, and
every event message in between. Before each request, the map must have the same number of cached tokens.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.feeds.kv_zmq import StreamPosition, Verdict
from router.hashing import generation_seed, hash_blocks, token_array
from router.index.blockmap import BlockMap
from router.index.events import parse_frames
from router.types import BlocksCleared, BlocksRemoved, BlocksStored, Generation, KvEvent, PodId, PromptPrefix, Tier
from tests.index.decoding import decode_batch

RECORDING = Path(__file__).parent / "goldens" / "vllm_events.jsonl"
LINES: list[dict[str, Any]] = [json.loads(line) for line in RECORDING.read_text("utf-8").splitlines()]
ENGINE_BLOCK_TOKENS = 32
POD = PodId("vllm")
NOTHING = (0, 0, 0, 0)

Message = list[bytes]


def frames(line: dict[str, Any]) -> Message:
    return [base64.b64decode(frame) for frame in line["frames"]]


def messages(kind: str) -> list[Message]:
    """Live ("event") or replayed messages, as received."""
    return [frames(line) for line in LINES if line["kind"] == kind]


def decoded(stream: Iterable[Message]) -> Iterator[KvEvent]:
    """Their events in order, up to the end of a replay; sequence numbers must be consecutive."""
    sequence = StreamPosition()
    for message in stream:
        parsed = parse_frames(message)
        if parsed is None:
            return
        number, payload = parsed
        assert sequence.observe(number) is Verdict.APPLY
        yield from decode_batch(payload)


def prefix_of(line: dict[str, Any], generation: Generation) -> PromptPrefix:
    """The request's prompt with the engine's tokens."""
    own = replace(generation, salt=line["body"].get("cache_salt", ""))
    tokens = token_array(line["token_ids"])
    return PromptPrefix(own, tokens, hash_blocks(tokens, own.block_size_tokens, generation_seed(own)))


def cached_tokens(blocks: BlockMap, prefix: PromptPrefix) -> int:
    """Cached tokens of the engine for a match: whole blocks of its own, and at least one token is computed."""
    matched = blocks.match(prefix).get(POD, NOTHING)[Tier.GPU]
    known = min(matched * prefix.generation.block_size_tokens, len(prefix.tokens) - 1)
    return known // ENGINE_BLOCK_TOKENS * ENGINE_BLOCK_TOKENS


@pytest.fixture(params=[8, 16, 32], ids="{}-token blocks".format)
def generation(request: pytest.FixtureRequest) -> Generation:
    """The router's block size, which divides the engine's."""
    return Generation(model="tiny", block_size_tokens=request.param)


@pytest.fixture
def blocks(generation: Generation) -> BlockMap:
    """A map with the engine's first epoch."""
    blocks = BlockMap()
    blocks.add_holder(POD, generation)
    return blocks


def test_every_request_finds_as_many_tokens_as_the_map_has(blocks: BlockMap, generation: Generation) -> None:
    """Through growing chats, repeats, salts, evictions and resets; asked before the request's own events. A cache that
    was reset says so in the next request's message only, which is when the engine looked, too."""
    was_reset = False
    for line in LINES:
        if line["kind"] == "event":
            for event in decode_batch(frames(line)[-1]):
                blocks.apply(POD, event)
        elif line["kind"] == "request":
            expected = 0 if was_reset else cached_tokens(blocks, prefix_of(line, generation))
            assert line["cached_tokens"] == expected, line["body"]
        was_reset = line["kind"] == "reset"
    assert blocks.cache_of(POD).blocks.orphans == 0
    assert blocks.cache_of(POD).blocks.rejected_reason == ""


def test_a_replay_leads_to_the_same_map(generation: Generation) -> None:
    """Equal maps by size and by every recorded prompt."""
    maps = {}
    for kind in ("event", "replay"):
        maps[kind] = BlockMap()
        maps[kind].add_holder(POD, generation)
        for event in decoded(messages(kind)):
            maps[kind].apply(POD, event)
    assert maps["event"].block_holders == maps["replay"].block_holders > 0
    for line in LINES:
        if line["kind"] == "request":
            prefix = prefix_of(line, generation)
            assert maps["event"].match(prefix) == maps["replay"].match(prefix)


def test_a_replay_ends_with_its_terminator() -> None:
    """Only the last message is not a batch; before it comes every live message, with one more frame."""
    replayed = messages("replay")
    assert [parse_frames(message) is None for message in replayed] == [False] * (len(replayed) - 1) + [True]
    assert [message[-2:] for message in replayed[:-1]] == [message[-2:] for message in messages("event")]


def test_the_map_holds_what_the_engine_holds() -> None:
    """After every event, as many blocks as a plain count of the engine's own hashes. (Blocks smaller than the
    engine's may be fewer: two of its blocks can begin alike.)"""
    blocks = BlockMap()
    blocks.add_holder(POD, Generation(model="tiny", block_size_tokens=ENGINE_BLOCK_TOKENS))
    copies: Counter[int] = Counter()
    for event in decoded(messages("event")):
        blocks.apply(POD, event)
        if isinstance(event, BlocksStored):
            copies.update(event.block_hashes)
        elif isinstance(event, BlocksRemoved):
            copies.subtract(event.block_hashes)
        else:
            copies.clear()
        assert blocks.block_holders == sum(count > 0 for count in copies.values())


def test_the_recording_covers_all_cases() -> None:
    """Hits, misses, a salt, an eviction, a second copy of a stored block, and a reset."""
    events = list(decoded(messages("event")))
    requests = [line for line in LINES if line["kind"] == "request"]
    hits = {line["cached_tokens"] > 0 for line in requests}
    assert hits == {True, False}
    assert any("cache_salt" in line["body"] for line in requests)
    assert {type(event) for event in events} == {BlocksStored, BlocksRemoved, BlocksCleared}
    assert stored_twice(events)


def stored_twice(events: Iterable[KvEvent]) -> bool:
    held: set[int] = set()
    for event in events:
        if isinstance(event, BlocksStored):
            if held.intersection(event.block_hashes):
                return True
            held.update(event.block_hashes)
        elif isinstance(event, BlocksRemoved):
            held.difference_update(event.block_hashes)
        else:
            held.clear()
    return False
