"""Builds what serves and records requests from the configuration, independent of any front."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from router.admission.fair_bound import body_memory
from router.config.schema import Log, Receipts, RouterConfig, TracingConfig, UsageFile
from router.errors import ConfigError
from router.frontends.prompt_readers import LocalPromptReader, PromptReader
from router.observe.changes import Changes
from router.observe.declared import of_process
from router.observe.ended import EndingSink
from router.observe.log import LEVELS, RequestLog
from router.observe.metrics import Metrics
from router.observe.receipts import ReceiptLog, ReceiptWriter, UsageWriter
from router.observe.recent_decisions import RecentDecisions
from router.observe.shadow_caches import ShadowCaches
from router.observe.tracing import Tracing, trace_ended
from router.policy.retry import RetryBudget
from router.prompt.apis.vllm_messages import VllmMessages
from router.request.attempt_rules import AttemptRules, ContinuationRules, FactsLookup
from router.request.continuation.answer_words import answer_words
from router.request.decisions import Routing
from router.request.fleet_state import Clock, FleetState
from router.request.life import Core, Observers
from router.request.queues import QueueSettings
from router.request.quota_charges import QuotaCharges
from router.types import PodId

SYSTEM_CLOCK = Clock(time.monotonic, time.time)


def observers(
    metrics: Metrics,
    recent: RecentDecisions,
    log: RequestLog | None = None,
    usage: UsageWriter | None = None,
    shadows: ShadowCaches | None = None,
) -> Observers:
    """What records requests. `usage`: of the file of usage, if there is one."""
    sinks: list[EndingSink] = [metrics.ended, recent.settle, trace_ended]
    if shadows is not None:
        recent.on_decided = shadows.decided
        sinks.append(shadows.ended)
    if usage is not None:
        sinks.append(usage.ended)
    if log is not None:
        sinks.append(log.ended)
    return Observers(recent, metrics, sinks)


def live_core(
    config: RouterConfig,
    state: FleetState,
    routing: Routing,
    recording: Observers,
    clock: Clock = SYSTEM_CLOCK,
    charges: QuotaCharges | None = None,
    *,
    handoff_facts: FactsLookup,
    publishes_events: Callable[[PodId], bool],
    senders: Callable[[], int] = lambda: 1,
    continuation: ContinuationRules | None = None,
    hands_over: bool = False,
) -> Core:
    """The core of a router with this configuration. `senders`: the processes that send to the same pods."""
    rules = AttemptRules(
        retries=config.limits.retries,
        route_headers=config.edge.route_headers,
        budget=RetryBudget(config.limits.retry_budget),
        index=config.index,
        publishes_events=publishes_events,
        handoff_facts=handoff_facts,
        memory=body_memory(config.limits.max_held_bytes),
        hands_over=hands_over,
        runs_prefill=config.picker.prefill == "picker",
        continuation=continuation,
    )
    queue = QueueSettings(config.admission, senders) if config.admission is not None else None
    return Core(
        state,
        rules,
        routing,
        recording,
        clock,
        queue=queue,
        charges=charges,
        records_usage=config.tenants is not None or config.usage.file is not None,
        trusts_uuids=config.edge.trust_engine_fields,
    )


def continuation_rules(config: RouterConfig, readers: Mapping[str, PromptReader]) -> ContinuationRules | None:
    """How broken streams go on, with the tokenizers of the models; None where they end."""
    enabled = config.continuation.enabled
    if enabled is False:
        return None
    templates = {model.name for model in config.models if model.chat_format == "template"}
    words = {
        name: answer_words(reader.tokenizer.text_of, reader.tokenizer.id_of, reader.fingerprinter.made(VllmMessages))
        for name, reader in readers.items()
        if name in templates and isinstance(reader, LocalPromptReader)
    }
    only_proven, silence_s = enabled == "proven", config.continuation.silence_s
    return ContinuationRules(words_of=words.get, silence_s=silence_s, only_proven=only_proven)


def request_log(config: Log) -> RequestLog | None:
    is_shown = config.requests and LEVELS[config.level] <= LEVELS["info"]
    return RequestLog(config.format, config.requests_sample, later=call_later) if is_shown else None


# --- records of decisions, usage and spans ---


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
