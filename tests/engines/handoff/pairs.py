"""Pods and bodies for the tests of every dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.engines.handoff.dialect import Pair
from router.types import Endpoint
from tests.kit.scenes import make_pod

CHAT = Endpoint.CHAT
COMPLETIONS = Endpoint.COMPLETIONS


def pair(
    prefill: str = "http://10.0.0.3:8000",
    decode: str = "http://10.0.0.9:8000",
    *,
    rank: int | None = None,
    port: int | None = None,
    version: str = "0.32.0",
    facts: Mapping[str, Any] | None = None,
) -> Pair:
    """A pair with id 77 (hex 4d)."""
    used = {"engine_id": "abc"} if facts is None else facts
    return Pair(
        make_pod("p", url=prefill, dp_rank=rank, version=version, handoff_port=port),
        make_pod("d", url=decode, version=version),
        77,
        used,
    )


def chat(**fields: Any) -> bytes:
    usual = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9}
    return json.dumps({**usual, "stream": True, "stream_options": {"include_usage": True}, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", "max_tokens": 9, **fields}).encode()


def answer(choice: Mapping[str, Any] | None = None, **fields: Any) -> bytes:
    """The answer of a prefill leg."""
    usual = {"index": 0, "text": " a", "finish_reason": "length"}
    return json.dumps({"id": "x", "choices": [{**usual, **(choice or {})}], **fields}).encode()


def read(body: bytes) -> dict[str, Any]:
    decoded = json.loads(body)
    assert isinstance(decoded, dict)
    return decoded
