"""Builds the record of recent decisions and its sinks (a file), and tracing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from router.config.schema import Receipts, TracingConfig, UsageFile
from router.errors import ConfigError
from router.observe.changes import Changes
from router.observe.declared import of_process
from router.observe.metrics import Metrics
from router.observe.receipt_lines import ReceiptLog, ReceiptWriter
from router.observe.recent_decisions import RecentDecisions
from router.observe.tracing import Tracing
from router.observe.used_tokens import UsageWriter


class DecisionRecords:
    """The recent decisions and changes, and their sinks. Raises `ConfigError` if the file cannot be written."""

    def __init__(self, config: Receipts, metrics: Metrics) -> None:
        self._log: ReceiptLog | None = None
        writer: ReceiptWriter | None = None
        if config.file:
            lost, most = metrics[of_process.RECEIPTS_LOST].labels().inc, config.max_file_bytes
            self._log = _log("receipts", config.file, max_bytes=most, kept=config.rotated_files, on_lost=lost)
            file = self._log
            writer = ReceiptWriter(file.write, lambda: file.files, scenes=config.replay_data)
        self.changes = Changes(writer.write_change) if writer else Changes()
        self.recent = RecentDecisions(size=config.keep, prompts=config.prompts, writer=writer)

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
