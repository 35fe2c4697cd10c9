"""Tokenizes requests without blocking the event loop.

Short prompts are read inline. Long ones are rendered and encoded in a few threads, whose tokenizers release the
interpreter; very long ones one after the other, in a thread of their own. A model whose template cannot be reproduced
here is tokenized by one of its own pods. A prompt that cannot be tokenized, or not in time, is routed without a prefix
and counted.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
import structlog

from router.engines.adapter import TOKENIZE_PATH, parse_tokens
from router.engines.engine_catalog import ENGINES, ONE_READING, Readings
from router.errors import ClientError, UpstreamError
from router.hashing import generation_seed, hash_array, hash_blocks, token_array
from router.prompt.apis.conversion import Conversion
from router.prompt.completion import MAX_TEXT_BYTES, count_tokens, first_text, only_text, size_bytes
from router.prompt.conversation import UnreadReason, Unrenderable, with_decoded_messages
from router.prompt.fingerprint import Fingerprinter
from router.prompt.media import may_have_media, media_parts
from router.prompt.pending import FoundPrefix, PendingPrompt
from router.prompt.pictures.picture_reader import PictureIdentities
from router.prompt.tokenizer import REFERENCE, Tokenizer
from router.types import Endpoint, Generation, InferenceRequest, Pod, PromptKind, PromptPrefix

INLINE_BYTES = 64 * 1024
"""Longer new messages are rendered in a thread."""
INLINE_CHARACTERS = 24 * 1024
"""Longer new text is encoded in a thread. The worst texts take 0.19 us a character, ordinary ones 0.004."""
INLINE_SPACED_BYTES = 48 * 1024
"""The same for text with spaces, which a thread makes dearer by half: the worst takes 0.07 us a byte."""
SPACED_BYTES = 1024
"""Text with spaces has at least one in as many bytes. Longer words take longer."""
YIELD_CHARACTERS = 16 * 1024
"""After longer text is encoded inline, other callbacks run before the request goes on."""
REFERENCE_CHARACTERS = 16 * 1024
"""The same where `transformers` encodes: 0.4 us a character."""
INLINE_MESSAGES = 256
"""Longer chats are rendered in a thread."""
INLINE_ITEMS, COUNTED_BYTES = 2048, 4 * 1024
"""Larger chats with more strings, commas and opened brackets are rendered in a thread: templates take up to 10 us for a
field, which has three of them, and may compare each with each."""
MAX_RENDER_BYTES = 8 * 1024 * 1024
"""Larger bodies are not decoded: one string of 32 MiB would hold the interpreter for 40 ms. They are mostly images."""
MAX_TOKENIZE_BYTES = 8 * 1024 * 1024
"""Larger bodies are not sent to a pod's /tokenize."""
MAX_TEMPLATE_TOKENS = 2048
"""Each token that a pod finds takes a byte of the body, or is one of the template. A pod that claims more is not
believed: the request would be refused as too long for every pod."""

MAX_INLINE_BYTES = 1024 * 1024
"""The blocks of a longer body are hashed in a thread, even if its text was encoded before: 16 thousand take 2 ms."""
TOKENIZE_TIMEOUT_S = 2.0
"""Timeout of a pod's /tokenize. A healthy pod needs less for its longest prompt."""

Unread: TypeAlias = Callable[[InferenceRequest, UnreadReason, str], None]
"""Called with (request, reason, details) when a prompt is routed without a prefix."""
ContextLookup: TypeAlias = Callable[[InferenceRequest], int | None]
ReadingsLookup: TypeAlias = Callable[[InferenceRequest], Readings]
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class FleetLookups:
    """What the pods of a request's model have in common. Each returns None if it is unknown."""

    context_tokens: ContextLookup = lambda _: None
    readings: ReadingsLookup = lambda _: ONE_READING
    identities: Callable[[InferenceRequest], PictureIdentities | None] = lambda _: None


class PodFetch(Protocol):
    def fetch(self, path: str, timeout_s: float, json: bytes | None = None) -> Awaitable[bytes]:
        """The body of the 200 response to a POST of `json`. Raises `UpstreamError`."""


class PromptReader(Protocol):
    """Turns requests of one model into prefixes."""

    async def read(self, request: InferenceRequest) -> PromptPrefix | UnreadReason | None:
        """The prompt's prefix, or why it cannot be computed; None where requests share none. Raises
        `MalformedRequest`."""


class NoPromptReader:
    """Reads no prompt: its models have no tokenizer."""

    def __init__(self, unread: Unread) -> None:
        self._unread = unread

    async def read(self, request: InferenceRequest) -> UnreadReason | None:
        if request.endpoint.api.prompt in (PromptKind.TOKENIZED, PromptKind.TEXTS):
            return None
        self._unread(request, UnreadReason.NO_TOKENIZER, "the model has no tokenizer; add one under `models`")
        return UnreadReason.NO_TOKENIZER


# --- threads ---

READ_THREADS = 3
"""Long prompts that are read at the same time."""
VERY_LONG = 256 * 1024
"""Bytes or characters: prompts with more have another thread, so that shorter ones never wait for them."""
NICE = 5
"""How much lower the priority of these threads is, in the kernel's unit: each step is 1.25 times less of a core."""
RESTS, MAX_REST_S = 2.0, 0.1
"""A thread that has read rests this many times as long before it reads on, and at most so long: reading takes the
interpreter and a core, and the requests that waited for them catch up meanwhile."""
READ_TIMEOUT_S = 2.0
"""How long a long prompt waits for a thread and its result. It is then routed without a prefix."""


def _after_the_loop() -> None:
    """Where cores are few, the event loop goes before this thread. Linux alone has a priority for each thread."""
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)


class Rests(threading.local):
    """Runs work one after the other in each thread, with rests in between."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._cpu_s, self._sleep = clock, cpu_s, sleep
        self._rested_at = 0.0

    def run(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """The result of `work`. Raises what it raises."""
        if (rest_s := self._rested_at - self._clock()) > 0:
            self._sleep(rest_s)
        began_s = self._cpu_s()
        try:
            return work(*arguments)
        finally:
            self._rested_at = self._clock() + min(RESTS * (self._cpu_s() - began_s), MAX_REST_S)


class ReadThreads:
    """Threads that read long prompts of all models, `READ_THREADS` at a time, and one that reads very long ones."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(READ_THREADS, "long-prompt", _after_the_loop)
        self._very_long = ThreadPoolExecutor(1, "very-long-prompt", _after_the_loop)
        self._rests = Rests()

    async def run(self, size: int, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """The result of `work`. `size`: bytes or characters that it reads. Raises what it raises, and `Unrenderable`
        after `READ_TIMEOUT_S`: running work then continues in its thread, waiting work is dropped."""
        threads = self._very_long if size > VERY_LONG else self._long
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                # A variable for the future would be a cycle with its exception, which would keep the body in memory.
                return await asyncio.get_running_loop().run_in_executor(threads, self._rests.run, work, *arguments)
        except TimeoutError as error:
            raise Unrenderable(UnreadReason.BUSY, f"not read within {READ_TIMEOUT_S:g} s") from error


# --- readers ---


@dataclass(slots=True, eq=False)
class LocalPromptReader:
    """Tokenizes in this process, exactly as the engine does."""

    fingerprinter: Fingerprinter
    tokenizer: Tokenizer
    _unread: Unread
    threads: ReadThreads = field(default_factory=ReadThreads)
    lookups: FleetLookups = field(default_factory=FleetLookups)
    on_mismatch: Callable[[], None] = lambda: None
    check: PromptCheck = field(init=False)

    def __post_init__(self) -> None:
        self.check = PromptCheck(self.fingerprinter, self.tokenizer, self.on_mismatch)

    async def read(self, request: InferenceRequest) -> PromptPrefix | UnreadReason | None:
        kind = request.endpoint.api.prompt
        if kind is PromptKind.TOKENIZED:
            return await self._read_tokenized(request)
        if kind is PromptKind.TEXTS:
            return await self._read_texts(request)
        readings = self.lookups.readings(request) if request.endpoint.api.is_chat else ONE_READING
        try:
            if len(readings) == 1:
                return await self._read_by(readings[0][1], request)
            return await self._read_by_each(readings, request)
        except Unrenderable as error:
            self._unread(request, error.reason, str(error))
            return error.reason

    async def _read_by_each(self, readings: Readings, request: InferenceRequest) -> PromptPrefix:
        """The prompt by one front end, with those of others that differ. Raises what the first one raises if none reads
        it."""
        found: dict[str, PromptPrefix | None] = {}
        errors: list[Exception] = []
        for front_end, conversion in readings:
            if found and conversion is not None and self.fingerprinter.made(conversion).reads_alike(request.prompt):
                continue
            try:
                found[front_end] = await self._read_by(conversion, request)
            except (ClientError, Unrenderable) as error:
                found[front_end] = None
                errors.append(error)
        if (prompt := by_front_end(found)) is None:
            raise errors[0]
        return prompt

    async def _read_by(self, conversion: type[Conversion] | None, request: InferenceRequest) -> PromptPrefix:
        """Raises `Unrenderable` or what the engine would refuse."""
        fingerprinter = self.fingerprinter
        identities = self.lookups.identities(request) if fingerprinter.pictures is not None else None
        pending, is_rendered = fingerprinter.open(request, conversion, identities), False
        if (found := pending.found) is not None and found.key and found.new_bytes <= INLINE_BYTES:
            few, new = _has_few_new_items(found), fingerprinter.render_new
            is_rendered = new(pending) if few else await self.threads.run(found.new_bytes, new, pending)
        if not is_rendered and _is_short(pending) and not fingerprinter.declares_tools(request):
            fingerprinter.render(pending)
        elif not is_rendered:
            await self._render_long(pending)
        fingerprinter.look_up(pending)
        if len(request.body) <= MAX_INLINE_BYTES and self._is_soon_encoded(pending):
            prefix = fingerprinter.finish(pending)
            if pending.cold_characters > YIELD_CHARACTERS:
                await asyncio.sleep(0)
        else:
            prefix = await self.threads.run(pending.cold_characters, fingerprinter.finish, pending)
        self.check.sample(request, pending, prefix)
        return prefix

    def _is_soon_encoded(self, pending: PendingPrompt) -> bool:
        characters, is_fast = pending.cold_characters, self.tokenizer.backend != REFERENCE
        if characters <= (INLINE_CHARACTERS if is_fast else REFERENCE_CHARACTERS):
            return True
        if not is_fast or characters > INLINE_SPACED_BYTES:
            return False
        return self.tokenizer.splits_words and _is_spaced(b"".join(map(str.encode, pending.cold)))

    async def _read_texts(self, request: InferenceRequest) -> PromptPrefix | UnreadReason | None:
        """The prefix of one text to embed, which has the tokens of a completion; of others, the number of tokens."""
        text = only_text(request.prompt) if request.endpoint is Endpoint.EMBEDDINGS else None
        if text is None or len(request.body) > MAX_TEXT_BYTES:
            return await self._count_texts(request)
        completion = msgspec.structs.replace(request, endpoint=Endpoint.COMPLETIONS, prompt={"prompt": text})
        try:
            return await self.read(completion)
        except ClientError:  # the engine refuses it with other words
            return None

    async def _count_texts(self, request: InferenceRequest) -> PromptPrefix | None:
        size = size_bytes(request.prompt)
        try:
            if size > MAX_TEXT_BYTES:
                return None
            if size <= REFERENCE_CHARACTERS:
                count = count_tokens(request.prompt, self._token_counts)
            else:
                count = await self.threads.run(size, count_tokens, request.prompt, self._token_counts)
        except Unrenderable:
            return None
        return PromptPrefix(self.fingerprinter.generation, token_array(()), hash_array(()), count)

    def _token_counts(self, texts: Sequence[str]) -> Sequence[int]:
        """The number of tokens of each text, with those that the engine puts around it."""
        return [len(tokens) for tokens in self.tokenizer.encode_batch(texts, add_special_tokens=True)]

    async def _read_tokenized(self, request: InferenceRequest) -> PromptPrefix | UnreadReason | None:
        """The prompt of a request to /tokenize. None where only the engine knows what it answers."""
        generating = generating_request(request)
        try:
            return await self.read(generating) if generating else None
        except ClientError:  # the engine refuses other bodies than those that generate, and with other words
            return None

    async def _render_long(self, pending: PendingPrompt) -> None:
        request, found = pending.request, pending.found
        new_bytes = found.new_bytes if found is not None and not found.key else len(request.body)
        context_tokens = self.lookups.context_tokens(request)
        if new_bytes > MAX_RENDER_BYTES:
            raise Unrenderable(UnreadReason.TOO_LONG, f"{new_bytes} bytes")
        await self.threads.run(new_bytes, self.fingerprinter.render, pending, context_tokens)


def by_front_end(found: Mapping[str, PromptPrefix | None]) -> PromptPrefix | None:
    """The longest reading of a prompt, with those of other front ends that differ; None if there is none. Of the
    longest, no pod can have more tokens cached than the prompt has."""
    read = [prompt for prompt in found.values() if prompt is not None]
    if not read:
        return None
    longest = max(read, key=lambda prompt: len(prompt.tokens))
    others = [(name, one) for name, one in found.items() if one is None or one.tokens != longest.tokens]
    return msgspec.structs.replace(longest, others=tuple(others)) if others else longest


def generating_request(request: InferenceRequest) -> InferenceRequest | None:
    """The chat or completion with the same prompt as a request to /tokenize. None where the answer has more than its
    tokens, or where the engine may refuse it."""
    fields = {name: value for name, value in request.prompt.items() if name != "return_token_strs"}
    text = fields.get("prompt")
    is_text = text is not None and bytes(memoryview(text)[:1]) == b'"'
    if (
        request.prompt.get("return_token_strs")
        or "chat_template" in fields
        or fields.get("tools") == []
        or is_text == ("messages" in fields)
    ):
        return None
    return msgspec.structs.replace(request, endpoint=Endpoint.COMPLETIONS if is_text else Endpoint.CHAT, prompt=fields)


def _is_short(pending: PendingPrompt) -> bool:
    request, found = pending.request, pending.found
    if found is not None and not found.key:
        return len(request.body) <= INLINE_BYTES or found.new_bytes <= INLINE_BYTES
    is_short = len(request.body) <= INLINE_BYTES and len(request.prompt.get("messages", ())) <= INLINE_MESSAGES
    return is_short and (not request.endpoint.api.is_chat or _has_few_items(request.body))


def _has_few_new_items(found: FoundPrefix) -> bool:
    new = [bytes(message) for message in found.messages[found.prefix.messages :]]
    is_plain = not any(b"[" in message or message.find(b"{", 1) > 0 for message in new)
    return is_plain or found.new_bytes <= COUNTED_BYTES or _has_few_items(b"".join(new))


def _has_few_items(document: bytes) -> bool:
    """Whether templates render this JSON soon. Texts count too: arguments of calls are JSON in strings."""
    if len(document) <= COUNTED_BYTES:
        return True
    items = document.count(b'"') // 2 + document.count(b",") + document.count(b"[") + document.count(b"{")
    return items <= INLINE_ITEMS


def _is_spaced(text: bytes) -> bool:
    """Whether a text has only short words, and few bytes."""
    ends = range(SPACED_BYTES, len(text), SPACED_BYTES)
    return len(text) <= INLINE_SPACED_BYTES and all(text.rfind(b" ", end - SPACED_BYTES, end) >= 0 for end in ends)


@dataclass(slots=True, eq=False)
class EnginePromptReader:
    """Tokenizes on a pod of the model: one more round trip, with the engine's own tokens. After an error or
    `TOKENIZE_TIMEOUT_S`, one other pod is tried. Long prompts and their tokens are decoded in a thread."""

    generation: Generation
    pool_of: Callable[[Pod], PodFetch]
    pods: Callable[[str], list[Pod]]
    unread: Unread
    threads: ReadThreads = field(default_factory=ReadThreads)
    readings: ReadingsLookup = lambda _: ONE_READING

    async def read(self, request: InferenceRequest) -> PromptPrefix | UnreadReason | None:
        if request.endpoint.api.prompt in (PromptKind.TOKENIZED, PromptKind.TEXTS):
            return None
        if len(request.body) > MAX_TOKENIZE_BYTES:
            self.unread(request, UnreadReason.TOO_LONG, f"the body has {len(request.body)} bytes")
            return UnreadReason.TOO_LONG
        if not (pods := self.pods(request.adapter or request.model)):
            return None  # nobody serves it: it is not routed by load either
        try:
            if (prefix := await self._read_by_each(pods, request)) is not None:
                return prefix
        except Unrenderable as error:
            self.unread(request, error.reason, str(error))
            return error.reason
        self.unread(request, UnreadReason.NOT_TOKENIZED, "no pod tokenized the prompt")
        return UnreadReason.NOT_TOKENIZED

    async def _read_by_each(self, pods: Sequence[Pod], request: InferenceRequest) -> PromptPrefix | None:
        """The prompt by a pod of one front end, with those of others that differ."""
        names = [name for name, _ in self.readings(request)] if request.endpoint.api.is_chat else [""]
        if len(names) == 1:
            return await self._read_from_one(pods, request)
        of_each = {name: [pod for pod in pods if pod.front_end == name] for name in names}
        return by_front_end({name: await self._read_from_one(own, request) for name, own in of_each.items()})

    async def _read_from_one(self, pods: Sequence[Pod], request: InferenceRequest) -> PromptPrefix | None:
        for pod in pods[:2]:
            if (prefix := await self._read_from(pod, request)) is not None:
                return prefix
        return None

    async def _read_from(self, pod: Pod, request: InferenceRequest) -> PromptPrefix | None:
        conversion = self.readings(request)[0][1] if request.endpoint.api.is_converted else None
        body = await self._run(len(request.body), _tokenize_body, pod, request, conversion)
        if body is None:
            return None
        try:
            answer = await self.pool_of(pod).fetch(TOKENIZE_PATH, TOKENIZE_TIMEOUT_S, body)
        except UpstreamError:
            return None
        return await self._run(len(answer), self._prefix, request, answer)

    async def _run(self, size: int, work: Callable[..., _Result], *arguments: Any) -> _Result:
        if size <= INLINE_BYTES:
            return work(*arguments)
        return await self.threads.run(size, work, *arguments)

    def _prefix(self, request: InferenceRequest, answer: bytes) -> PromptPrefix | None:
        tokens = parse_tokens(answer)
        if tokens is None or len(tokens) > len(request.body) + MAX_TEMPLATE_TOKENS:
            return None
        generation = replace(self.generation, adapter=request.adapter, salt=request.salt)
        hashes = hash_blocks(tokens, generation.block_size_tokens, generation_seed(generation))
        return PromptPrefix(generation, tokens, hashes)


def _tokenize_body(pod: Pod, request: InferenceRequest, conversion: type[Conversion] | None) -> bytes | None:
    """The body for the pod's /tokenize; None if its tokens might differ from those of the request. Raises
    `Unrenderable`."""
    prompt = tokenizable(request)
    if request.endpoint.api.is_converted:
        if conversion is None:
            raise Unrenderable(UnreadReason.NOT_CONVERTED, "the engines of this model convert it differently")
        prompt = conversion(None).sent_chat(prompt)
    if may_have_media(request.body) and media_parts(with_decoded_messages(prompt).get("messages")):
        raise Unrenderable(UnreadReason.MEDIA, "the engine's tokens are equal for different pictures")
    body = ENGINES[pod.engine].tokenize_body(request.adapter or request.model, prompt)
    return None if body is None else msgspec.json.encode(body)


def tokenizable(request: InferenceRequest) -> Mapping[str, Any]:
    """The prompt fields of a request for `/tokenize`: of several prompts, the first. Token ids need no tokenizer."""
    if request.endpoint.api.prompt is not PromptKind.COMPLETION:
        return request.prompt
    return {"prompt": first_text(request.prompt.get("prompt"))}


# --- the check of a sample ---

CHECK_EVERY = 256
CHECK_SHARE = 0.01
"""Maximum share of the time that checks take."""
CHECK_TOKENS = 65_536
"""Longer prompts are not checked: the reference needs 2 us a token."""

log = structlog.get_logger()


class PromptCheck:
    """Checks prompts of one model, one at a time. `on_mismatch` is called when incremental reading is disabled."""

    def __init__(self, fingerprinter: Fingerprinter, tokenizer: Tokenizer, on_mismatch: Callable[[], None]) -> None:
        self._fingerprinter = fingerprinter
        self._tokenizer = tokenizer
        self._on_mismatch = on_mismatch
        self._prompts = 0
        self._next_s = 0.0
        self.running: asyncio.Task[None] | None = None

    def sample(self, request: InferenceRequest, pending: PendingPrompt, served: PromptPrefix) -> None:
        """Start a check of every `CHECK_EVERY`th prompt as a background task, unless one runs or ran recently."""
        self._prompts += 1
        if self._prompts % CHECK_EVERY or len(served.tokens) > CHECK_TOKENS or time.monotonic() < self._next_s:
            return
        if self.running is not None and not self.running.done():
            return
        if pending.prefix is not None or self._tokenizer.backend != REFERENCE:
            self.running = asyncio.create_task(self._check(request, pending, served))

    async def _check(self, request: InferenceRequest, pending: PendingPrompt, served: PromptPrefix) -> None:
        began_s, backend = time.monotonic(), self._tokenizer.backend
        try:
            cause = await asyncio.to_thread(self._cause_of_difference, request, pending, served)
        except (ClientError, Unrenderable):  # a template that depends on the time
            cause = None
        self._next_s = time.monotonic() + (time.monotonic() - began_s) / CHECK_SHARE
        if cause is not None and backend == self._tokenizer.backend:
            self._disable(cause, len(served.tokens))

    def _cause_of_difference(
        self, request: InferenceRequest, pending: PendingPrompt, served: PromptPrefix
    ) -> str | None:
        found = self._fingerprinter.read_slowly(request, pending)
        if found is None or found[1] == served:
            return None
        text, right = found
        if self._tokenizer.encode(text, add_special_tokens=pending.framed) != right.tokens:
            return "fast tokenizer"
        return "incremental prompts" if pending.prefix is not None else "segment cache"

    def _disable(self, cause: str, tokens: int) -> None:
        if cause == "fast tokenizer":
            self._tokenizer.distrust("it differed from transformers on live traffic")
        elif cause == "incremental prompts":
            assert self._fingerprinter.incremental is not None
            self._fingerprinter.incremental.disable()
            self._on_mismatch()
        self._fingerprinter.forget_segments()
        log.error("served tokens differ from the reference", disabled=cause, tokens=tokens)
