"""Builds what serves requests from the configuration, independent of any front."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from router.admission.fair_bound import body_memory
from router.config.schema import Log, RouterConfig
from router.frontends.prompt_readers import LocalPromptReader, PromptReader
from router.observe.ended import EndingSink
from router.observe.log import LEVELS, RequestLog
from router.observe.metrics import Metrics
from router.observe.receipts import UsageWriter
from router.observe.recent_decisions import RecentDecisions
from router.observe.shadow_caches import ShadowCaches
from router.observe.tracing import trace_ended
from router.policy.retry import RetryBudget
from router.prompt.apis.vllm_messages import VllmMessages
from router.request.attempt_rules import AttemptRules, ContinuationRules, FactsLookup
from router.request.clock import Clock
from router.request.continuation.answer_words import answer_words
from router.request.core import CoreSettings, Observers
from router.request.queues import QueueSettings
from router.request.quota_charges import QuotaCharges
from router.types import PodId
from router.wiring.decision_records import call_later

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


def core_settings(
    config: RouterConfig,
    charges: QuotaCharges | None = None,
    *,
    handoff_facts: FactsLookup,
    publishes_events: Callable[[PodId], bool],
    senders: Callable[[], int] = lambda: 1,
    continuation: ContinuationRules | None = None,
    hands_over: bool = False,
) -> CoreSettings:
    """`senders`: the processes that send to the same pods."""
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
    return CoreSettings(
        rules=rules,
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
