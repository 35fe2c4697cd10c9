"""Request bodies of the load generator."""

from __future__ import annotations

import struct

import msgspec
import pytest

from loadtest.bench.bodies import MARKER, PREFIXES, SourceText, fresh_chats, pack, warm_chats
from loadtest.commands.mock_engine_command import mock_tokenizer
from router.prompt.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tokenizer of the measured router."""
    return mock_tokenizer()


def test_only_the_last_message_of_a_warm_chat_is_new(tokenizer: Tokenizer) -> None:
    """Its marker, which the generator replaces, is in the last message; what precedes it repeats."""
    chats = list(warm_chats(SourceText(tokenizer), 1000, 2 * PREFIXES))
    assert all(MARKER in chat[-1]["content"] for chat in chats)
    assert len({str(chat[:-1]) for chat in chats}) == PREFIXES


def test_a_fresh_chat_begins_with_the_marker(tokenizer: Tokenizer) -> None:
    """Not even its first block was ever seen."""
    assert all(chat[0]["content"].startswith(MARKER) for chat in fresh_chats(SourceText(tokenizer), 1000, 4))


def test_chats_have_about_the_requested_number_of_tokens(tokenizer: Tokenizer) -> None:
    """On average, because text varies."""
    for kind in (fresh_chats, warm_chats):
        chats = list(kind(SourceText(tokenizer), 2000, PREFIXES))
        tokens = sum(len(tokenizer.encode(message["content"])) for chat in chats for message in chat)
        assert 0.8 < tokens / len(chats) / 2000 < 1.2


def test_each_body_in_the_file_follows_its_length(tokenizer: Tokenizer) -> None:
    """The generator's format."""
    chat = [{"role": "user", "content": "é"}]
    file = pack([chat, chat], stream=True)
    (length,) = struct.unpack_from("<I", file)
    body = msgspec.json.decode(file[4 : 4 + length])
    assert (body["messages"], body["stream"], len(file)) == (chat, True, 2 * (4 + length))
