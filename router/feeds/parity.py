"""The parity self-test: its probe prompts, and what the engine's answers prove.

A router whose tokens or block hashes differ from the engine's serves requests but never predicts a cache hit; the
self-test detects that. This module does no I/O: `selftest.py` sends the probes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from router.types import Endpoint, PrefixTrust, PromptPrefix

PROBE_BLOCKS = 4
"""Minimum length of the probe in engine blocks. Several, so that the hashes of parent blocks are tested as well."""
ASSUMED_BLOCK_TOKENS = 64
"""Block size of an engine that does not report it."""
_NEIGHBOURS = 4
_WORDS = "naïve café 東京 Привет 🚀 ﬁne\tprint(1) don't  İstanbul 12345 … 한국어 ṩ end."

Probe: TypeAlias = tuple[Endpoint, dict[str, Any]]


class Parity(StrEnum):
    """Outcome of one half of the test."""

    OK = "ok"
    MISMATCH = "mismatch"
    UNKNOWN = "unknown"
    NO_EVENTS = "no_events"
    """The pod publishes no KV events, so there are no hashes to compare."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The result of a self-test. `reason` names the difference and what to do."""

    tokens: Parity
    hashes: Parity
    reason: str

    @property
    def trust(self) -> PrefixTrust:
        """Equal hashes prove equal tokens, because KV events carry the engine's tokens. Without events, equal tokens
        are enough: the index then only contains what this router sent."""
        if Parity.MISMATCH in (self.tokens, self.hashes):
            return PrefixTrust.MISMATCH
        if self.hashes is Parity.OK or (self.hashes is Parity.NO_EVENTS and self.tokens is Parity.OK):
            return PrefixTrust.TRUSTED
        return PrefixTrust.UNTESTED


def probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Probe]:
    """Probe requests, the most thorough first: a chat with several roles, one without a system message (some templates
    refuse it), a completion. `nonce` prevents cache hits. Each word is at least one token, so the length suffices."""
    words = _WORDS.split(" ")
    length = PROBE_BLOCKS * (block_tokens or ASSUMED_BLOCK_TOKENS)
    text = " ".join(words[i % len(words)] for i in range(length))
    system = {"role": "system", "content": f"{nonce} You are a probe. {_WORDS}"}
    turns = [
        {"role": "user", "content": f"{nonce}\n{text}"},
        {"role": "assistant", "content": f"Well, {_WORDS}"},
        {"role": "user", "content": "And?"},
    ]
    common = {"model": model, "max_tokens": 1, "temperature": 0}
    yield Endpoint.CHAT, {**common, "messages": [system, *turns]}
    yield Endpoint.CHAT, {**common, "messages": turns}
    yield Endpoint.COMPLETIONS, {**common, "prompt": f"{nonce} {text}"}


def compare_tokens(ours: Sequence[int], engine: Sequence[int] | None, engine_count: int | None) -> ParityReport:
    """Compare the router's tokens with the engine's, or with their number if the engine reports only that. The number
    is enough for an engine without KV events."""
    if engine is not None:
        same = len(ours) == len(engine) and all(a == b for a, b in zip(ours, engine, strict=True))
        if same:
            return ParityReport(Parity.OK, Parity.UNKNOWN, f"{len(ours)} tokens are equal")
        return ParityReport(Parity.MISMATCH, Parity.UNKNOWN, f"{_difference(ours, engine)}. {_TOKENS_ADVICE}")
    if engine_count is None:
        return ParityReport(Parity.UNKNOWN, Parity.UNKNOWN, "the engine reports neither tokens nor their number")
    if engine_count == len(ours):
        return ParityReport(Parity.OK, Parity.UNKNOWN, f"the number of tokens, {engine_count}, is equal")
    differs = f"the engine counts {engine_count} tokens where the router has {len(ours)}"
    return ParityReport(Parity.MISMATCH, Parity.UNKNOWN, f"{differs}. {_TOKENS_ADVICE}")


def expected_blocks(prompt: PromptPrefix, engine_block_tokens: int | None) -> int:
    """Number of router blocks that the engine must announce for the prompt: those inside its full blocks."""
    block = engine_block_tokens or prompt.block_size_tokens
    return prompt.token_count // block * block // prompt.block_size_tokens


def compare_hashes(tokens: ParityReport, known_blocks: int, expected: int, rejected: str) -> ParityReport:
    """Add the result of the pod's KV events. `rejected`: why the index rejects its events, or ""."""
    if rejected:
        return ParityReport(tokens.tokens, Parity.MISMATCH, rejected)
    if known_blocks >= expected:
        return ParityReport(tokens.tokens, Parity.OK, f"{tokens.reason}; {expected} announced blocks are equal")
    if known_blocks == 0:
        why = "no block of the probe was announced in time; check that the router can reach the pod's KV event endpoint"
    else:
        why = f"only {known_blocks} of {expected} blocks of the probe were announced in time with equal hashes"
    return ParityReport(tokens.tokens, Parity.MISMATCH, f"{tokens.reason}; {why}")


_TOKENS_ADVICE = "Configure the tokenizer and chat template that the engine uses (`models` in the configuration)."


def _difference(ours: Sequence[int], engine: Sequence[int]) -> str:
    pairs = zip(ours, engine, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(engine)))
    around = slice(max(at - _NEIGHBOURS, 0), at + _NEIGHBOURS + 1)
    return (
        f"token {at} differs: router ...{list(ours[around])}... ({len(ours)} in all), "
        f"engine ...{list(engine[around])}... ({len(engine)} in all)"
    )
