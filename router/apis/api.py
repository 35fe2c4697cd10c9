"""The record of an API: all that the router must know of it.

A new API is a record in a module of this package and a line in `endpoints.py`. Where engines make a chat of its bodies,
each in its own way, their adapters name a conversion (`prompt/apis`). The mock engine has a format for its responses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

import msgspec

from router.apis.body_types import OtherBody

Body: TypeAlias = dict[str, Any]
MakeProbes: TypeAlias = Callable[[str, str, int | None], Iterable[Sequence[Body]]]
"""Makes groups of probes from a model, a nonce and the pod's block size. Of each group the first that the router reads
is sent."""


class PromptKind(Enum):
    CHAT = auto()
    """`messages` in the form of OpenAI's chats."""
    CONVERTED = auto()
    """As the chat that the pods' engine makes of the body, each in its own way."""
    COMPLETION = auto()
    TOKENIZED = auto()
    """The chat or completion whose tokens are asked for."""
    TEXTS = auto()
    """Only the number of tokens is read, where the body has texts to embed, score or rank."""
    NONE = auto()


class ResponseFormat(NamedTuple):
    """Where the responses of one API have their first token and their usage. Quotes and newlines inside generated text
    are escaped in JSON, so a model cannot generate these patterns in a stream."""

    first_token: re.Pattern[bytes]
    prompt: tuple[re.Pattern[bytes], ...]
    """Parts of the prompt's length: absent ones are 0, except the first."""
    cached: re.Pattern[bytes]
    output: re.Pattern[bytes]
    preamble: re.Pattern[bytes] | None = None
    """Begin of a stream whose first events are sent before the prefill. Such a stream and any unstreamed response have
    their first token nowhere else than in `first_token` and at their begin."""
    id: re.Pattern[bytes] | None = None
    """The id under which the engine may store the response."""


def count_named(name: bytes) -> re.Pattern[bytes]:
    return re.compile(rb'"%b": ?(\d{1,12})\b' % name)


@dataclass(frozen=True, slots=True, eq=False)
class Conventions:
    """What the APIs of one provider have in common: error objects and the headers of limits."""

    prefix: str
    """Paths that are this one or below it have these errors; "" for all others."""
    error_kind: Callable[[int, str], str]
    """`error.type` by status and OpenAI's type."""
    error_object: Callable[[Mapping[str, str | None]], Body]
    """The whole error from its fields `message`, `type`, `param` and `code`."""
    limits: Mapping[bytes, str]
    """The names that limits have in headers, and whose they are: an attribute of `Applied`."""
    limit_header: bytes
    """The name of a header, with `%(of)b` and `%(value)b`."""
    resets_at_time: bool
    """Whether the time until a limit is whole again is a time of day, else a duration."""
    ping: bytes = b": keep-alive\n\n"
    """What says in a stream that its request still waits."""

    def limit_headers(self, of: bytes) -> tuple[bytes, bytes, bytes]:
        """The names of the headers with limit, rest and reset of one limit."""
        values = (b"limit", b"remaining", b"reset")
        limit, left, reset = (self.limit_header % {b"of": of, b"value": one} for one in values)
        return limit, left, reset


OPENAI = Conventions(
    prefix="",
    error_kind=lambda _status, kind: kind,
    error_object=lambda fields: {"error": fields},
    limits={b"requests": "requests", b"tokens": "tokens"},
    limit_header=b"x-ratelimit-%(value)b-%(of)b",
    resets_at_time=False,
)

# The first chat chunk carries only a role and an empty content: it is not the first token.
CHAT_FORMAT = ResponseFormat(
    re.compile(rb'"(?:content|reasoning_content|reasoning|text|arguments)": ?"[^"]'),
    (count_named(b"prompt_tokens"),),
    count_named(b"cached_tokens"),
    count_named(b"completion_tokens"),
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Api:
    """One API, by its path."""

    path: str
    prompt: PromptKind
    conventions: Conventions = OPENAI
    response: ResponseFormat = CHAT_FORMAT
    body: type[msgspec.Struct] = OtherBody
    """The fields that the router decodes; all others are forwarded as received."""
    prompt_fields: tuple[str, ...] = ()
    raw_fields: frozenset[str] = frozenset()
    """Those that a decoder leaves undecoded, besides numbers."""
    items: str = ""
    """The list whose items `limits.max_messages` bounds."""
    may_name_no_model: bool = False
    """Whether its body may be anything."""
    generates: bool = True
    """Whether its answers have new tokens."""
    is_about_tokens: bool = False
    """Whether the router may answer it from the tokens of the prompt."""
    takes_uuids: bool = True
    """Whether engines read a `uuid` of its pictures."""
    shows_pictures: bool = False
    """Whether a prompt without pictures that was read shows that the body has none."""
    may_be_stored: bool = False
    """Whether a pod may keep responses for later requests, which must not be repeated then."""
    operation: str = ""
    """`gen_ai.operation.name` of its spans."""
    probes: MakeProbes | None = None
    """Bodies that show whether an engine converts as the router does."""
    proven_with: str = ""
    """Path of the API whose probes also show it for this one."""

    @property
    def is_chat(self) -> bool:
        return self.prompt is PromptKind.CHAT or self.prompt is PromptKind.CONVERTED

    @property
    def is_converted(self) -> bool:
        """Whether every engine converts its bodies to a chat in its own way."""
        return self.prompt is PromptKind.CONVERTED

    @property
    def length_field(self) -> str:
        """The field that an error about a prompt's length names."""
        return "prompt" if self.prompt is PromptKind.COMPLETION else "messages"


# --- texts of the bodies that the parity self-test sends to a pod ---

PROBE_BLOCKS = 4
"""Minimum length of the probe in engine blocks. Several, so that the hashes of parent blocks are tested as well."""
ASSUMED_BLOCK_TOKENS = 64
"""Block size of an engine that does not report it."""
WORDS = "naïve café 東京 Привет 🚀 ﬁne\tprint(1) don't  İstanbul 12345 … 한국어 ṩ end."
"""Each word is at least one token."""


def long_text(block_tokens: int | None) -> str:
    words = WORDS.split(" ")
    length = PROBE_BLOCKS * (block_tokens or ASSUMED_BLOCK_TOKENS)
    return " ".join(words[i % len(words)] for i in range(length))


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
