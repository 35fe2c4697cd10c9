"""Sessions recorded on real engines whose layers keep windows or states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from router.types import BlocksStored
from tests.index.decoding import decode_batch

VECTORS = Path(__file__).parents[3] / "shared/data/hybrid_kv_vectors.json"
SESSIONS: list[dict[str, Any]] = json.loads(VECTORS.read_text())["events"] if VECTORS.exists() else []
needs_sessions = pytest.mark.skipif(not SESSIONS, reason="the recorded sessions are not here")
WITH_FULL_ATTENTION = [session for session in SESSIONS if "no full" not in session["name"]]


class Sent(NamedTuple):
    """One recorded request, with the batches that it caused."""

    prompt: list[int]
    salt: str
    cached_tokens: int
    batches: list[bytes]


def requests(session: dict[str, Any]) -> Iterator[Sent]:
    before: list[list[int]] = []
    for step in session["steps"]:
        source = step["prompt"]
        start = before[source["from_request"]][: source["keep"]] if source["from_request"] is not None else []
        prompt = start + source["then"]
        before.append(prompt + step["output"])
        yield Sent(prompt, step["cache_salt"] or "", step["cached_tokens"], [*map(bytes.fromhex, step["batches"])])


def block_tokens(session: dict[str, Any]) -> int:
    stored = decode_batch(bytes.fromhex(session["steps"][0]["batches"][0]))[-1]
    assert isinstance(stored, BlocksStored)
    return stored.block_size_tokens
