"""Chats with pictures of a known family are read to their end, as the engine reads them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from router.engines.engine_catalog import ENGINES
from router.hashing import generation_seed, hash_blocks, token_array
from router.prompt.fingerprint import Fingerprinter
from router.prompt.media import MAX_KEYS, TOKENS
from router.prompt.pictures.picture_reader import PLACEHOLDER, PictureIdentities, PictureReader, PictureSizes
from router.prompt.pictures.vllm_identifier import identify
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.types import BlocksStored, Endpoint, Generation, InferenceRequest, PromptPrefix
from tests.index.decoding import decode_batch
from tests.prompt.conftest import ZOO

BLOCK = 4
TEMPLATE = (Path(__file__).parents[2] / "live" / "qwen2_vl.jinja").read_text("utf-8")
MARKS = (PLACEHOLDER, "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>")
IDENTITIES = PictureIdentities(identify, "./weights")
Make = Callable[..., InferenceRequest]


def data_url(colour: int, width: int = 84, height: int = 56) -> str:
    file = BytesIO()
    Image.new("RGB", (width, height), (colour, 0, 0)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def picture(colour: int = 0, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(colour)}, **fields}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


LINK = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = Backend.from_str(ZOO["byte level, NFC"]().to_str())
    backend.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    return Tokenizer(backend, "f", {}, None)


@cache
def template_of(tokenizer: Tokenizer, **options: Any) -> ChatTemplate:
    pictures = PictureReader(PictureSizes(28, 3136, 12845056), tokenizer.encode(PLACEHOLDER)[0], **options)
    return ChatTemplate(tokenizer, TEMPLATE, pictures=pictures)


def reading(tokenizer: Tokenizer, **options: Any) -> Fingerprinter:
    """A reader without cached prompts."""
    template = template_of(tokenizer, **options)
    return Fingerprinter(tokenizer, template, Generation(model="m", block_size_tokens=BLOCK))


def read(fingerprinter: Fingerprinter, request: InferenceRequest) -> PromptPrefix:
    rendered = fingerprinter.render(fingerprinter.open(request, None, IDENTITIES))
    return fingerprinter.finish(fingerprinter.look_up(rendered))


def chat(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "one two three four five"}, {"role": "user", "content": list(content)}]


def as_announced(fingerprinter: Fingerprinter, prefix: PromptPrefix, identifiers: list[str]) -> list[int]:
    """The hashes that the index makes of an engine's event with all full blocks of the prompt."""
    placed = [(one.end_token - one.token_count, one.end_token) for one in prefix.pictures if one.end_token]
    blocks = len(prefix.tokens) // BLOCK
    keys = [
        [
            [name, start - block * BLOCK]
            for name, (start, end) in zip(identifiers, placed, strict=True)
            if start < (block + 1) * BLOCK and end > block * BLOCK
        ]
        for block in range(blocks)
    ]
    event = {
        "type": "BlockStored",
        "block_hashes": list(range(blocks)),
        "token_ids": list(prefix.tokens)[: blocks * BLOCK],
        "block_size": BLOCK,
        "extra_keys": [one or None for one in keys],
    }
    batch = decode_batch(msgspec.msgpack.encode({"ts": 0.0, "events": [event]}))
    (stored,) = batch
    assert isinstance(stored, BlocksStored)
    return list(hash_blocks(token_array(stored.tokens), BLOCK, generation_seed(fingerprinter.generation)))


CONTENTS = st.lists(
    st.one_of(st.sampled_from(["a", "word word", " \n", "é"]).map(text), st.integers(0, 3).map(picture)),
    min_size=1,
    max_size=6,
)


@given(content=CONTENTS)
def test_the_hashes_are_those_of_the_engines_events(tokenizer: Tokenizer, make_request: Make, content: Any) -> None:
    """To the last full block, wherever the pictures begin and end; again from the caches."""
    fingerprinter = reading(tokenizer)
    request = make_request(messages=chat(*content))
    urls = [part["image_url"]["url"] for part in content if "image_url" in part]
    identifiers = [found[0] for url in urls if (found := identify(url.partition(",")[2], "./weights"))]
    for _ in range(2):
        prefix = read(fingerprinter, request)
        assert list(prefix.hashes) == as_announced(fingerprinter, prefix, identifiers)
        assert (prefix.media_tokens, len(prefix.hashes)) == (0, len(prefix.tokens) // BLOCK)
        pad = tokenizer.encode(PLACEHOLDER)[0]
        assert list(prefix.tokens).count(pad) == 6 * len(identifiers) == sum(one.token_count for one in prefix.pictures)
        for one in prefix.pictures:
            assert set(prefix.tokens[(one.end_token or 0) - 6 : one.end_token]) == {pad}


@given(before=CONTENTS, after=CONTENTS)
def test_different_pictures_share_only_the_blocks_in_front(
    tokenizer: Tokenizer, make_request: Make, before: Any, after: Any
) -> None:
    """Although all their tokens are equal."""
    fingerprinter = reading(tokenizer)
    one = read(fingerprinter, make_request(messages=chat(*before, picture(7), *after)))
    other = read(fingerprinter, make_request(messages=chat(*before, picture(8), *after)))
    assert one.tokens == other.tokens
    pictures = [a.key == b.key for a, b in zip(one.pictures, other.pictures, strict=True)]
    first = one.pictures[pictures.index(False)]
    in_front = ((first.end_token or 0) - first.token_count) // BLOCK
    assert one.hashes[:in_front] == other.hashes[:in_front]
    assert not set(one.hashes[in_front:]) & set(other.hashes[in_front:])


@pytest.mark.parametrize(
    "unknown",
    [
        LINK,
        {"type": "text", "text": "a", "image_url": {"url": data_url(1)}, "uuid": "mine"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": data_url(1).replace(";base64", "")}},
        {"type": "image_url", "image_url": {"url": data_url(1, 2001, 10)}},
        {"type": "image_url", "image_url": {"url": None}},
        {"type": "image_url", "image_url": 7},
        {"type": "video_url", "video_url": {"url": data_url(1)}},
        {"type": "input_audio", "input_audio": {"data": "AAAA"}},
    ],
)
def test_the_exact_prompt_ends_at_the_first_unknown_picture(
    tokenizer: Tokenizer, make_request: Make, unknown: Any
) -> None:
    """Nothing is fetched. Known pictures in front of it are exact, and those behind it are estimated."""
    fingerprinter = reading(tokenizer)
    content = [text("Look: "), picture(3), text("and")]
    front = read(fingerprinter, make_request(messages=chat(*content)))
    prefix = read(fingerprinter, make_request(messages=chat(*content, unknown, picture(4))))
    assert prefix.media_tokens == 2 * TOKENS
    assert prefix.pictures[0] == front.pictures[0]
    assert len(front.hashes) - 3 <= len(prefix.hashes) < len(prefix.tokens) // BLOCK
    assert prefix.hashes[:-1] == front.hashes[: len(prefix.hashes) - 1]
    assert len(prefix.hashes) * BLOCK > (front.pictures[0].end_token or 0)


def test_a_uuid_identifies_a_picture_if_clients_are_trusted(tokenizer: Tokenizer, make_request: Make) -> None:
    """As in the engine: the picture itself then makes no difference."""
    fingerprinter = reading(tokenizer, trusts_uuids=True)
    first, same, other = (
        read(fingerprinter, make_request(messages=chat(picture(colour, uuid=uuid))))
        for colour, uuid in ((1, "a"), (2, "a"), (1, "b"))
    )
    assert list(first.hashes) == as_announced(fingerprinter, first, ["a"]) == list(same.hashes)
    assert first.hashes[-1] != other.hashes[-1]


def test_other_clients_uuids_make_no_difference(tokenizer: Tokenizer, make_request: Make) -> None:
    """Pods do not receive them."""
    fingerprinter = reading(tokenizer)
    named, plain = (
        read(fingerprinter, make_request(messages=chat(part))) for part in (picture(1, uuid="a"), picture(1))
    )
    assert (named.hashes, named.media_tokens) == (plain.hashes, 0)


def test_a_clients_placeholder_ends_the_exact_prompt(tokenizer: Tokenizer, make_request: Make) -> None:
    """The engine takes the first one for the picture's."""
    fingerprinter = reading(tokenizer)
    prefix = read(fingerprinter, make_request(messages=chat(text("a" + PLACEHOLDER), picture(1), picture(2))))
    assert prefix.media_tokens == 2 * TOKENS
    pad = tokenizer.encode(PLACEHOLDER)[0]
    assert len(prefix.hashes) == list(prefix.tokens).index(pad) // BLOCK


@pytest.mark.parametrize("options", [{"mm_processor_kwargs": {"max_pixels": 9}}, {"media_io_kwargs": {"image": {}}}])
def test_options_for_pictures_leave_them_to_the_engine(tokenizer: Tokenizer, make_request: Make, options: Any) -> None:
    fingerprinter = reading(tokenizer)
    prefix = read(fingerprinter, make_request(messages=chat(text("one"), picture(1)), **options))
    assert prefix.media_tokens == TOKENS
    assert read(fingerprinter, make_request(messages=chat(text("one"), picture(1)))).media_tokens == 0


def test_messages_of_anthropic_have_the_same_prefix(tokenizer: Tokenizer, make_request: Make) -> None:
    fingerprinter = reading(tokenizer)
    source = {"type": "base64", "media_type": "image/png", "data": data_url(5).partition(",")[2]}
    body = make_request(
        Endpoint.MESSAGES, messages=[{"role": "user", "content": [{"type": "image", "source": source}, text("Hi")]}]
    )
    opened = fingerprinter.open(body, ENGINES["vllm"].conversions[Endpoint.MESSAGES], IDENTITIES)
    found = fingerprinter.finish(fingerprinter.look_up(fingerprinter.render(opened)))
    same = make_request(messages=[{"role": "user", "content": [picture(5), text("Hi")]}])
    assert found == read(fingerprinter, same)
    assert found.media_tokens == 0


def test_a_prompt_of_many_huge_pictures_is_bounded(tokenizer: Tokenizer, make_request: Make) -> None:
    """A header alone declares any size: pictures beyond the longest context are estimated."""
    head = bytearray(base64.b64decode(data_url(0).partition(",")[2])[:33])
    head[16:24] = (16_000).to_bytes(4, "big") * 2
    huge = {"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(head).decode()}}
    prefix = read(reading(tokenizer), make_request(messages=chat(*[huge] * 100)))
    assert 64 * 16_384 == 1 << 20 < len(prefix.tokens) < 1 << 21
    assert prefix.media_tokens == (100 - 64) * TOKENS
    assert len(prefix.pictures) == MAX_KEYS
