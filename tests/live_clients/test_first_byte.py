"""The first byte of an answer comes as soon through the router as from the pod itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.live_clients.scenario import CHAT, GREEDY, MODEL, TEXT
from tests.live_clients.sides import Sides

pytestmark = [pytest.mark.live, pytest.mark.net]
CALLS = 20
MAX_ADDED_MS = 20.0
ASKED: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "a chat": ("generation", "/v1/chat/completions", {**GREEDY, "messages": CHAT, "stream": True}),
    "a message": ("generation", "/v1/messages", {**GREEDY, "messages": CHAT[1:], "stream": True}),
    "an embedding": ("embeddings", "/v1/embeddings", {"model": MODEL, "input": TEXT}),
    "speech": ("audio", "/v1/audio/speech", {"model": MODEL, "input": TEXT, "voice": "a", "response_format": "pcm"}),
}


def first_byte_ms(client: httpx.Client, url: str, body: Mapping[str, Any]) -> float:
    """Until the first byte of the body; the rest is read, too."""
    began_s = time.perf_counter()
    with client.stream("POST", url, json=body) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        found_ms = (time.perf_counter() - began_s) * 1000
        for _ in pieces:
            pass
    return found_ms


@pytest.mark.parametrize("name", ASKED)
def test_the_first_byte_comes_within_20_ms_of_direct(sides: dict[str, Sides], name: str) -> None:
    """Calls take turns, so that the machine is as busy for both."""
    kind, path, body = ASKED[name]
    with httpx.Client(trust_env=False, timeout=120) as client:
        pairs = [
            tuple(first_byte_ms(client, f"{url}{path}", body) for url in (sides[kind].direct, sides[kind].routed))
            for _ in range(CALLS + 2)
        ][2:]
    direct, routed = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"{name}: first byte after {direct:.1f} ms directly, {routed:.1f} ms through the router (medians of {CALLS})")
    assert routed - direct <= MAX_ADDED_MS
