"""Compares a sample of the prompts with the reference tokenizer, in a thread.

One prompt in `CHECK_EVERY` is rendered whole, encoded by `transformers` and hashed without any cache. A difference from
the served prefix disables what caused it: the fast tokenizer, or incremental reading.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from router.errors import ClientError
from router.prompt.conversation import Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.pending import PendingPrompt
from router.prompt.tokenizer import REFERENCE, Tokenizer
from router.types import InferenceRequest, PromptPrefix

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
