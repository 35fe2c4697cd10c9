"""Turns a request into the tokens of its prompt and the hashes of its full blocks.

The hashes are seeded by everything that must be equal for KV to be reusable. `begin` renders the prompt and looks up
known segments; `finish` encodes the rest and hashes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Annotated, Any

import msgspec

from router.errors import MalformedRequest
from router.hashing import generation_seed, hash_array, hash_blocks, hash_rest, token_array
from router.prompt.conversation import UnreadReason, Unrenderable, with_decoded_messages
from router.prompt.incremental.reader import IncrementalPrompt, IncrementalReader
from router.prompt.segments import Lookup, Sealed, Segment, SegmentCache
from router.prompt.template import ChatTemplate, checked
from router.prompt.tokenizer import Tokenizer
from router.types import BlockHash, Endpoint, Generation, InferenceRequest, PromptPrefix

CACHE_BYTES = 64 * 1024 * 1024
SEEDS = 1024
"""Generations (adapter and salt) whose seeds are cached."""
COMPARE_EVERY = 256
"""One incremental prompt in 256 is read whole as well and compared."""

_REWRITTEN = ("truncate_prompt_tokens", "suffix", "prompt_embeds")
"""With these fields the engine changes the tokens in ways that are not reproduced here."""


class PendingPrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt between `begin` and `finish`: text that was looked up, or the client's tokens."""

    generation: Generation
    seed: BlockHash
    prompt: Lookup | array[int]
    incremental: IncrementalPrompt | None = None
    """Compared with `prompt`, which is the same prompt read whole."""

    @property
    def text(self) -> str | None:
        """The text to encode, without special tokens; None for a prompt of tokens."""
        return self.prompt.text if isinstance(self.prompt, Lookup) else None

    @property
    def cold_characters(self) -> int:
        """How much text must still be encoded."""
        return self.prompt.cold_characters if isinstance(self.prompt, Lookup) else 0


class Fingerprinter:
    """Turns requests of one model into prefixes. `template` None serves completions only. `incremental` None reads
    every prompt whole; `on_mismatch` is called, in any thread, when it turns out to be wrong and is disabled.

    Threads: `begin` runs only in the event loop's thread. `finish` may run in any thread at the same time: all that
    both change are two queues (`deque.append`) and the segments' `sealed`, one reference each."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        generation: Generation,
        *,
        cache_bytes: int = CACHE_BYTES,
        cache_seed: int = 0,
        incremental: bool = True,
        on_mismatch: Callable[[], None] = lambda: None,
    ) -> None:
        self._template = template
        self._tokenizer, self._backend = tokenizer, tokenizer.backend
        self.generation = replace(generation, tokenizer=tokenizer.fingerprint)
        """The generation of requests without adapter and salt."""
        self._new_segments = partial(SegmentCache, tokenizer, cache_bytes, cache_seed)
        self.segments = self._new_segments()
        """Tokens of known texts; public for its size and where it cuts."""
        self.incremental = (
            IncrementalReader(template, cache_bytes=cache_bytes, seed=cache_seed) if template and incremental else None
        )
        self._on_mismatch = on_mismatch
        self._incremental_prompts = 0
        self._token_ids = list[Annotated[int, msgspec.Meta(ge=0, lt=tokenizer.vocabulary_size)]]
        self._seeded = lru_cache(SEEDS)(self._seed)

    def forget_segments(self) -> None:
        """Empty the caches, because the tokenizer's backend has changed. Call in the thread of `begin`."""
        self._backend = self._tokenizer.backend
        self.segments = self._new_segments()
        if self.incremental is not None:
            self.incremental.clear()

    def begin(self, request: InferenceRequest) -> PendingPrompt | IncrementalPrompt:
        """Render the prompt and look up its known segments.

        `MalformedRequest` if the engine would refuse it, `Unrenderable` if its tokens cannot be computed here."""
        if self._tokenizer.backend != self._backend:  # the fast backend was disabled
            self.forget_segments()
        generation, seed = self._seeded(request.adapter, request.salt)
        incremental = None
        if self.incremental is not None and request.endpoint is Endpoint.CHAT:
            incremental = self.incremental.begin(request.prompt, generation, seed, self.segments)
        if incremental is not None:
            self._incremental_prompts += 1
            if self._incremental_prompts % COMPARE_EVERY:
                return incremental
        prompt, framed = self._prompt(request)
        if isinstance(prompt, str):
            return PendingPrompt(generation, seed, self.segments.look_up(prompt, framed=framed), incremental)
        return PendingPrompt(generation, seed, prompt)

    def finish(self, pending: PendingPrompt | IncrementalPrompt) -> PromptPrefix:
        """Encode the new text and hash the blocks. Safe in a worker thread; see the class."""
        if isinstance(pending, IncrementalPrompt):
            assert self.incremental is not None
            return self.incremental.finish(pending, self.segments)
        prefix = self._finish_whole(pending)
        if pending.incremental is not None:
            self._compare(pending.incremental, prefix)
        return prefix

    def _compare(self, pending: IncrementalPrompt, whole: PromptPrefix) -> None:
        assert self.incremental is not None
        same = self.incremental.finish(pending, self.segments) == whole
        if not same and self.incremental.enabled:
            self.incremental.disable()
            self._on_mismatch()

    def _finish_whole(self, pending: PendingPrompt) -> PromptPrefix:
        generation, seed, prompt = pending.generation, pending.seed, pending.prompt
        if not isinstance(prompt, Lookup):
            return PromptPrefix(generation, prompt, hash_blocks(prompt, generation.block_size_tokens, seed))
        segments = self.segments.complete(prompt)
        tokens = prompt.head[:]
        for segment in segments:
            tokens.frombytes(segment.tokens)
        tokens.extend(prompt.tail)
        hashes = _hash_path(tokens, segments, seed, generation.block_size_tokens)
        self.segments.keep(prompt, segments)
        return PromptPrefix(generation, tokens, hashes)

    def fingerprint(self, request: InferenceRequest) -> PromptPrefix:
        """`begin` and `finish`. Raises what `begin` raises."""
        return self.finish(self.begin(request))

    def _seed(self, adapter: str, salt: str) -> tuple[Generation, BlockHash]:
        generation = replace(self.generation, adapter=adapter, salt=salt)
        return generation, generation_seed(generation)

    def _prompt(self, request: InferenceRequest) -> tuple[str | array[int], bool]:
        """(the prompt as text or tokens, whether special tokens are put around the text)."""
        body = request.prompt
        for name in _REWRITTEN:
            if body.get(name) is not None:
                raise Unrenderable(UnreadReason.REWRITTEN, f"{name} changes the prompt inside the engine")
        if request.endpoint is Endpoint.CHAT:
            if self._template is None:
                raise Unrenderable(UnreadReason.NO_TEMPLATE, "this model has no chat template")
            return self._template.render(with_decoded_messages(body)), checked(body, "add_special_tokens", bool, False)
        if request.endpoint is Endpoint.COMPLETIONS:
            return self._completion(body.get("prompt")), checked(body, "add_special_tokens", bool, True)
        raise Unrenderable(UnreadReason.NO_PREFIX, f"{request.endpoint} shares no prefix")

    def _completion(self, prompt: Any) -> str | array[int]:
        """A completion's prompt; of several, the first."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, list) or not prompt:
            raise MalformedRequest("prompt must be a string, a list of token ids, or a list of these", param="prompt")
        try:
            return token_array(msgspec.convert(prompt, self._token_ids))
        except msgspec.ValidationError as error:
            raise MalformedRequest(f"prompt is not a list of token ids: {error}", param="prompt") from error


def _hash_path(tokens: array[int], segments: Sequence[Segment], seed: BlockHash, block_size_tokens: int) -> array[int]:
    """Hashes of the full blocks in `tokens`: those of known segments, then computed ones, which are stored in the other
    segments. A segment may carry any blocks that end before it does: the count omits the frame's tokens in front, so a
    block more may be left to the next segment."""
    hashes = hash_array()
    known = 0
    for segment in segments:
        sealed = segment.sealed
        if sealed is None or sealed.seed != seed:
            break
        hashes.frombytes(sealed.hashes)
        known += 1
    start = len(hashes)
    hashes = hash_rest(hashes, tokens[start * block_size_tokens :], block_size_tokens, seed)
    end_tokens = sum([segment.token_count for segment in segments[:known]])
    for segment in segments[known:]:
        end_tokens += segment.token_count
        stop = end_tokens // block_size_tokens
        segment.sealed = Sealed(seed, hashes[start:stop].tobytes())
        start = stop
    return hashes
