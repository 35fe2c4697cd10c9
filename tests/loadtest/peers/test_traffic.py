"""All routers of a round get the same traffic, and the ideal matches it."""

from __future__ import annotations

import json
from pathlib import Path

from loadtest.peers.traffic import ideal_of_chats, trace_traffic
from loadtest.traffic.load_driver import DriveResults, RequestResult

SYSTEM = "You answer briefly and name the block that you mean, its pod, and the tier on which it lies. " * 4


def asked(question: str, text: str = "A block.", error: str = "") -> RequestResult:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return RequestResult("chat", {"model": "demo", "messages": messages}, 0.0, text=text, error=error)


def ideal(*served: RequestResult) -> int:
    return ideal_of_chats(DriveResults(served, 1.0))


def test_a_shared_prefix_counts_as_saved() -> None:
    """In whole blocks of 16 tokens; the first request finds nothing."""
    assert ideal(asked("Which?")) == 0
    saved = ideal(asked("Which?"), asked("Whose?"))
    assert saved > 0
    assert saved % 16 == 0


def test_a_failed_request_neither_caches_nor_hits() -> None:
    """Its prompt may never have been computed."""
    assert ideal(asked("Which?", error="status 503"), asked("Whose?")) == 0
    assert ideal(asked("Which?"), asked("Whose?", error="status 503")) == 0


def test_a_trace_has_the_same_ideal_in_every_round(tmp_path: Path) -> None:
    """Independent of the results."""
    line = {"timestamp": 0, "input_length": 1024, "output_length": 2, "hash_ids": [0, 1]}
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([json.dumps(line)] * 2))
    of_round = trace_traffic(path, 2, 2.0, "demo")
    nothing = DriveResults((), 0.0)
    assert [of_round(number).ideal_cached_tokens(nothing) for number in range(2)] == [1008, 1008]
