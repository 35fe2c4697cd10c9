"""Turns a request into the tokens of its prompt and the hashes of its full blocks.

The hashes are seeded by everything that must be equal for KV to be reusable. `open` looks up the chat's cached prefix,
`render` makes the text, `look_up` finds its known segments, and `finish` encodes the rest and hashes. `render` and
`finish` take the time, and may run in a thread.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import takewhile
from operator import eq
from typing import Any

import msgspec

from router.errors import ContextTooLong, MalformedRequest
from router.hashing import generation_seed, hash_array, hash_blocks, hash_rest, token_array
from router.prompt.apis.conversion import Conversion
from router.prompt.completion import CompletionPrompts
from router.prompt.conversation import UnreadReason, Unrenderable, with_decoded_messages
from router.prompt.harmony import Harmony, SeparateTexts
from router.prompt.incremental.reader import IncrementalReader
from router.prompt.media import MAX_KEYS, TOKENS, MediaText
from router.prompt.pending import EMPTY_PREFIX, PendingPrompt
from router.prompt.pictures.picture_reader import Picture, PictureIdentities, expanded, hash_pictures
from router.prompt.segments import NO_TOKENS, Lookup, SegmentCache, all_cold, hash_path
from router.prompt.template import ChatTemplate, checked
from router.prompt.tokenizer import Tokenizer
from router.types import BlockHash, Endpoint, Generation, InferenceRequest, PromptKind, PromptPicture, PromptPrefix

CACHE_BYTES = 64 * 1024 * 1024
SEEDS = 1024
"""Generations (adapter and salt) whose seeds are cached."""
MAX_PROMPT_TOKENS = 1_048_576
"""Longest context, if the pods do not report theirs."""
CHARACTERS_PER_TOKEN = 16
"""A text with more characters per token of the context is not encoded: it almost certainly does not fit."""
SHOWN_TOKENS = 12
"""How many tokens of a difference between two prompts are shown, and how many in front of it."""
_RANDOM = re.compile(r"(?=[a-f]*\d)[0-9a-f]{5,}")
_TEMPLATE_ADVICE = "give the model the tokenizer and chat template of the engine (`models` in router.yaml)"
_REWRITTEN = ("truncate_prompt_tokens", "suffix", "prompt_embeds")
"""With these fields the engine changes the tokens in ways that are not reproduced here."""
_PICTURE_OPTIONS = ("media_io_kwargs", "mm_processor_kwargs")
"""With these fields the engine changes pictures."""


def _equal(ours: Sequence[int], engine: Sequence[int]) -> int:
    """How many tokens are equal, from the first one on."""
    return sum(takewhile(bool, map(eq, ours, engine)))


class Fingerprinter:
    """Turns requests of one model into prefixes. `template` None serves completions only. `incremental` False reads
    every prompt whole.

    Threads: `open` and `look_up` run only in the event loop's thread. `render` and `finish` may run in any thread at
    the same time: all that both change are two queues (`deque.append`) and the segments' `sealed`, one reference
    each."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | Harmony | None,
        generation: Generation,
        *,
        cache_bytes: int = CACHE_BYTES,
        cache_seed: int = 0,
        incremental: bool = True,
        max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    ) -> None:
        self._template = template
        self.renders_chats = template is not None
        self.pictures = template.pictures if template else None
        """What reads pictures, if the engine's way to identify them is known; None: nothing."""
        self._tokenizer, self._backend = tokenizer, tokenizer.backend
        self.generation = replace(generation, tokenizer=tokenizer.fingerprint)
        """The generation of requests without adapter and salt."""
        self._new_segments = partial(SegmentCache, tokenizer, cache_bytes, cache_seed)
        self.segments = self._new_segments()
        """Tokens of known texts; public for its size."""
        self.incremental = (
            IncrementalReader(template, cache_bytes=cache_bytes, seed=cache_seed)
            if isinstance(template, ChatTemplate) and incremental
            else None
        )
        self._max_prompt_tokens = max_prompt_tokens
        self._completions = CompletionPrompts(tokenizer.vocabulary_size)
        self._seeded = lru_cache(SEEDS)(self._seed)
        self.made: Callable[[Any], Conversion] = cache(lambda kind: kind(template))

    @property
    def cache_bytes(self) -> int:
        """Bytes of both caches, estimated."""
        return self.segments.bytes + (self.incremental.cache.bytes if self.incremental is not None else 0)

    def declares_tools(self, request: InferenceRequest) -> bool:
        """Whether to render the prompt means to declare tools in Harmony, which takes milliseconds for new ones."""
        return isinstance(self._template, Harmony) and bool(request.prompt.get("tools"))

    def advice(self, ours: Sequence[int], engine: Sequence[int]) -> str:
        """Why an engine has other tokens of a prompt, and what to do; "" if that is unknown."""
        known = self._template.advice(ours, engine) if isinstance(self._template, Harmony) else ""
        return known or (engine and f"{self._difference(ours, engine)}; {_TEMPLATE_ADVICE}") or ""

    def _difference(self, ours: Sequence[int], engine: Sequence[int]) -> str:
        """What differs between two prompts, as text; decoded in less than a millisecond."""
        start = _equal(ours, engine)
        own, other = ours[start:], engine[start:]
        end = _equal(own[::-1], other[::-1])
        where = f"behind {self._text(ours[max(start - SHOWN_TOKENS, 0) : start])}" if start else "in front"
        puts, ours_puts = (self._text(tokens[: len(tokens) - end][:SHOWN_TOKENS]) for tokens in (other, own))
        return f"{where} the engine puts {puts}, the router {ours_puts}"

    def _text(self, tokens: Sequence[int]) -> str:
        """Without the random names of self-tests, so that a reason stays the same."""
        known = [token for token in tokens if 0 <= token < self._tokenizer.vocabulary_size]
        return repr(_RANDOM.sub("...", self._tokenizer.text_of(known, special=True))) if tokens else "nothing"

    def forget_segments(self) -> None:
        """Empty the caches, because the tokenizer's backend has changed. Call in the thread of `open`."""
        self._backend = self._tokenizer.backend
        self.segments = self._new_segments()
        if self.incremental is not None:
            self.incremental.clear()

    def open(
        self,
        request: InferenceRequest,
        conversion: type[Conversion] | None = None,
        identities: PictureIdentities | None = None,
    ) -> PendingPrompt:
        """Look up the cached prefix of a chat. `conversion`: how the pods' engine makes a chat of the body, for an
        endpoint whose bodies are converted; `identities`: how it identifies pictures."""
        if self._tokenizer.backend != self._backend:  # the fast backend was disabled
            self.forget_segments()
        generation, seed = self._seeded(request.adapter, request.salt)
        found = None
        if self.incremental is not None and request.endpoint.api.prompt is PromptKind.CHAT:
            found = self.incremental.find(request.prompt, request.salt)
            if found is not None and conversion is not None and not self.made(conversion).reads_plain(found.messages):
                found = None
        if self.incremental is not None and found is None:
            found = self.incremental.find_chat(request, conversion)
        return PendingPrompt(request, generation, seed, self.segments, NO_TOKENS, found, conversion, identities)

    def render_new(self, pending: PendingPrompt) -> bool:
        """Render what follows the cached prefix of a chat of any kind. False where that must be done by `render`. Safe
        in a worker thread."""
        if self.incremental is None or pending.found is None or not pending.found.key:
            return False
        return self.incremental.continue_chat(pending, partial(self._text_of, pending))

    def _text_of(self, pending: PendingPrompt, prompt: Mapping[str, Any]) -> str | None:
        """The text of the same request with other fields; None where it cannot be rendered, or is not only text."""
        try:
            text, framed = self._prompt(msgspec.structs.replace(pending.request, prompt=prompt), pending.conversion)
        except (MalformedRequest, Unrenderable):
            return None
        return text if isinstance(text, str) and not framed else None

    def render(self, pending: PendingPrompt, context_tokens: int | None = None) -> PendingPrompt:
        """Render the prompt, or the part of it behind the cached prefix. Safe in a worker thread; see the class.
        `context_tokens`: the longest context of the pods, if they report it.

        `MalformedRequest` if the engine would refuse it, `ContextTooLong` if its length alone shows that it fits no
        pod, `Unrenderable` if its tokens cannot be computed here."""
        segments, endpoint = pending.segments, pending.request.endpoint
        if pending.found is not None and not pending.found.key:
            assert self.incremental is not None
            if self.incremental.render(pending):
                assert isinstance(pending.prompt, Lookup)
                self._check_length(pending.prompt.text, context_tokens, endpoint)
                return pending
        prompt, framed = self._prompt(pending.request, pending.conversion, pending.identities)
        if isinstance(prompt, MediaText):
            return self._rendered_media(pending, prompt, framed, context_tokens)
        if isinstance(prompt, SeparateTexts):
            text = "".join(prompt.texts)
            self._check_length(text, context_tokens, endpoint)
            pending.prompt = all_cold(text, [piece for part in prompt.texts for piece in segments.pieces(part)])
            return pending
        self._check_length(prompt, context_tokens, endpoint)
        if not isinstance(prompt, str):
            pending.prompt = prompt
            return pending
        pieces = segments.pieces(prompt, framed=framed)
        pending.prompt, pending.framed = all_cold(prompt, pieces), framed
        if self.incremental is not None and pending.found is not None and not framed:
            self.incremental.enter(pending, partial(self._text_of, pending), prompt, pieces)
        return pending

    def _rendered_media(
        self, pending: PendingPrompt, prompt: MediaText, framed: bool, context_tokens: int | None
    ) -> PendingPrompt:
        """A prompt with pictures, with a cut in front of the first one whose tokens are unknown."""
        segments, text, end = pending.segments, prompt.text, prompt.exact
        if end < len(text):
            end = segments.cuts.safe_end(text, end)
        if framed or not end:
            raise Unrenderable(UnreadReason.MEDIA, "the tokens in front of the first picture depend on it")
        self._check_length(text, context_tokens, pending.request.endpoint)
        front = segments.pieces(text[:end])
        pending.prompt = all_cold(text, front + segments.pieces(text[end:]))
        pending.media, pending.exact_pieces = prompt, len(front)
        return pending

    def look_up(self, pending: PendingPrompt) -> PendingPrompt:
        """Look up the known segments of a rendered text. What follows a cached prefix is new."""
        found, salt = pending.prompt, pending.generation.salt
        if isinstance(found, Lookup) and (pending.prefix is None or pending.prefix is EMPTY_PREFIX):
            pending.prompt = self.segments.look_up(found.text, framed=pending.framed, pieces=found.cold, salt=salt)
        return pending

    def begin(self, request: InferenceRequest, conversion: type[Conversion] | None = None) -> PendingPrompt:
        """`open`, `render` and `look_up`. Raises what `render` raises."""
        pending = self.open(request, conversion)
        if not self.render_new(pending):
            self.render(pending)
        return self.look_up(pending)

    def finish(self, pending: PendingPrompt) -> PromptPrefix:
        """Encode the new text and hash the blocks. Safe in a worker thread; see the class."""
        generation, seed, prompt, prefix = pending.generation, pending.seed, pending.prompt, pending.prefix
        block = generation.block_size_tokens
        if not isinstance(prompt, Lookup):
            return PromptPrefix(generation, prompt, hash_blocks(prompt, block, seed))
        segments, tokens = self.segments.complete(prompt), prompt.head[:]
        if prefix is not None:
            tokens.frombytes(prefix.tokens)
        known_tokens = len(tokens)
        for segment in segments:
            tokens.frombytes(segment.tokens)
        tokens.extend(prompt.tail)
        if prefix is None or prefix is EMPTY_PREFIX:
            hashes = hash_path(tokens, segments, seed, block)
            self.segments.keep(prompt, segments)
        else:
            known = hash_array(prefix.hashes if prefix.seed == seed else b"")
            hashes = hash_rest(known, tokens[len(known) * block :], block, seed)
        if pending.entry is not None:
            known_tokens += sum([segment.token_count for segment in segments[: pending.entry_pieces]])
            pending.store_entry(tokens[:known_tokens], hashes)
        if pending.media is not None:
            exact_tokens = sum([segment.token_count for segment in segments[: pending.exact_pieces]])
            return self._with_pictures(PromptPrefix(generation, tokens, hashes), pending.media, exact_tokens, seed)
        return PromptPrefix(generation, tokens, hashes)

    def read_slowly(self, request: InferenceRequest, pending: PendingPrompt) -> tuple[str, PromptPrefix] | None:
        """(text, prefix) of a prompt that was served as `pending`, by the reference tokenizer and without any cache;
        None for a prompt of tokens or with pictures. Safe in any thread. Raises what `render` raises."""
        if isinstance(self._template, Harmony) or pending.media is not None:
            return None  # the texts of Harmony are encoded one by one
        text: Any = pending.prompt.text if isinstance(pending.prompt, Lookup) else None
        if pending.prefix is not None:
            text = self._prompt(request, pending.conversion)[0]
        if not isinstance(text, str):
            return None
        generation, tokens = pending.generation, self._tokenizer.encode_slowly(text, add_special_tokens=pending.framed)
        return text, PromptPrefix(generation, tokens, hash_blocks(tokens, generation.block_size_tokens, pending.seed))

    def _with_pictures(self, text: PromptPrefix, media: MediaText, exact_tokens: int, seed: BlockHash) -> PromptPrefix:
        """The prefix with pictures in place of their placeholders. Its hashes end in front of the first picture whose
        tokens are unknown."""
        tokens, hashes, placed = token_array(text.tokens), hash_array(text.hashes), list[tuple[int, Picture]]()
        if self.pictures is not None and media.pictures:
            tokens, exact_tokens, placed = expanded(tokens, exact_tokens, self.pictures.placeholder, media.pictures)
        block = text.block_size_tokens
        if placed:
            hashes = hash_pictures(hashes, tokens[:exact_tokens], placed, block, seed)
        seen = [PromptPicture(one.key, at + one.token_count, one.token_count) for at, one in placed]
        seen += [PromptPicture(key, None, TOKENS) for key in media.keys]
        unknown_tokens = (media.count - len(placed)) * TOKENS
        return PromptPrefix(
            text.generation, tokens, hashes[: exact_tokens // block], unknown_tokens, tuple(seen[-MAX_KEYS:])
        )

    def fingerprint(self, request: InferenceRequest, conversion: type[Conversion] | None = None) -> PromptPrefix:
        """`begin` and `finish`. Raises what `begin` raises."""
        return self.finish(self.begin(request, conversion))

    def _seed(self, adapter: str, salt: str) -> tuple[Generation, BlockHash]:
        generation = replace(self.generation, adapter=adapter, salt=salt)
        return generation, generation_seed(generation)

    def _prompt(
        self,
        request: InferenceRequest,
        conversion: type[Conversion] | None = None,
        identities: PictureIdentities | None = None,
    ) -> tuple[str | MediaText | SeparateTexts | array[int], bool]:
        """(the prompt as text or tokens, whether special tokens are put around the text)."""
        body = request.prompt
        for name in _REWRITTEN:
            if body.get(name) is not None:
                raise Unrenderable(UnreadReason.REWRITTEN, f"{name} changes the prompt inside the engine")
        if request.endpoint.api.prompt is PromptKind.CHAT or conversion is not None:
            if self._template is None:
                raise Unrenderable(UnreadReason.NO_TEMPLATE, "this model has no chat template")
            if conversion is not None:
                return self._converted_prompt(request, conversion, identities)
            chat = with_decoded_messages(body)
            return _rendered(self._template, chat, _unchanged(body, identities)), checked(
                body, "add_special_tokens", bool, False
            )
        if request.endpoint.api.prompt is PromptKind.COMPLETION:
            return self._completions.read(body.get("prompt")), checked(body, "add_special_tokens", bool, True)
        if request.endpoint.api.is_converted:
            raise Unrenderable(UnreadReason.NOT_CONVERTED, "how the engines of this model convert it is not known")
        raise Unrenderable(UnreadReason.NO_PREFIX, f"{request.endpoint} shares no prefix")

    def _converted_prompt(
        self, request: InferenceRequest, kind: type[Conversion], identities: PictureIdentities | None
    ) -> tuple[str | MediaText | SeparateTexts, bool]:
        """As `_prompt`, for a prompt that engines convert to a chat. Raises `Unrenderable`, also where the chat is
        refused: the conversion may be that of another version of the engine."""
        assert self._template is not None
        if isinstance(self._template, Harmony):
            if kind.in_harmony is None:
                raise Unrenderable(UnreadReason.NOT_CONVERTED, "this engine does not render Harmony as vLLM does")
            kind = kind.in_harmony
        conversion = self.made(kind)
        try:
            chat, identities = conversion.template_body(request.prompt), _unchanged(request.prompt, identities)
            text = _rendered(conversion.template, chat, identities, keeps_empty_tools=True)
            return text, conversion.encloses(request.prompt)
        except MalformedRequest as error:
            if request.endpoint.api.prompt is PromptKind.CHAT and error.param == "chat_template":
                raise
            raise Unrenderable(UnreadReason.NOT_CONVERTED, str(error)) from error

    def _check_length(self, prompt: str | array[int], context_tokens: int | None, endpoint: Endpoint) -> None:
        """Raises `ContextTooLong` if the prompt has more token ids than the context, and `Unrenderable` if it is too
        long to be encoded."""
        limit = context_tokens or self._max_prompt_tokens
        if isinstance(prompt, str):
            if len(prompt) > limit * CHARACTERS_PER_TOKEN:
                raise Unrenderable(UnreadReason.TOO_LONG, f"the prompt has {len(prompt)} characters")
        elif len(prompt) > limit:
            raise ContextTooLong(
                f"This model's maximum context length is {limit} tokens, but the prompt has {len(prompt)}. "
                "Please shorten it.",
                param=endpoint.api.length_field,
            )


def _rendered(
    template: ChatTemplate | Harmony,
    body: Mapping[str, Any],
    identities: PictureIdentities | None,
    *,
    keeps_empty_tools: bool = False,
) -> str | MediaText | SeparateTexts:
    """The prompt of a chat's body. Raises what `ChatTemplate.render` raises. Other renderers read no pictures."""
    if not isinstance(template, ChatTemplate):
        return template.render(body)
    try:
        return template.render(body, keeps_empty_tools=keeps_empty_tools)
    except Unrenderable as error:
        if error.reason is not UnreadReason.MEDIA:
            raise
    try:
        return template.render_media(body, keeps_empty_tools=keeps_empty_tools, identities=identities)
    except MalformedRequest as error:  # what a template does with pictures may depend on the engine
        raise Unrenderable(UnreadReason.MEDIA, str(error)) from error


def _unchanged(body: Mapping[str, Any], identities: PictureIdentities | None) -> PictureIdentities | None:
    """How the engine identifies the pictures of a body; None where it may change them."""
    return None if any(body.get(name) is not None for name in _PICTURE_OPTIONS) else identities
