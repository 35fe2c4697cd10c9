"""The KV events of the C mocks."""

from __future__ import annotations

from random import Random

from loadtest.bench.bodies import PREFIXES, SourceText, pack, warm_chats
from loadtest.bench.mock_events import (
    BLOCK_TOKENS,
    TURN_BLOCKS,
    PodBlocks,
    conversations,
    unpack_bodies,
)
from loadtest.commands.mock_engine_command import mock_tokenizer
from router.types import BlocksStored

HELD = [BlocksStored(block_hashes=(1, 2), tokens=tuple(range(32)), block_size_tokens=BLOCK_TOKENS)]


def test_each_conversation_is_announced_without_its_last_message() -> None:
    chats = warm_chats(SourceText(mock_tokenizer()), 600, 2 * PREFIXES)
    found = conversations(list(unpack_bodies(pack(chats, stream=False))), "salt")
    assert len(found) == PREFIXES
    assert all(200 < len(one.tokens) < 800 for one in found)
    assert all(len(one.tokens) == BLOCK_TOKENS * len(one.block_hashes) and one.salt == "salt" for one in found)
    names = [name for one in found for name in one.block_hashes]
    assert len(names) == len(set(names))


def test_each_request_stores_a_turn_after_a_conversation() -> None:
    pod = PodBlocks(HELD, Random(1), answered=10)
    assert pod.step(10) == []
    first, second = pod.step(12)
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert first.parent_hash == second.parent_hash == 2
    assert not set(first.block_hashes) & set(second.block_hashes)
    assert len(first.tokens) == TURN_BLOCKS * BLOCK_TOKENS
