"""Reads recorded traffic: Mooncake traces, our own receipts and Azure traces.

In Mooncake's JSONL, block ids show what prompts share; Azure's CSV contains lengths only. A trace does not contain the
blocks of answers, so only prompts are shared.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from router.errors import ConfigError
from router.sim.virtual.traffic import Session, Traffic, TrafficRequest

MOONCAKE_BLOCK_TOKENS = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of a Mooncake trace. `timestamp` is in ms. A hash id identifies its block and everything before it; the
    last block may be shorter."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]


def read_mooncake(path: Path) -> list[TraceRequest]:
    """All lines. Raises `ConfigError` with the number of an invalid line."""
    found: list[TraceRequest] = []
    decode = msgspec.json.Decoder(TraceRequest).decode
    try:
        with path.open("rb") as lines:
            for line in lines:
                one = decode(line)
                if one.input_length < 1 or len(one.hash_ids) != -(-one.input_length // MOONCAKE_BLOCK_TOKENS):
                    raise ValueError(
                        f"{len(one.hash_ids)} blocks of {MOONCAKE_BLOCK_TOKENS} tokens do not match "
                        f"input_length {one.input_length}"
                    )
                found.append(one)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}:{len(found) + 1}: invalid line of a Mooncake trace: {error}") from error
    return found


def mooncake_traffic(
    trace: Sequence[TraceRequest], *, speedup: float = 1.0, jitter_s: float = 0.0, seed: int = 0, name: str = "trace"
) -> Traffic:
    """Open-loop traffic. Arrivals in the public conversation trace are rounded to 3 s; `jitter_s` spreads them."""
    random = Random(seed)
    first_ms = min(one.timestamp for one in trace) if trace else 0.0
    starts = ((one.timestamp - first_ms) / 1000 + random.uniform(0, jitter_s) for one in trace)
    sessions = [
        Session(start_s / speedup, (_ask(one.input_length, one.output_length, array("Q", one.hash_ids)),))
        for start_s, one in zip(starts, trace, strict=True)
    ]
    sessions.sort(key=lambda session: session.start_s)
    return Traffic(MOONCAKE_BLOCK_TOKENS, sessions, len(sessions), name)


def _ask(prompt_tokens: int, output_tokens: int, blocks: array[int]) -> TrafficRequest:
    return TrafficRequest(prompt_tokens, max(output_tokens, 1), blocks, len(blocks))


class ReceiptLine(msgspec.Struct, frozen=True):
    """The fields of a receipt that a simulation needs (`observe/receipts.py` writes receipts)."""

    at_s: float
    prompt_tokens: int = 0
    output_tokens: int | None = None
    block_size_tokens: int = 0
    blocks: list[int] = []
    model: str = ""


def read_receipts(path: Path) -> list[ReceiptLine]:
    """Receipts with a prompt and an answer. Raises `ConfigError` with the number of an invalid line."""
    found: list[ReceiptLine] = []
    number = 0
    decode = msgspec.json.Decoder(ReceiptLine).decode
    try:
        with path.open("rb") as lines:
            for line in lines:
                number += 1
                one = decode(line)
                if one.prompt_tokens and one.output_tokens and one.block_size_tokens:
                    found.append(one)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}:{number}: not a receipt: {error}") from error
    return found


def receipts_traffic(receipts: Sequence[ReceiptLine], *, speedup: float = 1.0, name: str = "receipts") -> Traffic:
    """Open-loop traffic at the recorded times. Raises `ConfigError` without receipts, or if block sizes differ."""
    sizes = {one.block_size_tokens for one in receipts}
    if len(sizes) != 1:
        raise ConfigError(
            f"receipts: all must have one block size; {len(receipts)} usable receipts have sizes {sorted(sizes)}"
        )
    first_s = min(one.at_s for one in receipts)
    sessions = [
        Session(
            (one.at_s - first_s) / speedup,
            (_ask(one.prompt_tokens, one.output_tokens or 1, array("Q", one.blocks)),),
            kind=one.model or "any",
        )
        for one in sorted(receipts, key=lambda one: one.at_s)
    ]
    return Traffic(sizes.pop(), sessions, len(sessions), name)


def azure_traffic(
    path: Path,
    *,
    speedup: float = 1.0,
    block_size_tokens: int = MOONCAKE_BLOCK_TOKENS,
    requests: int | None = None,
) -> Traffic:
    """Open-loop traffic of an Azure LLM trace, or of its first `requests` lines. Its prompts share nothing."""
    sessions: list[Session] = []
    ids = count(1)
    for at_s, prompt_tokens, output_tokens in islice(_azure_rows(path), requests):
        blocks = array("Q", (next(ids) for _ in range(-(-prompt_tokens // block_size_tokens))))
        sessions.append(Session(at_s / speedup, (_ask(prompt_tokens, output_tokens, blocks),)))
    sessions.sort(key=lambda session: session.start_s)
    return Traffic(block_size_tokens, sessions, len(sessions), path.stem)


def _azure_rows(path: Path) -> Iterator[tuple[float, int, int]]:
    number = 1
    first: datetime | None = None
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            if missing := set(AZURE_COLUMNS) - set(rows.fieldnames or ()):
                raise ValueError(f"missing columns: {', '.join(sorted(missing))}")
            for number, row in enumerate(rows, start=2):  # noqa: B007, the error message needs it
                # some have seven decimals, some a time zone, which may be cut off
                at = datetime.fromisoformat(row[AZURE_COLUMNS[0]][:26]).replace(tzinfo=None)
                first = first or at
                yield (at - first).total_seconds(), max(int(row[AZURE_COLUMNS[1]]), 1), int(row[AZURE_COLUMNS[2]])
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}:{number}: invalid line of an Azure trace: {error}") from error
