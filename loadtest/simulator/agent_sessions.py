"""Recorded sessions of coding agents as closed-loop traffic.

One JSON object a line: a session with its requests in order. Most of a prompt is what an earlier request of the session
sent, and sessions with the same tools and system prompt share these. Every next request starts after the answer to the
one before, plus its pause.

A recording has no common clock, so this module chooses the starts. At load 1 a session starts every `STARTS_EVERY_S` on
average, for `DURATION_S`; a load multiplies that rate, and so the number of sessions at once. Requests that were
recorded later than the end are left out, so every policy answers the same requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from random import Random
from typing import Annotated, TypeAlias

import msgspec

from loadtest.simulator.traffic import Session, Traffic, TrafficRequest
from router.cli.receipt_files import decoded_lines
from router.errors import ConfigError
from router.types import BlockHash

STARTS_EVERY_S = 90.0
DURATION_S = 7200.0
MAX_PROMPT_TOKENS = 1 << 24
_FIRST_OWN_ID = 1 << 48
"""Ids below belong to shared blocks."""

_TokenCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class AgentRequest(msgspec.Struct, frozen=True):
    """One request, `t` seconds after the session began in the recording. Its first `keep_blocks` blocks are those of
    request `base` of the session; without a `base`, only tools and system prompt are shared. `think_s` is the pause
    since the previous answer."""

    t: _Seconds
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROMPT_TOKENS)]
    output_tokens: _TokenCount
    think_s: _Seconds = 0.0
    base: Annotated[int, msgspec.Meta(ge=0)] | None = None
    keep_blocks: _TokenCount = 0


class AgentSession(msgspec.Struct, frozen=True):
    block_tokens: Annotated[int, msgspec.Meta(ge=1)]
    requests: Annotated[list[AgentRequest], msgspec.Meta(min_length=1)]
    tool_tokens: _TokenCount = 0
    system_tokens: _TokenCount = 0

    def __post_init__(self) -> None:
        for number, request in enumerate(self.requests):
            if request.base is None:
                continue
            if request.base >= number:
                raise ValueError(f"request {number}: base {request.base} is not an earlier request")
            shorter = min(request.prompt_tokens, self.requests[request.base].prompt_tokens)
            if request.keep_blocks * self.block_tokens > shorter:
                raise ValueError(f"request {number}: keep_blocks {request.keep_blocks} exceeds {shorter} prompt tokens")


def read_agent_sessions(path: Path) -> list[AgentSession]:
    """All sessions. Raises `ConfigError` with the number of an invalid line, or if block sizes differ."""
    sessions = list(decoded_lines(path, msgspec.json.Decoder(AgentSession).decode, "invalid line of agent sessions"))
    if len(sizes := {session.block_tokens for session in sessions}) != 1:
        raise ConfigError(f"{path}: all sessions must have one `block_tokens`; found {sorted(sizes)}")
    return sessions


def agent_traffic(
    recorded: Sequence[AgentSession], *, speedup: float = 1.0, seed: int = 0, duration_s: float = DURATION_S
) -> Traffic:
    """Poisson starts of sessions in a random order. Each starts once before any starts again, then with new blocks."""
    return Traffic(recorded[0].block_tokens, _sessions(recorded, speedup, seed, duration_s))


def _sessions(recorded: Sequence[AgentSession], speedup: float, seed: int, duration_s: float) -> Iterator[Session]:
    random, own_ids = Random(seed), count(_FIRST_OWN_ID)
    prefixes = {prefix: number << 24 for number, prefix in enumerate(dict.fromkeys(map(_prefix, recorded)))}
    order = chain.from_iterable(random.sample(recorded, len(recorded)) for _ in count())
    start_s = random.expovariate(speedup / STARTS_EVERY_S)
    while start_s < duration_s:
        session = next(order)
        requests = tuple(_requests(session, duration_s - start_s, prefixes[_prefix(session)], own_ids))
        if requests:
            yield Session(start_s, requests, "agent")
        start_s += random.expovariate(speedup / STARTS_EVERY_S)


def _prefix(session: AgentSession) -> tuple[int, int]:
    """Equal in sessions that share tools and system prompt."""
    return session.tool_tokens, session.system_tokens


def _requests(
    session: AgentSession, until_s: float, first_shared_id: int, own_ids: Iterator[BlockHash]
) -> Iterator[TrafficRequest]:
    """The requests recorded before `until_s`. Answers are not in the recording, so only prompts are shared."""
    size = session.block_tokens
    shared = array("Q", range(first_shared_id, first_shared_id + sum(_prefix(session)) // size))
    prompts: list[array[int]] = []
    for request in session.requests:
        if request.t >= until_s:
            return
        kept = shared if request.base is None else prompts[request.base][: request.keep_blocks]
        total = request.prompt_tokens // size
        blocks = kept[:total]
        blocks.extend(islice(own_ids, total - len(blocks)))
        prompts.append(blocks)
        yield TrafficRequest(request.prompt_tokens, max(request.output_tokens, 1), blocks, total, request.think_s)
