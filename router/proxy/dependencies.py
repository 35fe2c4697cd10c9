"""What serving a request needs from the rest of the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from router.admission.admission_queue import QueueLimits
from router.admission.tenant import Slo
from router.errors import RouterError
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.fleet.output_lengths import OutputLengths
from router.index.seen_pictures import SeenPictures
from router.observe.calibrator import Calibrator
from router.observe.journal import Journal
from router.observe.log import RequestLog
from router.observe.metrics import Metrics
from router.policy.classes import Classes
from router.policy.policy_set import PolicySet
from router.proxy.headers import HeaderRules
from router.proxy.prompt_readers import PromptReader
from router.proxy.quota_admission import QuotaAdmission
from router.proxy.response_locator import ResponseLocator
from router.proxy.upstream import UpstreamPool
from router.proxy.usage_records import UsageRecords
from router.stores.prefix_store import PrefixStore
from router.types import Pod, PodId

FactsLookup: TypeAlias = Callable[[Pod, str], Mapping[str, Any] | None]
"""Returns `Pair.facts` for (prefill pod, dialect); None while they are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSettings:
    """The part of the configuration that applies to forwarding."""

    retries: int
    retry_budget: float
    route_headers: bool
    headers: HeaderRules
    predicted_ttl_s: float
    no_events_ttl_s: float
    no_events_capacity_tokens: int
    trusts_uuids: bool = False
    """Pods receive the `uuid` that a client gives a picture."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """`slo`: of clients whose tenant has none. `senders`: see `AdmissionQueue`."""

    limits: QueueLimits
    slo: Slo
    senders: Callable[[], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyDependencies:
    """The parts of the program that the proxy uses, and its settings."""

    settings: ForwardSettings
    fleet: Fleet
    ledger: Ledger
    breaker: Breaker
    store: PrefixStore
    readers: Mapping[str, PromptReader]
    policies: Callable[[], PolicySet]
    classes: Classes
    pool: Callable[[Pod], UpstreamPool]
    handoff_facts: FactsLookup
    publishes_events: Callable[[PodId], bool]
    metrics: Metrics
    calibrator: Calibrator
    responses: ResponseLocator
    pictures: SeenPictures = field(default_factory=SeenPictures)
    output_lengths: OutputLengths = field(default_factory=OutputLengths)
    journal: Journal = field(default_factory=Journal)
    request_log: RequestLog | None = None
    quotas: QuotaAdmission = field(default_factory=QuotaAdmission)
    usage: UsageRecords | None = None
    status_of: Callable[[RouterError], int] = lambda _error: 0
    """The status of the response to an error."""
    queue: QueueSettings | None = None
    """None: requests wait in the engines."""
