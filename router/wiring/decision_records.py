"""Builds the record of recent decisions and its sinks (a file), and tracing."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from router.config.schema import Receipts, TracingConfig, UsageFile
from router.errors import ConfigError
from router.observe.changes import Changes
from router.observe.declared import of_process
from router.observe.ended import RecordedDecision
from router.observe.metrics import Metrics
from router.observe.receipts import ReceiptLog, ReceiptWriter, UsageWriter
from router.observe.recent_decisions import RecentDecisions
from router.observe.tracing import Tracing
from router.policy.policy_set import PolicySet
from router.policy.price import Choice, choice_of
from router.policy.review import Review, chosen, review
from router.policy.spec import Policy
from router.types import Scene

REVIEWED = 500
"""Number of recent decisions that a reload compares in a thread. With 100 pods this takes two seconds."""
SLICE_S, PAUSE_S = 0.0005, 0.002
"""The comparison computes for `SLICE_S`, then sleeps for `PAUSE_S`, so that requests get the GIL."""


class DecisionRecords:
    """The recent decisions and changes, and their sinks. Raises `ConfigError` if the file cannot be written."""

    def __init__(self, config: Receipts, metrics: Metrics) -> None:
        self._log: ReceiptLog | None = None
        writer: ReceiptWriter | None = None
        if config.file:
            lost, most = metrics[of_process.RECEIPTS_LOST].labels().inc, config.max_file_bytes
            self._log = _log("receipts", config.file, max_bytes=most, kept=config.rotated_files, on_lost=lost)
            writer = ReceiptWriter(self._log.write, scenes=config.replay_data)
            self._log.on_new_file = writer.repeat_fleet
        self.changes = Changes(writer.write_change) if writer else Changes()
        self.recent = RecentDecisions(size=config.keep, prompts=config.prompts, writer=writer)

    async def review(self, old: PolicySet, new: PolicySet) -> Review | None:
        """The last decisions that differ under the new set; None without decisions."""
        last = self.recent.latest(REVIEWED)
        decisions = [decision for decision, _ in last]
        return await asyncio.to_thread(review, _decided(decisions, old, new), new.version) if last else None

    def close(self) -> None:
        if self._log:
            self._log.close()


USAGE_RETRIED_BYTES = 64 * 1024 * 1024


def usage_writer(config: UsageFile, metrics: Metrics) -> UsageWriter | None:
    """What writes the file of usage, if there is one. Raises `ConfigError` if it cannot be written."""
    if config.file is None:
        return None
    lost = metrics[of_process.USAGE_LOST].labels().inc
    log = _log("usage", config.file, retried_bytes=USAGE_RETRIED_BYTES, on_lost=lost)
    return UsageWriter(secrets.token_hex(8), log.write, log.close)


def call_later(delay_s: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, call)


def _log(key: str, file: str, **options: Any) -> ReceiptLog:
    try:
        return ReceiptLog(Path(file), call_later, **options)
    except OSError as error:
        raise ConfigError(f"{key}: {error}") from error


def _decided(
    last: Sequence[RecordedDecision], old: PolicySet, new: PolicySet
) -> Iterator[tuple[Scene, Choice | None, Policy]]:
    """(scene, old choice, new policy), with pauses. The old set decides again what an older version of it decided."""
    due_s = time.monotonic() + SLICE_S
    for kept in last:
        if time.monotonic() > due_s:
            time.sleep(PAUSE_S)
            due_s = time.monotonic() + SLICE_S
        scene, by = kept.scene.scene(), old.for_recorded(kept.scene, kept.policy.name)
        same = by.version == kept.policy.version
        was = choice_of(kept.candidates[0].plan) if same else chosen(scene, by)
        yield scene, was, new.for_recorded(kept.scene, kept.policy.name)


def build_tracing(config: TracingConfig) -> Tracing | None:
    """None if tracing is off. Raises `ConfigError`."""
    if not config.enabled:
        return None
    try:
        from router.observe.spans import SpanExport
    except ImportError as error:
        install = "run `pip install '.[otel]'` in the clone"
        raise ConfigError(f"tracing.enabled needs OpenTelemetry: {install} ({error})") from error
    try:
        sink = SpanExport(config.endpoint)
    except ValueError as error:
        raise ConfigError(f"tracing: a variable OTEL_* of the environment is invalid: {error}") from error
    return Tracing(sink, sample_share=config.sample_share, max_per_s=config.max_requests_per_s)
