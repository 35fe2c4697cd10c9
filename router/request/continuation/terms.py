"""Reads from a request's body which ways of continuing its stream are exact.

Sources and recordings: docs/continuation.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from router.types import Endpoint

MAX_STOP_CHARACTERS = 1024
"""All stop strings together have at most as many: text as long is decoded with each token behind the seam."""
_GRAMMARS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


class _UsageAsked(msgspec.Struct):
    include_usage: bool | None = None


class _AskedBody(msgspec.Struct):
    """The fields that matter, of all APIs."""

    temperature: float | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stream_options: _UsageAsked | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    include_reasoning: bool | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    use_beam_search: bool | None = None
    repetition_detection: Any = None
    stream_interval: int | None = None


_BODY = msgspec.json.Decoder(_AskedBody, strict=False)
WITH_IDS = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS})
"""Endpoints whose streams may have token ids."""
REPEATED = frozenset({Endpoint.MESSAGES, Endpoint.RESPONSES})
"""Those whose streams have none: greedy ones are made again, others are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a stream may be continued. Reasons are names; empty: nothing is against it."""

    refusal: str = ""
    """Why it cannot be continued at all once something was sent."""
    no_ids: str = ""
    """Why not from its ids."""
    no_replay: str = ""
    """Why not by making it again."""
    is_chat: bool = True
    has_grammar: bool = False
    """Whether a grammar begins with the content: ids continue only the reasoning in front of it."""
    may_call: bool = False
    """Whether the model may call tools when it likes."""
    holds_calls: bool = False
    """Whether calls are held until they are whole: they are sampled, so none that has begun can be made again."""
    hides_reasoning: bool = False
    """Whether the router hides it. Else the pod does, whose grammars begin at once then, and which sends no ids."""
    wants_usage: bool = False
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    includes_stop: bool = False
    """Whether a stop string is part of the answer; then no text is held back."""
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[str, float], ...] = ()

    @property
    def announced(self) -> str:
        """Until where it may be continued, for the client; a tracker says itself where it is refused."""
        if self.no_replay and self.has_grammar:
            return "until=content"
        return "until=tool-call" if self.no_replay and self.may_call and not self.holds_calls else "yes"


def terms_of(
    endpoint: Endpoint, body: bytes, *, has_media: bool = False, holds_calls: bool = False, shows_usage: bool = True
) -> Terms:
    """The terms of a streamed request. `shows_usage`: whether its client sees the usage that the body asks for."""
    try:
        asked = _BODY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Terms(refusal="body")
    if endpoint in REPEATED:
        return Terms(refusal=_refusal_to_repeat(asked))
    if refusal := _refusal(asked):
        return Terms(refusal=refusal)
    choice, stops = asked.tool_choice, [asked.stop] if isinstance(asked.stop, str) else asked.stop or ()
    has_grammar, is_forced = _has_grammar(asked), choice == "required" or isinstance(choice, dict)
    is_greedy = asked.temperature == 0
    no_replay = "" if is_greedy or asked.seed is not None else "sampled"
    has_tools = bool(asked.tools) and choice != "none"
    options = asked.stream_options
    hides, needs_pod = asked.include_reasoning is False, has_grammar or is_forced or bool(asked.logprobs)
    return Terms(
        no_ids="hidden reasoning" if hides and needs_pod else _no_ids(asked, is_greedy, has_media, has_tools),
        no_replay=no_replay,
        is_chat=endpoint is Endpoint.CHAT,
        has_grammar=has_grammar or is_forced,
        may_call=has_tools and not is_forced,
        holds_calls=holds_calls and has_tools and not is_forced and bool(no_replay),
        hides_reasoning=hides and not needs_pod,
        wants_usage=shows_usage and options is not None and options.include_usage is True,
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        stops=tuple(one for one in stops if one),
        includes_stop=asked.include_stop_str_in_output is True,
        frequency_penalty=asked.frequency_penalty or 0.0,
        logit_bias=tuple((asked.logit_bias or {}).items()),
    )


def _refusal_to_repeat(asked: _AskedBody) -> str:
    if asked.temperature != 0:
        return "sampled"
    has_logprobs = asked.top_logprobs or any("logprobs" in one for one in asked.include or ())
    return "log probabilities" if has_logprobs else ""


def _refusal(asked: _AskedBody) -> str:
    """Fields with which nothing is exact, or nothing was tried."""
    if (asked.n or 1) != 1 or (asked.best_of or 1) != 1:
        return "n"
    if asked.echo or asked.suffix or asked.use_beam_search or asked.repetition_detection:
        return "echo, suffix, beams or repetition detection"
    shown = asked.return_token_ids or asked.return_tokens_as_token_ids
    return "token ids" if shown or asked.stream_interval is not None else ""


def _no_ids(asked: _AskedBody, is_greedy: bool, has_media: bool, has_tools: bool) -> str:
    """Why the second pod would not be in the state of the first one."""
    if has_media:
        return "media"
    if asked.seed is not None and not is_greedy:
        return "seed"
    if asked.presence_penalty:
        return "presence penalty"
    if asked.frequency_penalty and (is_greedy or (asked.repetition_penalty or 1.0) != 1.0):
        return "frequency penalty"  # greedy: made again instead, which is proven for more bodies
    if asked.bad_words:
        return "bad words"
    if asked.stop and has_tools:
        return "stop strings and tools"
    if asked.stop and asked.min_tokens:
        return "stop strings and min_tokens"
    if sum(map(len, asked.stop or ())) > MAX_STOP_CHARACTERS:
        return "long stop strings"
    special = asked.skip_special_tokens is False or asked.spaces_between_special_tokens is False
    return "special tokens" if special else ""


def _has_grammar(asked: _AskedBody) -> bool:
    kind = (asked.response_format or {}).get("type", "text")
    return kind != "text" or any(getattr(asked, name) is not None for name in _GRAMMARS)
