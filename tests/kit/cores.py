"""A core with some pods and no front: what requests read and change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace as replace_field
from typing import Any

from msgspec.structs import replace

from router.admission.admission_queue import AdmissionConfig
from router.admission.quotas import Quotas
from router.admission.tenant import Slo
from router.config.index_schema import Index
from router.config.models import slo_lookup
from router.config.policy_files import load_classes
from router.config.provider_schema import Provider
from router.config.schema import Edge, Limits, ModelConfig, RouterConfig, UsageFile
from router.decision import Candidate, Cost, Plan, RouteDecision
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.index.predicted import Prediction
from router.observe.ended import Ended
from router.observe.fast_metrics import Labelled
from router.observe.log import RequestLog
from router.observe.metrics import Metrics
from router.observe.receipts import ReceiptWriter, UsageWriter
from router.observe.recent_decisions import RecentDecisions
from router.observe.shadow_caches import ShadowCaches
from router.phases import Phases
from router.policy.calibration import Calibration
from router.policy.calibrator import Calibrator
from router.policy.classes import Classes
from router.policy.policy_set import PolicySet
from router.request.context import RequestContext
from router.request.decisions import Routing
from router.request.fleet_state import Clock, FleetState
from router.request.inbound import Head, HeaderList
from router.request.quota_charges import QuotaCharges
from router.stores.prefix_store import LocalStore
from router.types import Endpoint, Links, Pod, PodId, PodSpeed, PromptPrefix, UsageShown
from router.wiring.router import SYSTEM_CLOCK, build_core, observers
from tests.kit import scenes
from tests.kit.scenes import POLICIES, make_pod

CLASSES = load_classes(None)
EVENT_HEADERS: HeaderList = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON_HEADERS: HeaderList = [(b"content-type", b"application/json")]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}


def pods_at(urls: Mapping[str, str]) -> list[Pod]:
    """Pods by id, which can split requests and pull KV."""
    speed = PodSpeed(1.0, 0.01, 0.0)
    return [make_pod(name, url=url, speed=speed, handoff="nixl", pulls="p2p") for name, url in urls.items()]


class WatchedStore(LocalStore):
    """A store whose predictions are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: set[Prediction] = set()
        """Neither confirmed nor withdrawn."""
        self.fates: list[tuple[str, PodId, int]] = []
        """What became of each prediction: the pod, and its blocks."""
        self.capacities_blocks: list[int | None] = []
        """The capacities of all predictions."""

    def predict(self, pod: PodId, prefix: PromptPrefix, *, ttl_s: float, capacity_blocks: int | None) -> Prediction:
        prediction = super().predict(pod, prefix, ttl_s=ttl_s, capacity_blocks=capacity_blocks)
        self.pending.add(prediction)
        self.fates.append(("made", pod, len(prefix.hashes)))
        self.capacities_blocks.append(capacity_blocks)
        return prediction

    def confirm(self, prediction: Prediction, now_s: float) -> None:
        super().confirm(prediction, now_s)
        self.fates.append(("confirmed", prediction.pod, len(prediction.hashes)))
        self.pending.discard(prediction)

    def withdraw(self, prediction: Prediction) -> None:
        super().withdraw(prediction)
        self.fates.append(("withdrawn", prediction.pod, len(prediction.hashes)))
        self.pending.discard(prediction)


class CoreOfPods:
    """The core of a router whose `pods` serve the model `m` and are ready."""

    def __init__(
        self,
        pods: Iterable[Pod],
        *,
        retries: int = 2,
        trusts_uuids: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        admission: AdmissionConfig | None = None,
        slo: Slo | None = None,
        records_all: bool = False,
        providers: Sequence[Provider] = (),
    ) -> None:
        """`records_all`: receipts, usage and shadow caches, too."""
        self.fleet, self.ledger, self.store, self.metrics = Fleet(), Ledger(), WatchedStore(), Metrics()
        self.publishes_events = True
        self.clock = clock
        pods = list(pods)
        self.fleet.sync(pods)
        for pod in pods:
            self.fleet.describe(pod.id, models=("m",), version="0.32.0")
            self.fleet.event(pod.id, PodEvent.PROBE_OK)
        self.calibrator = Calibrator(Calibration(), self.metrics, Links())
        self.breaker = Breaker(self.fleet, ledger=self.ledger)
        self.facts: Mapping[str, Any] | None = {}
        self.policy = "cost_aware"
        self.log_lines: list[str] = []
        self.receipt_lines: list[bytes] = []
        self.usage_lines: list[bytes] = []
        writer, usage, self.shadows = None, None, None
        if records_all:
            writer = ReceiptWriter(self.receipt_lines.append)
            usage = UsageWriter("process", self.usage_lines.append)
            self.shadows = ShadowCaches(self.metrics, lambda _pod: 2, 400_000)
        on_decided = self.shadows.decided if self.shadows else None
        self.recent = RecentDecisions(writer=writer, on_decided=on_decided)
        self.state = FleetState(
            fleet=self.fleet,
            ledger=self.ledger,
            breaker=self.breaker,
            store=self.store,
            calibrator=self.calibrator,
        )
        self.pictures, self.output_lengths = self.state.pictures, self.state.output_lengths
        self.config = RouterConfig(
            edge=Edge(trust_engine_fields=trusts_uuids),
            limits=Limits(retries=retries),
            admission=admission,
            models=(ModelConfig(name="m", slo=slo),),
            providers=tuple(providers),
            usage=UsageFile(file="usage.jsonl" if records_all else None),
            index=Index(predicted_ttl_s=60.0, no_events_ttl_s=60.0, no_events_capacity_tokens=1000),
        )
        self.ended: list[Ended] = []
        self.quotas = Quotas()
        log = RequestLog("json", write=self.log_lines.append)
        recording = observers(self.metrics, self.recent, log, usage, self.shadows)
        recording = replace_field(recording, sinks=[*recording.sinks, lambda ended, _: self.ended.append(ended)])
        routing = Routing(lambda: PolicySet(POLICIES[self.policy]), Classes(CLASSES), slo_lookup(self.config))
        self.core = build_core(
            self.config,
            self.state,
            routing,
            recording,
            clock,
            QuotaCharges(self.quotas, clock),
            handoff_facts=lambda pod, dialect: self.facts,
            publishes_events=lambda pod: self.publishes_events,
        )

    def is_idle(self) -> bool:
        """Whether no lease, prediction or request is left."""
        return not (self.ledger.inflight() or self.store.pending or self.counted("warmroute_in_flight_requests"))

    def pod(self, name: str) -> Pod:
        """The pod in its current state."""
        status = self.fleet.status(name)
        assert status is not None
        return status.pod

    def unread(self, method: str, *plans: Plan) -> RequestContext:
        """A request to an endpoint that the router does not read, decided for these plans, best first."""
        context = self.context(*plans)
        context.request = replace(context.request, endpoint=Endpoint.OTHER)
        context.head = replace(context.head, method=method, target=b"/v1/responses")
        return context

    def context(
        self,
        *plans: Plan,
        headers: HeaderList | None = None,
        prompt: PromptPrefix | None = None,
        expected_ms: float = 10.0,
        usage: UsageShown = UsageShown.ALL,
        **fields: Any,
    ) -> RequestContext:
        """A chat, decided for these plans, best first, each with 7 expected cached tokens; undecided for none.
        `expected_ms`: the price of each, all of it time until the first token."""
        body = {**CHAT, **fields}
        endpoint = Endpoint.CHAT if "messages" in body else Endpoint.COMPLETIONS
        request = scenes.request(
            "req-1",
            endpoint=endpoint,
            body=json.dumps(body).encode(),
            prompt={"messages": body.get("messages")},
            stream=bool(body.get("stream")),
            usage=usage,
        )
        head = Head(
            id=request.id,
            method="POST",
            target=endpoint.value.encode(),
            headers=headers or [(b"content-type", b"application/json")],
            peer="192.0.2.1",
        )
        candidates = tuple(Candidate(plan, Cost.of([("prefill", expected_ms)], expected_ms), 7) for plan in plans)
        decision = RouteDecision("scripted", "1", candidates) if plans else None
        phases = Phases(self.clock.now_s())
        return RequestContext(request, head, phases, owner="192.0.2.0", prompt=prompt, decision=decision)

    def counted(self, name: str, **labels: str) -> float:
        """The sum of the samples of our metrics that have these labels."""
        ours = (one for one in self.metrics.registry.collectors if isinstance(one, Labelled))
        named = (one for one in ours if name.startswith(one.declared.name))
        samples = (sample for metric in named for family in metric.collect() for sample in family.samples)
        return sum(one.value for one in samples if one.name == name and one.labels.items() >= labels.items())

    def failures(self, pod: str) -> int:
        """Current failures of the pod."""
        record = self.breaker._failed.get(pod)
        return record.failures if record else 0

    def doubts(self, pod: str) -> int:
        """Current failures of the pod that a request may have caused."""
        record = self.breaker._failed.get(pod)
        return record.doubts if record else 0
