"""Traffic as values: sessions of requests, as block hashes and lengths.

Two prompts share the prefix that their leading block hashes have in common; there is no text. This module also reads
recorded traffic: Mooncake traces and our own receipts. Neither contains the blocks of answers, so only prompts are
shared, unless `with_answers` finds those that a later prompt repeats. `generate.py` generates traffic.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from router.cli.receipt_files import decoded_lines
from router.errors import ConfigError
from router.hashing import hash_blocks
from router.observe.receipts import Receipt
from router.types import BlockHash

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """One prompt and the length of its answer, both at least 1 token.

    `blocks[i]` is the hash of block i and everything before it. The first `prompt_blocks` belong to the prompt, whose
    end may cut the last of them short; the answer fills the rest. `think_s` is the pause since the previous answer.
    """

    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[BlockHash]
    prompt_blocks: int
    think_s: float = 0.0

    @property
    def prompt_hashes(self) -> Sequence[BlockHash]:
        return self.blocks[: self.prompt_blocks]


def hashed_request(prompt: array[int], output: array[int], block_size_tokens: int) -> TrafficRequest:
    """A request of tokens. As in an engine, whole blocks are reusable, without the prompt's last token."""
    hashes = hash_blocks(prompt + output[:-1], block_size_tokens, 0)
    return TrafficRequest(len(prompt), max(len(output), 1), hashes, max(len(prompt) - 1, 0) // block_size_tokens)


class IdealCache:
    """One cache for all pods that never evicts: the upper bound of reuse."""

    def __init__(self, block_size_tokens: int) -> None:
        self._block = block_size_tokens
        self._known: set[BlockHash] = set()

    def serve(self, request: TrafficRequest) -> int:
        """Returns the cached prompt tokens, then adds the request's computed blocks."""
        blocks, prompt_blocks = request.blocks, request.prompt_blocks
        found = next((at for at in range(prompt_blocks) if blocks[at] not in self._known), prompt_blocks)
        full = (request.prompt_tokens + request.output_tokens - 1) // self._block
        self._known.update(blocks[: max(prompt_blocks, full)])
        return min(found * self._block, request.prompt_tokens - 1)


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow one another, each after the previous answer. One request alone is open-loop traffic."""

    start_s: float
    requests: tuple[TrafficRequest, ...]
    kind: str = "any"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sessions in the order of their start. `sessions` may be a generator, which can be read only once.

    `request_count` is the number of all requests, or 0 if it is unknown.
    """

    block_size_tokens: int
    sessions: Iterable[Session]
    request_count: int = 0


def with_answers(requests: Sequence[TrafficRequest], block_size_tokens: int) -> list[TrafficRequest]:
    """The same requests, in order of time, with the blocks of the answers that later prompts repeat word by word: of a
    prompt whose last whole block is new, those behind it in the first later prompt that has this block and is long
    enough. A block that the prompt cuts short is left out: the answer fills it."""
    awaited: dict[BlockHash, int] = {}
    seen: set[BlockHash] = set()
    answers: dict[int, Sequence[BlockHash]] = {}
    for number, request in enumerate(requests):
        blocks = request.blocks[: request.prompt_tokens // block_size_tokens]
        for block in blocks:
            if (turn := awaited.get(block)) is not None:
                end_tokens = requests[turn].prompt_tokens + requests[turn].output_tokens
                if end_tokens <= request.prompt_tokens:
                    whole = requests[turn].prompt_tokens // block_size_tokens
                    answers[turn] = blocks[whole : (end_tokens - 1) // block_size_tokens]
                    del awaited[block]
        if len(blocks) and blocks[-1] not in seen:
            awaited[blocks[-1]] = number
        seen.update(blocks)
    return [_answered(one, answers.get(number, ()), block_size_tokens) for number, one in enumerate(requests)]


def _answered(request: TrafficRequest, answer: Sequence[BlockHash], block_size_tokens: int) -> TrafficRequest:
    whole = request.prompt_tokens // block_size_tokens
    return replace(request, blocks=array("Q", [*request.blocks[:whole], *answer]), prompt_blocks=whole)


# --- recorded traffic ---


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of a Mooncake trace. `timestamp` is in ms. A hash id identifies its block and everything before it; the
    last block may be shorter."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]

    def __post_init__(self) -> None:
        if self.input_length < 1 or len(self.hash_ids) != -(-self.input_length // MOONCAKE_BLOCK_TOKENS):
            raise ValueError(
                f"{len(self.hash_ids)} blocks of {MOONCAKE_BLOCK_TOKENS} tokens do not match "
                f"input_length {self.input_length}"
            )


class ReceiptLine(msgspec.Struct, frozen=True):
    """The fields of a receipt that a simulation needs (`observe/receipts.py` writes receipts)."""

    at_s: float
    prompt_tokens: int = 0
    output_tokens: int | None = None
    block_size_tokens: int = 0
    blocks: list[int] = []
    model: str = ""


def read_mooncake(path: Path) -> list[TraceRequest]:
    """All lines. Raises `ConfigError` with the number of an invalid line."""
    return list(decoded_lines(path, msgspec.json.Decoder(TraceRequest).decode, "invalid line of a Mooncake trace"))


def read_receipts(path: Path) -> list[ReceiptLine]:
    """Receipts with a prompt and an answer. Raises `ConfigError` with the number of an invalid line."""
    lines = decoded_lines(path, msgspec.json.Decoder(ReceiptLine).decode, "not a receipt")
    return [one for one in lines if one.prompt_tokens and one.output_tokens and one.block_size_tokens]


def mooncake_traffic(
    trace: Sequence[TraceRequest], *, speedup: float = 1.0, jitter_s: float = 0.0, seed: int = 0
) -> Traffic:
    """Open-loop traffic. Arrivals in the public conversation trace are rounded to 3 s; `jitter_s` spreads them."""
    random = Random(seed)
    first_ms = min((one.timestamp for one in trace), default=0.0)
    sessions = [
        _session(
            ((one.timestamp - first_ms) / 1000 + random.uniform(0, jitter_s)) / speedup,
            one.input_length,
            one.output_length,
            [block + 1 for block in one.hash_ids],  # the index has no hash 0
        )
        for one in trace
    ]
    return _open_loop(MOONCAKE_BLOCK_TOKENS, sessions)


def receipts_traffic(
    receipts: Sequence[ReceiptLine | Receipt], *, speedup: float = 1.0, jitter_s: float = 0.0, seed: int = 0
) -> Traffic:
    """Open-loop traffic at the recorded times, in the largest block size of the receipts. Raises `ConfigError` without
    receipts, or if another size does not divide that one."""
    largest = max((one.block_size_tokens for one in receipts), default=0)
    sizes = sorted({one.block_size_tokens for one in receipts})
    if not largest or any(largest % size for size in sizes):
        raise ConfigError(
            f"receipts: all must have one block size or parts of it; {len(receipts)} usable receipts have sizes {sizes}"
        )
    random, first_s = Random(seed), min(one.at_s for one in receipts)
    sessions = []
    for one in receipts:
        start_s, stride = one.at_s - first_s + random.uniform(0, jitter_s), largest // one.block_size_tokens
        blocks = one.blocks[stride - 1 :: stride]
        sessions.append(_session(start_s / speedup, one.prompt_tokens, one.output_tokens or 1, blocks, one.model))
    return _open_loop(largest, sessions)


def _session(
    start_s: float, prompt_tokens: int, output_tokens: int, blocks: Iterable[BlockHash], kind: str = ""
) -> Session:
    hashes = array("Q", blocks)
    request = TrafficRequest(prompt_tokens, max(output_tokens, 1), hashes, len(hashes))
    return Session(start_s, (request,), kind or "any")


def _open_loop(block_size_tokens: int, sessions: list[Session]) -> Traffic:
    sessions.sort(key=lambda session: session.start_s)
    return Traffic(block_size_tokens, sessions, len(sessions))
