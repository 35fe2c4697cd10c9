"""From a request to tokens and block hashes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.errors import MalformedRequest
from router.hashing import generation_seed, hash_blocks, token_array
from router.prompt.conversation import Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.types import Endpoint, Generation, InferenceRequest, PromptPrefix

BLOCK = 16
MODEL = Generation(model="m", revision="r", block_size_tokens=BLOCK)
Make = Callable[..., InferenceRequest]


@pytest.fixture(scope="module")
def fingerprinter(deepseek: Tokenizer, template: ChatTemplate) -> Fingerprinter:
    return Fingerprinter(deepseek, template, MODEL)


def dialogue(turns: int, words: int = 60, topic: str = "x") -> list[dict[str, str]]:
    """A system message and `turns` turns."""
    roles = ["system"] + ["user", "assistant"] * turns
    return [{"role": role, "content": f"{topic} {i} " + "word " * words} for i, role in enumerate(roles[: turns + 1])]


def expected(prefix: PromptPrefix, tokens: Any) -> PromptPrefix:
    """The same prompt, hashed at once."""
    flat = token_array(tokens)
    return PromptPrefix(prefix.generation, flat, hash_blocks(flat, BLOCK, generation_seed(prefix.generation)))


def test_a_chat_becomes_the_tokens_of_its_rendering_and_their_hashes(
    fingerprinter: Fingerprinter, template: ChatTemplate, deepseek: Tokenizer, make_request: Make
) -> None:
    """Fresh and from the cache."""
    request = make_request(messages=dialogue(6))
    tokens = deepseek.encode(template.render(request.prompt))
    first, second = fingerprinter.fingerprint(request), fingerprinter.fingerprint(request)
    assert first == second == expected(first, tokens)
    assert first.generation == replace(MODEL, tokenizer=deepseek.fingerprint)
    assert len(first.hashes) == len(tokens) // BLOCK > 20


MESSAGES = st.lists(
    st.tuples(st.sampled_from(["one", "two"]), st.integers(0, 90), st.sampled_from(["", "<｜User｜>", "é\n\n"])).map(
        lambda drawn: {"role": "user", "content": drawn[0] * drawn[1] + drawn[2]}
    ),
    min_size=1,
    max_size=6,
)


_CROWDED: list[Fingerprinter] = []


@given(chats=st.lists(st.tuples(MESSAGES, st.sampled_from(["", "a", "b"])), min_size=1, max_size=5))
def test_hashes_from_the_cache_are_those_of_the_whole(
    deepseek: Tokenizer,
    template: ChatTemplate,
    make_request: Make,
    chats: list[tuple[list[dict[str, str]], str]],
) -> None:
    """After other prompts: shared starts, other adapters, tokens that end within a block."""
    if not _CROWDED:
        _CROWDED.append(Fingerprinter(deepseek, template, MODEL, cache_bytes=8_000))
    fingerprinter = _CROWDED[0]
    for messages, adapter in chats:
        for end in range(1, len(messages) + 1):
            prefix = fingerprinter.fingerprint(make_request(messages=messages[:end], adapter=adapter))
            text = template.render({"messages": messages[:end]})
            assert prefix == expected(prefix, deepseek.encode(text))


def test_a_longer_chat_begins_with_the_hashes_of_the_shorter(fingerprinter: Fingerprinter, make_request: Make) -> None:
    messages = dialogue(9)
    short = fingerprinter.fingerprint(make_request(messages=messages[:6], add_generation_prompt=False))
    long = fingerprinter.fingerprint(make_request(messages=messages))
    assert list(long.hashes[: len(short.hashes)]) == list(short.hashes)
    other = fingerprinter.fingerprint(make_request(messages=dialogue(9, topic="y")))
    assert not set(other.hashes) & set(long.hashes)


def test_only_the_new_end_of_a_conversation_is_cold(
    deepseek: Tokenizer, template: ChatTemplate, make_request: Make
) -> None:
    """A pending prompt has the number of characters to encode, and the whole text."""
    fingerprinter = Fingerprinter(deepseek, template, MODEL, incremental=False)
    messages = dialogue(20, words=100)
    cold = []
    for end in range(1, len(messages)):
        request = make_request(messages=messages[:end])
        pending = fingerprinter.begin(request)
        cold.append(pending.cold_characters)
        fingerprinter.finish(pending)
        assert fingerprinter.begin(request).cold_characters == 0
    assert max(cold) < 2 * 600
    assert pending.cold[-1].endswith("<｜Assistant｜>")


def test_adapters_and_salts_share_no_hash_and_the_same_tokens(fingerprinter: Fingerprinter, make_request: Make) -> None:
    """Their generations differ."""
    prefixes = [
        fingerprinter.fingerprint(make_request(messages=dialogue(6), adapter=adapter, salt=salt))
        for adapter, salt in [("", ""), ("lora", ""), ("", "tenant"), ("", "")]
    ]
    plain, lora, salted, again = prefixes
    assert plain == again
    assert plain.tokens == lora.tokens == salted.tokens
    assert len({prefix.hashes[0] for prefix in prefixes}) == 3
    assert (lora.generation.adapter, salted.generation.salt) == ("lora", "tenant")


@pytest.mark.parametrize("salt", ["other", ""])
def test_what_is_cold_does_not_depend_on_what_another_salt_has_sent(
    deepseek: Tokenizer, template: ChatTemplate, make_request: Make, salt: str
) -> None:
    """A chat that another tenant has sent twice is as cold as one that nobody has sent; in a group it is known."""
    fingerprinter = Fingerprinter(deepseek, template, MODEL)
    for _ in range(3):
        fingerprinter.fingerprint(make_request(messages=dialogue(6), salt="one"))
    sent, never, shared = (
        fingerprinter.begin(make_request(messages=dialogue(6, topic=topic), salt=by)).cold_characters
        for topic, by in (("x", salt), ("y", salt), ("x", "one"))
    )
    assert sent == never > 10 * shared


def test_finishing_in_threads_changes_nothing(deepseek: Tokenizer, template: ChatTemplate, make_request: Make) -> None:
    """While the event loop begins other requests of the same conversations."""
    fingerprinter = Fingerprinter(deepseek, template, MODEL, cache_bytes=60_000)
    requests = [make_request(messages=dialogue(1 + i % 12, topic=f"t{i % 5}"), adapter=f"a{i % 2}") for i in range(400)]
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(fingerprinter.finish, fingerprinter.begin(request)) for request in requests]
        inline = [fingerprinter.fingerprint(request) for request in requests[::7]]
        prefixes = [future.result() for future in running]
    for request, prefix in zip(requests + requests[::7], prefixes + inline, strict=True):
        assert prefix == expected(prefix, deepseek.encode(template.render(request.prompt)))


def test_a_completion_is_framed_by_special_tokens_by_default(zoo: dict[str, Path], make_request: Make) -> None:
    tokenizer = load_tokenizer(TokenizerSource(str(zoo["word piece"])))
    fingerprinter = Fingerprinter(tokenizer, None, MODEL)
    text = "hello world " * 40
    bare = tokenizer.encode(text).tolist()
    for options, tokens in [({}, [1, *bare, 2]), ({"add_special_tokens": False}, bare)]:
        for _ in range(2):
            prefix = fingerprinter.fingerprint(make_request(Endpoint.COMPLETIONS, prompt=text, **options))
            assert prefix == expected(prefix, tokens)


def test_hashes_of_a_framed_text_are_shifted_by_its_frame(zoo: dict[str, Path], make_request: Make) -> None:
    """As the text grows, each block that a known segment carries is still right."""
    tokenizer = load_tokenizer(TokenizerSource(str(zoo["word piece"])))
    fingerprinter = Fingerprinter(tokenizer, None, MODEL)
    text = ""
    for number in range(12):
        text += f"[INST] {number} " + "hello world " * (12 + number)
        prefix = fingerprinter.fingerprint(make_request(Endpoint.COMPLETIONS, prompt=text))
        assert prefix == expected(prefix, tokenizer.encode(text, add_special_tokens=True))


def test_blocks_of_known_segments_are_not_hashed_again(
    deepseek: Tokenizer, template: ChatTemplate, make_request: Make
) -> None:
    """Zeros in place of their hashes show it."""
    fingerprinter = Fingerprinter(deepseek, template, MODEL, incremental=False)
    request = make_request(messages=dialogue(6))
    blocks = len(fingerprinter.fingerprint(request).hashes)
    fingerprinter.begin(request)
    for segment in fingerprinter.segments._segments.values():
        assert segment.sealed is not None
        segment.sealed = msgspec.structs.replace(segment.sealed, hashes=bytes(len(segment.sealed.hashes)))
    assert list(fingerprinter.fingerprint(request).hashes) == [0] * blocks


def test_a_chat_is_framed_only_on_request(deepseek: Tokenizer, zoo: dict[str, Path], make_request: Make) -> None:
    """The template already writes the special tokens."""
    tokenizer = load_tokenizer(TokenizerSource(str(zoo["unigram, metaspace first"])))
    fingerprinter = Fingerprinter(tokenizer, ChatTemplate(tokenizer, "{{ messages[0].content }}"), MODEL)
    messages = [{"role": "user", "content": "hello"}]
    bare = list(fingerprinter.fingerprint(make_request(messages=messages)).tokens)
    framed = list(fingerprinter.fingerprint(make_request(messages=messages, add_special_tokens=True)).tokens)
    assert framed == [1, *bare]


def test_token_ids_are_used_unchanged(fingerprinter: Fingerprinter, make_request: Make) -> None:
    """Nothing is encoded; of several prompts the first counts."""
    ids = list(range(40))
    for prompt in (ids, [ids], [ids, [1]]):
        pending = fingerprinter.begin(make_request(Endpoint.COMPLETIONS, prompt=prompt))
        assert pending.cold_characters == 0
        prefix = fingerprinter.finish(pending)
        assert prefix == expected(prefix, ids)
    first = fingerprinter.fingerprint(make_request(Endpoint.COMPLETIONS, prompt=["a", "b"]))
    assert first == fingerprinter.fingerprint(make_request(Endpoint.COMPLETIONS, prompt="a"))


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        [],
        [[]],
        {},
        1,
        True,
        [True],
        [1, True],
        [[1, False]],
        [1.0],
        [-1],
        [129_280],
        [2**70],
        [None],
        [{}],
        [1, "a"],
    ],
)
def test_an_invalid_prompt_is_malformed(fingerprinter: Fingerprinter, make_request: Make, prompt: Any) -> None:
    """Booleans and numbers outside of the vocabulary are not tokens."""
    with pytest.raises(MalformedRequest) as caught:
        fingerprinter.begin(make_request(Endpoint.COMPLETIONS, prompt=prompt))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
def test_a_flag_that_is_not_a_boolean_is_malformed(
    fingerprinter: Fingerprinter, make_request: Make, endpoint: Endpoint
) -> None:
    """The error names it."""
    body = {"messages": dialogue(1), "prompt": "a", "add_special_tokens": "yes"}
    with pytest.raises(MalformedRequest) as caught:
        fingerprinter.begin(make_request(endpoint, **body))
    assert caught.value.param == "add_special_tokens"


def test_a_lone_surrogate_is_malformed_before_anything_is_encoded(
    fingerprinter: Fingerprinter, make_request: Make
) -> None:
    """`begin` raises, not the worker thread."""
    with pytest.raises(MalformedRequest, match="surrogate"):
        fingerprinter.begin(make_request(messages=[{"role": "user", "content": "\udc00"}]))


@pytest.mark.parametrize("field", [{"truncate_prompt_tokens": 5}, {"suffix": "b"}, {"prompt_embeds": "AA=="}])
def test_a_prompt_that_the_engine_rewrites_has_no_fingerprint(
    fingerprinter: Fingerprinter, make_request: Make, field: dict[str, Any]
) -> None:
    """It is routed without a prefix."""
    with pytest.raises(Unrenderable, match=next(iter(field))):
        fingerprinter.begin(make_request(Endpoint.COMPLETIONS, prompt="a", **field))


def test_a_request_without_a_tokenizable_prompt_has_no_fingerprint(deepseek: Tokenizer, make_request: Make) -> None:
    """A chat without a template, and endpoints that share no prefix."""
    fingerprinter = Fingerprinter(deepseek, None, MODEL)
    assert fingerprinter.fingerprint(make_request(Endpoint.COMPLETIONS, prompt="a")).token_count > 0
    with pytest.raises(Unrenderable, match="template"):
        fingerprinter.begin(make_request(messages=dialogue(1)))
    with pytest.raises(Unrenderable):
        fingerprinter.begin(make_request(Endpoint.EMBEDDINGS, input="a"))


def test_a_prompt_that_an_engine_renders_otherwise_is_shown_as_text(
    fingerprinter: Fingerprinter, deepseek: Tokenizer
) -> None:
    """Where the texts first differ, with some text around it, what to do, and no token ids; a pod may send any ids."""
    text = "Which pod holds my prefix? " * 20
    ours = deepseek.encode(text)
    front = fingerprinter.advice(ours, deepseek.encode("[BOS] " + text).tolist())
    assert front.startswith("in front the engine puts '[BOS]") and "chat template" in front
    amid = fingerprinter.advice(ours, deepseek.encode(text[:270] + "today " + text[270:]).tolist())
    assert "my prefix?' the engine puts ' today', the router nothing" in amid and str(ours[0]) not in amid
    assert "the engine puts '', the router nothing" in fingerprinter.advice(ours, [-1, 1 << 40, *ours])
    assert fingerprinter.advice(ours, ()) == "", "an engine that reports no tokens"


def test_the_random_name_of_a_self_test_is_no_part_of_the_difference(
    fingerprinter: Fingerprinter, deepseek: Tokenizer
) -> None:
    """Else the reason would change with each test of a pod, and be logged each time."""

    def reason(name: str) -> str:
        return fingerprinter.advice(deepseek.encode(f"{name} yes"), deepseek.encode(f"{name} no"))

    assert reason("4d1f261432fc4b789a") == reason("d40b1f9e4c4d1f2614")
    dated = fingerprinter.advice(deepseek.encode("in 2026"), deepseek.encode("in 2027"))
    assert dated.startswith("behind 'in 202' the engine puts '7', the router '6'")
