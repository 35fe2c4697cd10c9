"""Tokenizes requests without blocking the event loop.

Local tokenization runs inline with the fast tokenizer or for little new text, else in a worker thread (a cold 8K-token
prompt takes 14 ms with the slow tokenizer, 0.1 ms with the fast one, which does not release the GIL). A model whose
template cannot be reproduced here is tokenized by one of its own pods. A prompt that cannot be tokenized is routed
without a prefix and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import structlog

from router.engines.adapter import TOKENIZE_PATH, parse_tokens
from router.engines.engine_catalog import ENGINES
from router.errors import UpstreamError
from router.hashing import generation_seed, hash_blocks, token_array
from router.prompt.conversation import UnreadReason, Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.tokenizer import Tokenizer
from router.proxy.upstream import UpstreamPool
from router.types import Endpoint, Generation, InferenceRequest, Pod, PromptPrefix

THREAD_CHARACTERS = 16_384
"""Longer new text is encoded in a thread, if `transformers` encodes it."""

CHECK_EVERY = 256
"""One prompt in 256 is tokenized by both backends, in a thread."""

CHECK_SHARE = 0.01
"""Maximum share of the time that these comparisons take."""

REFERENCE = "transformers"

TOKENIZE_TIMEOUT_S = 2.0
"""Timeout of a pod's /tokenize. A healthy pod needs less for its longest prompt."""

log = structlog.get_logger()

Unread = Callable[[str, UnreadReason, str], None]
"""Called with (model, reason, details) when a prompt is routed without a prefix."""


class PromptReader(Protocol):
    """Turns requests of one model into prefixes."""

    async def read(self, request: InferenceRequest) -> PromptPrefix | None:
        """The prompt's prefix; None where it cannot be computed. Raises `MalformedRequest`."""


class LocalReader:
    """Tokenizes in this process, exactly as the engine does, and compares both backends on a sample of the traffic."""

    def __init__(self, fingerprinter: Fingerprinter, tokenizer: Tokenizer, unread: Unread) -> None:
        self._fingerprinter = fingerprinter
        self._tokenizer = tokenizer
        self._unread = unread
        self._prompts = 0
        self._check: asyncio.Task[None] | None = None
        self._next_check_s = 0.0

    async def read(self, request: InferenceRequest) -> PromptPrefix | None:
        try:
            pending = self._fingerprinter.begin(request)
        except Unrenderable as error:
            self._unread(request.model, error.reason, str(error))
            return None
        self._sample(pending.text)
        if self._tokenizer.backend != REFERENCE or pending.cold_characters <= THREAD_CHARACTERS:
            return self._fingerprinter.finish(pending)
        return await asyncio.to_thread(self._fingerprinter.finish, pending)

    def _sample(self, text: str | None) -> None:
        """Start a check of every `CHECK_EVERY`th prompt as a background task, one at a time."""
        self._prompts += 1
        if self._prompts % CHECK_EVERY or text is None or self._tokenizer.backend == REFERENCE:
            return
        if (self._check is None or self._check.done()) and time.monotonic() >= self._next_check_s:
            self._check = asyncio.create_task(self._verify(text))

    async def _verify(self, text: str) -> None:
        began_s = time.monotonic()
        agree = await asyncio.to_thread(self._tokenizer.verify, text)
        self._next_check_s = time.monotonic() + (time.monotonic() - began_s) / CHECK_SHARE
        if not agree:
            self._tokenizer.distrust("it differed from transformers on live traffic")
            self._fingerprinter.forget_segments()
            log.error("fast tokenizer disabled: tokens differ", characters=len(text))


class EngineReader:
    """Tokenizes on a pod of the model: one more round trip, with the engine's own tokens. After an error or
    `TOKENIZE_TIMEOUT_S`, one other pod is tried."""

    def __init__(
        self,
        generation: Generation,
        pool_of: Callable[[Pod], UpstreamPool],
        pods: Callable[[str], list[Pod]],
        unread: Unread,
    ) -> None:
        self._generation = generation
        self._pool_of = pool_of
        self._pods = pods
        self._unread = unread

    async def read(self, request: InferenceRequest) -> PromptPrefix | None:
        for pod in self._pods(request.adapter or request.model)[:2]:
            tokens = await self._tokenize(pod, request)
            if tokens is not None:
                return self._prefix(request, tokens)
        self._unread(request.model, UnreadReason.NOT_TOKENIZED, "no pod tokenized the prompt")
        return None

    async def _tokenize(self, pod: Pod, request: InferenceRequest) -> list[int] | None:
        body = ENGINES[pod.engine].tokenize_body(request.adapter or request.model, tokenizable(request))
        if body is None:
            return None
        try:
            pool = self._pool_of(pod)
            return parse_tokens(await pool.fetch(TOKENIZE_PATH, TOKENIZE_TIMEOUT_S, msgspec.json.encode(body)))
        except UpstreamError:
            return None

    def _prefix(self, request: InferenceRequest, tokens: list[int]) -> PromptPrefix:
        generation = replace(self._generation, adapter=request.adapter, salt=request.salt)
        flat = token_array(tokens)
        hashes = hash_blocks(flat, generation.block_size_tokens, generation_seed(generation))
        return PromptPrefix(generation, flat, hashes)


def tokenizable(request: InferenceRequest) -> Mapping[str, Any]:
    """The prompt fields of a request for `/tokenize`: of several prompts, the first."""
    if request.endpoint is Endpoint.COMPLETIONS and isinstance(request.prompt.get("prompt"), list):
        first = request.prompt["prompt"][0] if request.prompt["prompt"] else ""
        return {"prompt": first} if isinstance(first, str | list) else {"prompt": request.prompt["prompt"]}
    return request.prompt
