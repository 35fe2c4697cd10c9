"""All metrics of the router, on one registry.

Names start with `warmroute_` and end with their unit.
"""

from __future__ import annotations

import asyncio
import platform
from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping

from prometheus_client.process_collector import ProcessCollector

from router import __version__
from router.errors import Stopping
from router.fleet.scaling import PoolSignals
from router.observe.class_metrics import ClassMetrics
from router.observe.counters import Counters
from router.observe.declared import of_decisions, of_pods, of_pools, of_process, of_requests
from router.observe.ended import CLIENT_GONE, Ended
from router.observe.fast_metrics import PLAIN, Declaration, Labels, MetricT, Registry, TextFormat, pieces
from router.phases import PHASES
from router.policy.calibration import CalibrationRow
from router.types import FleetSnapshot, InFlight, Pod, PodId, PodState, PrefixTrust, PromptPrefix


class KvStreamMetrics:
    def __init__(self, r: Registry) -> None:
        self.events = r[of_pods.KV_EVENTS]
        self.gaps = r[of_pods.KV_GAPS]
        self.complete = r[of_pods.KV_STREAM_COMPLETE]

    def keep(self, pods: Container[PodId]) -> None:
        for metric in (self.events, self.gaps, self.complete):
            metric.remove_where(lambda labels: labels[0] not in pods)


KNOWN_STATES = tuple(state for state in PodState if state is not PodState.GONE)
"""States of pods that have series."""


class Metrics(Counters):
    """`metrics[DECLARATION]` is a metric. Those that are counted for each request are attributes, too."""

    def __init__(self) -> None:
        self.registry = r = Registry(of_requests, of_decisions, of_pods, of_pools, of_process)
        self.requests = r[of_requests.REQUESTS]
        self.sent = r[of_pods.POD_REQUESTS]
        self.ttft_s = r[of_requests.TTFT_S]
        self.pod_ttft_s = r[of_pods.POD_TTFT_S]
        self.tpot_s = r[of_requests.TPOT_S]
        self.ttft_predicted_s = r[of_decisions.TTFT_PREDICTED_S]
        self.ttft_error = r[of_decisions.TTFT_ERROR]
        self.inter_token_s = r[of_requests.INTER_TOKEN_S]
        self.duration_s = r[of_requests.DURATION_S]
        self.in_flight = r[of_requests.IN_FLIGHT].labels()
        self.phase_s = {phase: r[of_requests.PHASE_S].labels(phase) for phase in PHASES}
        self.kv = KvStreamMetrics(r)
        self.by_class = ClassMetrics(r)
        for result in ("ok", "refused"):
            self[of_decisions.POLICY_RELOADS].labels(result)  # a rate needs the 0 before the first one
        self[of_decisions.POLICY_RELOAD_TTFT].set(1)

    def __getitem__(self, declared: Declaration[MetricT]) -> MetricT:
        return self.registry[declared]

    def observe_discovery(self, sources: Mapping[str, tuple[float, int]]) -> None:
        """Set the metrics of each source: age in seconds, and differences."""
        self[of_pods.DISCOVERY_AGE_S].replace({(name,): age_s for name, (age_s, _) in sources.items()})
        self[of_pods.RESYNC_DIFFERENCES].replace({(name,): count for name, (_, count) in sources.items()})

    def observe_transfer(self, link: str, kv_bytes: float, elapsed_ms: float, slowdown: float | None) -> None:
        """Add one transfer of KV over a kind of link. `slowdown`: None if it is too short to measure the link."""
        self[of_pods.TRANSFER_BYTES].labels(link).inc(kv_bytes)
        self[of_pods.TRANSFER_S].labels(link).observe(max(elapsed_ms, 0.0) / 1000)
        if slowdown is not None:
            self[of_pods.TRANSFER_SLOWDOWN].labels(link).observe(slowdown)

    def observe_ttft(self, model: str, expected_ms: float, actual_ms: float) -> None:
        self.ttft_predicted_s.children[model,].observe(expected_ms / 1000)
        self.ttft_error.children[model,].observe(abs(actual_ms - expected_ms) / max(actual_ms, 1e-3))

    def observe_regret(self, model: str, regret_ms: float) -> None:
        """Add the time that another candidate was expected to save one request."""
        self[of_decisions.REGRET_S].labels(model).observe(regret_ms / 1000)

    def observe_calibration(self, rows: Iterable[CalibrationRow]) -> None:
        coefficients: dict[Labels, float] = {}
        confidences: dict[Labels, float] = {}
        errors: dict[Labels, float] = {}
        for row in rows:
            coefficients[row.subject, row.pod, row.coefficient] = row.value
            confidences[row.subject, row.pod] = row.confidence
            errors[row.subject, row.pod, "prior"] = row.error_before
            errors[row.subject, row.pod, "learnt"] = row.error_after
        self[of_decisions.COEFFICIENT].replace(coefficients)
        self[of_decisions.CONFIDENCE].replace(confidences)
        self[of_decisions.CALIBRATION_ERROR].replace(errors)

    def observe_evicted(self, soon_tokens: Mapping[str, float], fleet: FleetSnapshot) -> None:
        """Count tokens that were evicted too soon; new ones are priced by the mean speed of the pods now."""
        ms_per_token: dict[str, list[float]] = {}
        for status in fleet.pods:
            for model in status.pod.models[:1]:
                ms_per_token.setdefault(model, []).append(status.pod.speed.c1_ms_per_token)
        for model, tokens in soon_tokens.items():
            counted, values = self[of_decisions.EVICTED_SOON_TOKENS].labels(model), ms_per_token.get(model, [])
            if values:
                seconds = (tokens - counted.value) * sum(values) / len(values) / 1000
                self[of_decisions.EVICTED_SOON_S].labels(model).inc(seconds)
            counted.set(tokens)

    def observe_policies(self, set_version: str, versions: Mapping[str, str]) -> None:
        found = {(name, version, set_version): 1.0 for name, version in versions.items()}
        self[of_decisions.POLICY_INFO].replace(found)

    def is_serving(self) -> bool:
        return self.in_flight.value > 0

    def figures(self) -> dict[str, int]:
        """Requests that ended, those of them that the router cut off because it stopped, and those in flight."""
        found = [(labels[-1], count.value) for labels, count in self.requests.items()]
        cut = sum(value for result, value in found if result == Stopping.code)
        ended = sum(value for _, value in found)
        return {"requests": int(ended), "cut": int(cut), "in_flight": int(self.in_flight.value)}

    def ended(self, ended: Ended, _prompt: PromptPrefix | None = None) -> None:
        """Count one request that ended. A pod serves its model, or did."""
        for phase, taken_s in ended.phases_s.items():  # as `Buckets.observe`, without a call for each
            series = self.phase_s[phase]
            series.counts[bisect_left(series.bounds, taken_s)] += 1
            series.total += taken_s
        self.requests.children[ended.endpoint, ended.model, ended.result].value += 1
        if ended.name:
            self[of_requests.NAMED_REQUESTS].labels(ended.name, ended.model, ended.result).inc()
            if ended.fallback:
                self[of_requests.FALLBACKS].labels(ended.name, ended.model, ended.fallback).inc()
                if ended.served is not None and ended.served.money:
                    self[of_requests.PROVIDER_MONEY].labels(ended.model).inc(ended.served.money)
        if ended.result == CLIENT_GONE:
            self[of_requests.CANCELLATIONS].labels(ended.phase).inc()
        if not ended.is_read:
            return
        self._observe_times(ended)
        if ended.decision is not None:
            self.by_class.settle(ended, ended.decision.scene)
        if ended.used is not None:
            self.by_class.observe_usage(ended.tenant, ended.model, ended.used)

    def _observe_times(self, ended: Ended) -> None:
        model, ttft_ms, tokens = ended.model, ended.ttft_ms, ended.output_tokens
        workload, policy = (ended.workload, ended.policy) if ended.decision is not None else ("", "")
        trace_id = ended.trace_id if ended.trace is not None else ""
        self.duration_s.children[model, workload].observe(ended.e2e_ms / 1000, trace_id)
        if ttft_ms is not None and ended.served is not None:
            self.ttft_s.children[model, workload, policy].observe(ttft_ms / 1000, trace_id)
            self.pod_ttft_s.children[ended.served.pod.id,].observe(ttft_ms / 1000)
            if tokens is not None and tokens > 1 and ended.result == "ok":
                tpot_s = (ended.e2e_ms - ttft_ms) / (tokens - 1) / 1000
                self.tpot_s.children[model, workload].observe(tpot_s, trace_id)

    def observe_fleet(self, fleet: FleetSnapshot, inflight: Mapping[PodId, InFlight], block_holders: int) -> None:
        """Update the gauges of pods and index before each rendering; remove the series of other pods."""
        pods = {status.pod.id: status for status in fleet.pods}
        restarts, ejections = self[of_pods.POD_RESTARTS], self[of_pods.EJECTIONS]
        for metric in (self.sent, self.pod_ttft_s, restarts, ejections, self[of_pods.EJECTIONS_REFUSED]):
            metric.remove_where(lambda labels: labels[0] not in pods)
        for pod in pods:
            restarts.labels(pod)  # a rate needs the 0 before the first one
        self.kv.keep(pods)
        self[of_pods.POD_STATE].replace_states({(pod,): status.state for pod, status in pods.items()}, KNOWN_STATES)
        self[of_pods.POD_TRUST].replace_states({(pod,): status.pod.trust for pod, status in pods.items()}, PrefixTrust)
        self[of_pods.POD_IN_FLIGHT].replace({(pod,): inflight[pod].requests if pod in inflight else 0 for pod in pods})
        self[of_pods.TRANSFERS].replace({(pod,): inflight[pod].pulls if pod in inflight else 0 for pod in pods})
        described = [status.pod for status in fleet.pods]
        infos = {(p.id, p.base_model, p.engine, p.version, p.role.value): 1.0 for p in described}
        self[of_pods.POD_INFO].replace(infos)
        self[of_process.INDEX_BLOCKS].set(block_holders)

    def observe_change(self, pod: Pod, old: PodState, new: PodState) -> None:
        """Count a change of a pod, if it is an ejection or a restart."""
        if old is new:
            self[of_pods.POD_RESTARTS].labels(pod.id).inc()
        elif new is PodState.EJECTED:
            self[of_pods.EJECTIONS].labels(pod.id).inc()

    def observe_loads(self, fleet: FleetSnapshot, now_s: float) -> None:
        loads = {(status.pod.id,): status.load for status in fleet.pods if status.load.scraped_at_s}
        self[of_pods.POD_RUNNING].replace({pod: load.running for pod, load in loads.items()})
        self[of_pods.POD_WAITING].replace({pod: load.waiting for pod, load in loads.items()})
        self[of_pods.POD_KV_USAGE].replace({pod: load.kv_usage for pod, load in loads.items()})
        self[of_pods.POD_LOAD_AGE_S].replace({pod: max(0.0, now_s - load.scraped_at_s) for pod, load in loads.items()})

    def render(self, text_format: TextFormat = PLAIN) -> bytes:
        return b"".join(pieces(self.registry, text_format))

    async def render_in_turns(self, text_format: TextFormat = PLAIN) -> bytes:
        """The same in pieces, one in each turn of the event loop: all metrics of 500 pods take 100 ms."""
        texts: list[bytes] = []
        for text in pieces(self.registry, text_format):
            texts.append(text)
            await asyncio.sleep(0)
        return b"".join(texts)

    # --- `Counters` ---

    def requests_began(self, more: int) -> None:
        self.in_flight.value += more

    def match_degraded(self, model: str) -> None:
        self[of_process.DEGRADED_MATCHES].labels(model).inc()

    def tokens_compared(self, model: str, rule: str, *, are_equal: bool) -> None:
        self[of_requests.PROMPTS_COMPARED].labels(model, rule, "equal" if are_equal else "differs").inc()

    def attempt_ended(self, pod: PodId, result: str) -> None:
        self.sent.children[pod, result].value += 1

    def retried(self, reason: str) -> None:
        self[of_requests.RETRIES].labels(reason).inc()

    def retry_refused(self, reason: str) -> None:
        self[of_requests.RETRIES_REFUSED].labels(reason).inc()

    def provider_refused(self, provider: str, reason: str) -> None:
        self[of_requests.PROVIDER_REFUSALS].labels(provider, reason).inc()

    def continued(self, method: str, cause: str, result: str) -> None:
        self[of_requests.CONTINUATIONS].labels(method, cause, result).inc()

    def token_gap(self, model: str, workload: str, gap_s: float) -> None:
        self.inter_token_s.labels(model, workload).observe(gap_s)

    def queued(self, more: int) -> None:
        self[of_requests.QUEUED].labels().inc(more)

    def queue_left(self, model: str, waited_s: float) -> None:
        self[of_requests.QUEUE_S].labels(model).observe(waited_s)

    def place_refused(self, model: str, reason: str) -> None:
        self[of_requests.QUEUE_REFUSED].labels(model, reason).inc()

    def queue_learnt(self, model: str, error_share: float, rest_ms: float) -> None:
        self[of_requests.QUEUE_ERROR].labels(model).set(error_share)
        self[of_requests.QUEUE_REST_S].labels(model).set(rest_ms / 1000)


def add_process_metrics(registry: Registry) -> None:
    """Add `warmroute_build_info` and `process_*`. There are none of the latter without /proc."""
    registry[of_process.BUILD_INFO].replace({(__version__, platform.python_version()): 1.0})
    ProcessCollector(registry=registry)


def replace_pools(registry: Registry, signals: Iterable[PoolSignals]) -> None:
    """Use these values of pools, for autoscalers. Some are of this router's own requests and add up over routers; the
    others are of the pods, the same in every router. Series of other pools, and of what is unknown, are gone: a value
    that is not known never reads as 0."""
    pools = list(signals)
    registry[of_pools.POOL_DESIRED_REPLICAS].replace(
        {(*one.key, resource.value): need for one in pools for resource, need in one.desired_replicas.items()}
    )
    for declared, found in (
        (of_pools.POOL_QUEUED_TOKENS, {one.key: one.queued_tokens for one in pools}),
        (of_pools.POOL_BACKLOG_S, {one.key: one.backlog_s for one in pools}),
        (of_pools.POOL_PREFILL_LOAD, {one.key: one.prefill_load for one in pools}),
        (of_pools.POOL_READY_REPLICAS, {one.key: one.ready_replicas for one in pools}),
        (of_pools.POOL_SATURATION, {one.key: one.saturation for one in pools}),
        (of_pools.POOL_RUNNING, {one.key: one.running for one in pools}),
        (of_pools.POOL_KV_FREE_TOKENS, {one.key: one.kv_free_tokens for one in pools}),
    ):
        registry[declared].replace({key: value for key, value in found.items() if value is not None})
