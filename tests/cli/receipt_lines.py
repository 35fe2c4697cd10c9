"""Files of receipts as a router writes them, with any times, pods and policies."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path

import msgspec

from router.observe.changes import Change, ChangeKind
from router.observe.ended import Ended, RecordedDecision
from router.observe.receipts import ReceiptWriter
from router.policy.decide import decide
from router.policy.recording import record
from router.policy.spec import Policy
from router.types import PodStatus, Scene
from tests.kit.scenes import POLICIES, pod, ready, request, scene

BY = POLICIES["cost_aware"]
NOON_S = 1_764_590_400.0
"""2025-12-01 12:00 UTC."""


def seen_at(name: str, *pods: PodStatus) -> Scene:
    """A scene with two ready pods, or with these."""
    return scene(*(pods or ready(pod("a"), pod("b"))), request=request(name))


def made(
    after_s: float,
    ttft_ms: float | None = 20.0,
    *,
    name: str = "r",
    result: str = "ok",
    by: Policy = BY,
    seen: Scene | None = None,
    model: str = "m",
) -> Ended:
    """A request that arrived this long after noon, with its decision."""
    where = seen or seen_at(name)
    decision = decide(where, by)
    return Ended(
        decision=RecordedDecision.of(record(where, "chat"), decision, by, NOON_S + after_s),
        id=name, at_s=NOON_S + after_s, model=model, endpoint="chat", result=result, prompt_tokens=1000,
        cached_tokens=250, ttft_ms=ttft_ms, e2e_ms=100.0, served=decision.candidates[0],
    )  # fmt: skip


def lines(found: Iterable[Ended], *, scenes: bool = True) -> list[bytes]:
    written: list[bytes] = []
    writer = ReceiptWriter(written.append, scenes=scenes)
    for one in found:
        writer.write(one, None)
    return written


def change(after_s: float, kind: ChangeKind, subject: str, cause: str = "") -> bytes:
    return msgspec.json.encode(Change(NOON_S + after_s, kind, subject, cause))


def write(path: Path, found: Iterable[bytes]) -> Path:
    text = b"".join(line + b"\n" for line in found)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
