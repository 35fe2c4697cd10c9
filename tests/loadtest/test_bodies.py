"""Bodies whose only purpose is to be dear or cheap to route."""

from __future__ import annotations

import struct

import msgspec
import pytest

from loadtest.bodies import MARKER, PREFIXES, Prose, fresh_chats, packed, warm_chats
from router.cli.mock_engine_command import TOKENIZER
from router.prompt.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The one that the bench routes with."""
    return load_tokenizer(TOKENIZER)


def test_a_warm_chat_is_new_in_its_last_message_alone(tokenizer: Tokenizer) -> None:
    """The marker, which the generator replaces, stands there; what is before it comes again and again."""
    chats = list(warm_chats(Prose(tokenizer), 1000, 2 * PREFIXES))
    assert all(MARKER in chat[-1]["content"] for chat in chats)
    assert len({str(chat[:-1]) for chat in chats}) == PREFIXES


def test_a_fresh_chat_begins_with_the_marker(tokenizer: Tokenizer) -> None:
    """So that not even its first block was ever seen."""
    assert all(chat[0]["content"].startswith(MARKER) for chat in fresh_chats(Prose(tokenizer), 1000, 4))


def test_chats_have_about_the_tokens_that_were_asked_for(tokenizer: Tokenizer) -> None:
    """On average; text differs."""
    for kind in (fresh_chats, warm_chats):
        chats = list(kind(Prose(tokenizer), 2000, PREFIXES))
        tokens = sum(len(tokenizer.encode(message["content"])) for chat in chats for message in chat)
        assert 0.8 < tokens / len(chats) / 2000 < 1.2


def test_the_file_has_each_bodys_length_before_it(tokenizer: Tokenizer) -> None:
    """As the generator reads it."""
    chat = [{"role": "user", "content": "é"}]
    file = packed([chat, chat], stream=True)
    (length,) = struct.unpack_from("<I", file)
    body = msgspec.json.decode(file[4 : 4 + length])
    assert (body["messages"], body["stream"], len(file)) == (chat, True, 2 * (4 + length))
