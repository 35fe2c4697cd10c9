"""Does this pod's cache mean what the router thinks it means?

The judgement of the parity self-test: what a probe prompt looks like, and what follows from how the engine took it.
A router whose tokens or hashes differ from the engine's keeps working and never hits anything; this test is why it is
noticed. Pure: `selftest.py` does the asking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from router.types import Endpoint, PrefixTrust, PromptPrefix

PROBE_BLOCKS = 4
"""Length of the probe in engine blocks, at the least: more than 3, so that parents are tested, too."""
ASSUMED_BLOCK_TOKENS = 64
"""Of an engine that does not tell."""
_NEIGHBOURS = 4
_WORDS = "naïve café 東京 Привет 🚀 ﬁne\tprint(1) don't  İstanbul 12345 … 한국어 ṩ end."

Probe: TypeAlias = tuple[Endpoint, dict[str, Any]]


class Parity(StrEnum):
    """Outcome of one half of the test."""

    OK = "ok"
    MISMATCH = "mismatch"
    UNKNOWN = "unknown"
    NO_EVENTS = "no_events"
    """The pod publishes none, so there are no hashes to compare."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What the self-test found. `reason` is for people: what differs, and what to do about it."""

    tokens: Parity
    hashes: Parity
    reason: str

    @property
    def trust(self) -> PrefixTrust:
        """Hashes that agree prove the tokens as well, since events carry the engine's own tokens. Without events, equal
        tokens are enough: then the index holds nothing but what this router sent. Nothing proven is UNTESTED."""
        if Parity.MISMATCH in (self.tokens, self.hashes):
            return PrefixTrust.MISMATCH
        if self.hashes is Parity.OK or (self.hashes is Parity.NO_EVENTS and self.tokens is Parity.OK):
            return PrefixTrust.TRUSTED
        return PrefixTrust.UNTESTED


def probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Probe]:
    """Requests to try, the most telling first: a chat with several roles, one without a system message (some templates
    refuse it), a plain completion. `nonce` makes them cold; a word is a token at least, which gives the length."""
    words = _WORDS.split(" ")
    length = PROBE_BLOCKS * (block_tokens or ASSUMED_BLOCK_TOKENS)
    text = " ".join(words[i % len(words)] for i in range(length))
    system = {"role": "system", "content": f"{nonce} You are a probe. {_WORDS}"}
    turns = [
        {"role": "user", "content": f"{nonce}\n{text}"},
        {"role": "assistant", "content": f"Well, {_WORDS}"},
        {"role": "user", "content": "And?"},
    ]
    asked = {"model": model, "max_tokens": 1, "temperature": 0}
    yield Endpoint.CHAT, {**asked, "messages": [system, *turns]}
    yield Endpoint.CHAT, {**asked, "messages": turns}
    yield Endpoint.COMPLETIONS, {**asked, "prompt": f"{nonce} {text}"}


def judge_tokens(ours: Sequence[int], engine: Sequence[int] | None, engine_count: int | None) -> ParityReport:
    """Compare the router's tokens with the engine's, or with their number where the engine gives no more. The number
    is enough for an engine without events: the index then need only agree with itself."""
    if engine is not None:
        same = len(ours) == len(engine) and all(a == b for a, b in zip(ours, engine, strict=True))
        if same:
            return ParityReport(Parity.OK, Parity.UNKNOWN, f"{len(ours)} tokens agree")
        return ParityReport(Parity.MISMATCH, Parity.UNKNOWN, f"{_difference(ours, engine)}. {_TOKENS_ADVICE}")
    if engine_count is None:
        return ParityReport(Parity.UNKNOWN, Parity.UNKNOWN, "the engine tells neither its tokens nor their number")
    if engine_count == len(ours):
        return ParityReport(Parity.OK, Parity.UNKNOWN, f"the number of tokens, {engine_count}, agrees")
    differs = f"the engine counts {engine_count} tokens where the router has {len(ours)}"
    return ParityReport(Parity.MISMATCH, Parity.UNKNOWN, f"{differs}. {_TOKENS_ADVICE}")


def expected_blocks(prompt: PromptPrefix, engine_block_tokens: int | None) -> int:
    """Router blocks that the engine must announce for a prompt it has computed: those in its full blocks."""
    block = engine_block_tokens or prompt.block_size_tokens
    return prompt.token_count // block * block // prompt.block_size_tokens


def judge_hashes(tokens: ParityReport, known_blocks: int, expected: int, refused: str) -> ParityReport:
    """Add what the pod's events have shown of the probe. `refused`: why its events cannot be indexed at all, or ""."""
    if refused:
        return ParityReport(tokens.tokens, Parity.MISMATCH, refused)
    if known_blocks >= expected:
        return ParityReport(tokens.tokens, Parity.OK, f"{tokens.reason}; {expected} announced blocks agree")
    if known_blocks == 0:
        why = "none of the probe's blocks was announced in time. Can the router reach the pod's KV event endpoint?"
    else:
        why = f"only {known_blocks} of the probe's {expected} blocks were announced in time or hash alike"
    return ParityReport(tokens.tokens, Parity.MISMATCH, f"{tokens.reason}; {why}")


_TOKENS_ADVICE = "Give this model the tokenizer and chat template that the engine uses (models[] in the configuration)."


def _difference(ours: Sequence[int], engine: Sequence[int]) -> str:
    pairs = zip(ours, engine, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(engine)))
    around = slice(max(at - _NEIGHBOURS, 0), at + _NEIGHBOURS + 1)
    return (
        f"token {at} differs: router ...{list(ours[around])}... ({len(ours)} in all), "
        f"engine ...{list(engine[around])}... ({len(engine)} in all)"
    )
