"""All metrics of the router, on one registry.

Names start with `warmroute_` and end with their unit.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from operator import is_not, methodcaller

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from router import __version__
from router.errors import Stopping
from router.observe.class_metrics import ClassMetrics
from router.observe.counters import Counters
from router.observe.declared import of_decisions, of_pods, of_process, of_requests
from router.observe.ended import EndedRequest, UsedTokens
from router.observe.exposition import PLAIN, Registry, TextFormat, pieces
from router.observe.fast_metrics import Counter, Gauge, Histogram, Labelled, Labels
from router.observe.pool_metrics import PoolMetrics
from router.observe.receipts import CLIENT_GONE, Outcome, RecordedDecision
from router.phases import PHASES
from router.policy.calibration import CalibrationRow
from router.types import FleetSnapshot, InFlight, Pod, PodId, PodState, PrefixTrust

_IS_PRESENT = partial(is_not, None)


class PhaseMetrics(Histogram):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, of_requests.PHASE_S)
        for phase in PHASES:
            self.labels(phase)

    def add_all(self, taken_s: Sequence[Mapping[str, float]]) -> None:
        for phase in PHASES:
            self.labels(phase).observe_all([*filter(_IS_PRESENT, map(methodcaller("get", phase), taken_s))])


class KvStreamMetrics:
    def __init__(self, r: CollectorRegistry) -> None:
        self.events = Counter(r, of_pods.KV_EVENTS)
        self.gaps = Counter(r, of_pods.KV_GAPS)
        self.complete = Gauge(r, of_pods.KV_STREAM_COMPLETE)

    def keep(self, pods: Container[PodId]) -> None:
        for metric in (self.events, self.gaps, self.complete):
            metric.remove_where(lambda labels: labels[0] not in pods)


KNOWN_STATES = tuple(state for state in PodState if state is not PodState.GONE)
"""States of pods that have series."""
COUNTED_AT_ONCE = 32


class Metrics(Counters):
    def __init__(self) -> None:
        self.registry = Registry()
        r = self.registry
        self.requests = Counter(r, of_requests.REQUESTS)
        self.sent = Counter(r, of_pods.POD_REQUESTS)
        self.ttft_s = Histogram(r, of_requests.TTFT_S)
        self.tpot_s = Histogram(r, of_requests.TPOT_S)
        self.inter_token_s = Histogram(r, of_requests.INTER_TOKEN_S)
        self.duration_s = Histogram(r, of_requests.DURATION_S)
        self.phase_s = PhaseMetrics(r)
        self.loop_lag_s = Histogram(r, of_process.LOOP_LAG_S)
        self.cancellations = Counter(r, of_requests.CANCELLATIONS)
        self.retries = Counter(r, of_requests.RETRIES)
        self.retries_refused = Counter(r, of_requests.RETRIES_REFUSED)
        self.continuations = Counter(r, of_requests.CONTINUATIONS)
        self.in_flight = Gauge(r, of_requests.IN_FLIGHT).labels()
        self.queued = Gauge(r, of_requests.QUEUED).labels()
        self.queue_s = Histogram(r, of_requests.QUEUE_S)
        self.queue_refused = Counter(r, of_requests.QUEUE_REFUSED)
        self.queue_error = Gauge(r, of_requests.QUEUE_ERROR)
        self.queue_rest_s = Gauge(r, of_requests.QUEUE_REST_S)
        self._declare_pods(r)
        self._declare_decisions(r)
        self.by_class = ClassMetrics(r)
        self.pools = PoolMetrics(r)
        self._waiting: list[tuple[Outcome, RecordedDecision | None, str, bool, UsedTokens | None]] = []
        for metric in self.registry.collectors:
            if isinstance(metric, Labelled):
                metric.before_reading = self.count

    def _declare_pods(self, r: CollectorRegistry) -> None:
        self.pod_ttft_s = Histogram(r, of_pods.POD_TTFT_S)
        self.pod_in_flight = Gauge(r, of_pods.POD_IN_FLIGHT)
        self.pod_state = Gauge(r, of_pods.POD_STATE)
        self.pod_trust = Gauge(r, of_pods.POD_TRUST)
        self.pod_matching = Gauge(r, of_pods.POD_MATCHING)
        self.pod_running = Gauge(r, of_pods.POD_RUNNING)
        self.pod_waiting = Gauge(r, of_pods.POD_WAITING)
        self.pod_kv_usage = Gauge(r, of_pods.POD_KV_USAGE)
        self.pod_load_age_s = Gauge(r, of_pods.POD_LOAD_AGE_S)
        self.pod_info = Gauge(r, of_pods.POD_INFO)
        self.pod_slowdown = Gauge(r, of_pods.POD_SLOWDOWN)
        self.pod_restarts = Counter(r, of_pods.POD_RESTARTS)
        self.ejections = Counter(r, of_pods.EJECTIONS)
        self.ejections_refused = Counter(r, of_pods.EJECTIONS_REFUSED)
        self.kv = KvStreamMetrics(r)
        self.index_blocks = Gauge(r, of_process.INDEX_BLOCKS)
        self.discovery_age_s = Gauge(r, of_pods.DISCOVERY_AGE_S)
        self.resync_differences = Counter(r, of_pods.RESYNC_DIFFERENCES)
        self.handoffs = Counter(r, of_pods.HANDOFFS)
        self.handoff_s = Histogram(r, of_pods.HANDOFF_S)
        self.pod_transfers = Gauge(r, of_pods.TRANSFERS)
        self.transfer_bytes = Counter(r, of_pods.TRANSFER_BYTES)
        self.transfer_slowdown = Histogram(r, of_pods.TRANSFER_SLOWDOWN)
        self.transfer_s = Histogram(r, of_pods.TRANSFER_S)
        self.evicted_reuse = Gauge(r, of_decisions.EVICTED_REUSE)
        self._evicted_soon_tokens = Counter(r, of_decisions.EVICTED_SOON_TOKENS)
        self._evicted_soon_s = Counter(r, of_decisions.EVICTED_SOON_S)
        self.degraded_matches = Counter(r, of_process.DEGRADED_MATCHES)
        self.index_age_s = Gauge(r, of_process.INDEX_AGE_S)
        self.index_bytes = Gauge(r, of_process.INDEX_BYTES)
        self.index_dropped_blocks = Counter(r, of_process.INDEX_DROPPED_BLOCKS)
        self.index_reads = Counter(r, of_process.INDEX_READS)
        self.index_holder = Gauge(r, of_process.INDEX_HOLDER_COMPLETE)
        self.replicas = Gauge(r, of_process.REPLICAS)

    def _declare_decisions(self, r: CollectorRegistry) -> None:
        self.unread_prompts = Counter(r, of_requests.UNREAD_PROMPTS)
        self.incremental_mismatches = Counter(r, of_requests.INCREMENTAL_MISMATCHES)
        self.prompt_cache_bytes = Gauge(r, of_requests.PROMPT_CACHE_BYTES)
        self.ttft_predicted_s = Histogram(r, of_decisions.TTFT_PREDICTED_S)
        self.ttft_error = Histogram(r, of_decisions.TTFT_ERROR)
        self.regret_s = Histogram(r, of_decisions.REGRET_S)
        self.coefficient = Gauge(r, of_decisions.COEFFICIENT)
        self.confidence = Gauge(r, of_decisions.CONFIDENCE)
        self.prefill_saved_s = Counter(r, of_decisions.PREFILL_SAVED_S)
        self.prefill_saved_gpu_s = Counter(r, of_decisions.PREFILL_SAVED_GPU_S)
        self.calibration_error = Gauge(r, of_decisions.CALIBRATION_ERROR)
        self.usage_lost = Counter(r, of_process.USAGE_LOST)
        self.receipts_lost = Counter(r, of_process.RECEIPTS_LOST)
        self.identity_providers_failing = Gauge(r, of_process.IDENTITY_PROVIDERS_FAILING)
        self.policy_info = Gauge(r, of_decisions.POLICY_INFO)
        self.policy_reloads = Counter(r, of_decisions.POLICY_RELOADS)
        for result in ("ok", "refused"):
            self.policy_reloads.labels(result)  # a rate needs the 0 before the first one
        self.policy_reload_failed = Gauge(r, of_decisions.POLICY_RELOAD_FAILED)
        self.policy_reload_ttft = Gauge(r, of_decisions.POLICY_RELOAD_TTFT)
        self.policy_reload_ttft.set(1)

    def observe_discovery(self, sources: Mapping[str, tuple[float, int]]) -> None:
        """Set the metrics of each source: age in seconds, and differences."""
        self.discovery_age_s.replace({(name,): age_s for name, (age_s, _) in sources.items()})
        self.resync_differences.replace({(name,): count for name, (_, count) in sources.items()})

    def observe_transfer(self, link: str, kv_bytes: float, elapsed_ms: float, slowdown: float | None) -> None:
        """Add one transfer of KV over a kind of link. `slowdown`: None if it is too short to measure the link."""
        self.transfer_bytes.labels(link).inc(kv_bytes)
        self.transfer_s.labels(link).observe(max(elapsed_ms, 0.0) / 1000)
        if slowdown is not None:
            self.transfer_slowdown.labels(link).observe(slowdown)

    def observe_ttft(self, model: str, expected_ms: float, actual_ms: float) -> None:
        self.ttft_predicted_s.labels(model).observe(expected_ms / 1000)
        self.ttft_error.labels(model).observe(abs(actual_ms - expected_ms) / max(actual_ms, 1e-3))

    def observe_regret(self, model: str, regret_ms: float) -> None:
        """Add the time that another candidate was expected to save one request."""
        self.regret_s.labels(model).observe(regret_ms / 1000)

    def observe_calibration(self, rows: Iterable[CalibrationRow]) -> None:
        coefficients: dict[Labels, float] = {}
        confidences: dict[Labels, float] = {}
        errors: dict[Labels, float] = {}
        for row in rows:
            coefficients[row.subject, row.pod, row.coefficient] = row.value
            confidences[row.subject, row.pod] = row.confidence
            errors[row.subject, row.pod, "prior"] = row.error_before
            errors[row.subject, row.pod, "learnt"] = row.error_after
        self.coefficient.replace(coefficients)
        self.confidence.replace(confidences)
        self.calibration_error.replace(errors)

    def observe_evicted(self, soon_tokens: Mapping[str, float], fleet: FleetSnapshot) -> None:
        """Count tokens that were evicted too soon; new ones are priced by the mean speed of the pods now."""
        ms_per_token: dict[str, list[float]] = {}
        for status in fleet.pods:
            for model in status.pod.models[:1]:
                ms_per_token.setdefault(model, []).append(status.pod.speed.c1_ms_per_token)
        for model, tokens in soon_tokens.items():
            counted, values = self._evicted_soon_tokens.labels(model), ms_per_token.get(model, [])
            if values:
                seconds = (tokens - counted.value) * sum(values) / len(values) / 1000
                self._evicted_soon_s.labels(model).inc(seconds)
            counted.set(tokens)

    def observe_policies(self, set_version: str, versions: Mapping[str, str]) -> None:
        self.policy_info.replace({(name, version, set_version): 1.0 for name, version in versions.items()})

    def is_serving(self) -> bool:
        return self.in_flight.value > 0

    def figures(self) -> dict[str, int]:
        """Requests that ended, those of them that the router cut off because it stopped, and those in flight."""
        found = [(labels[-1], count.value) for labels, count in self.requests.items()]
        cut = sum(value for result, value in found if result == Stopping.code)
        ended = sum(value for _, value in found)
        return {"requests": int(ended), "cut": int(cut), "in_flight": int(self.in_flight.value)}

    def ended(self, ended: EndedRequest) -> None:
        """Count one request that ended, at the latest when a metric is read. Its prompt is not kept until then."""
        self._waiting.append((ended.outcome, ended.recorded, ended.phase, ended.is_read, ended.used))
        if len(self._waiting) >= COUNTED_AT_ONCE:
            self.count()

    def count(self) -> None:
        """Count the requests that wait: together, each takes half the time."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        self.phase_s.add_all([outcome.phases_s for outcome, *_ in waiting])
        for outcome, recorded, phase, is_read, used in waiting:
            if outcome.result == CLIENT_GONE:
                self.cancellations.labels(phase).inc()
            if not is_read:
                self.requests.labels(outcome.endpoint, outcome.model, outcome.result).inc()
            elif recorded is None:
                self.observe_request(outcome)
            else:
                self.observe_request(outcome, recorded.scene.workload, recorded.policy.name)
                self.by_class.settle(outcome, recorded.scene, recorded.policy)
            if is_read and used is not None:
                self.by_class.observe_usage(used)

    def observe_request(self, ended: Outcome, workload: str = "", policy: str = "") -> None:
        """Count one request that ended, with its class and policy if it was decided. A pod serves its model, or did."""
        model, ttft_ms, tokens = ended.model, ended.ttft_ms, ended.output_tokens
        trace_id = ended.trace_id if ended.is_trace_recorded else ""
        self.requests.labels(ended.endpoint, model, ended.result).value += 1
        self.duration_s.labels(model, workload).observe(ended.e2e_ms / 1000, trace_id)
        if ttft_ms is not None and ended.served is not None:
            self.ttft_s.labels(model, workload, policy).observe(ttft_ms / 1000, trace_id)
            self.pod_ttft_s.labels(ended.served.pod.id).observe(ttft_ms / 1000)
            if tokens is not None and tokens > 1 and ended.result == "ok":
                tpot_s = (ended.e2e_ms - ttft_ms) / (tokens - 1) / 1000
                self.tpot_s.labels(model, workload).observe(tpot_s, trace_id)

    def observe_fleet(self, fleet: FleetSnapshot, inflight: Mapping[PodId, InFlight], block_holders: int) -> None:
        """Update the gauges of pods and index before each rendering; remove the series of other pods."""
        pods = {status.pod.id: status for status in fleet.pods}
        for metric in (self.sent, self.pod_ttft_s, self.pod_restarts, self.ejections, self.ejections_refused):
            metric.remove_where(lambda labels: labels[0] not in pods)
        for pod in pods:
            self.pod_restarts.labels(pod)  # a rate needs the 0 before the first one
        self.kv.keep(pods)
        self.pod_state.replace_states({(pod,): status.state for pod, status in pods.items()}, KNOWN_STATES)
        self.pod_trust.replace_states({(pod,): status.pod.trust for pod, status in pods.items()}, PrefixTrust)
        self.pod_in_flight.replace({(pod,): inflight[pod].requests if pod in inflight else 0 for pod in pods})
        self.pod_transfers.replace({(pod,): inflight[pod].pulls if pod in inflight else 0 for pod in pods})
        described = [status.pod for status in fleet.pods]
        self.pod_info.replace({(p.id, p.base_model, p.engine, p.version, p.role.value): 1.0 for p in described})
        self.index_blocks.set(block_holders)

    def observe_change(self, pod: Pod, old: PodState, new: PodState) -> None:
        """Count a change of a pod, if it is an ejection or a restart."""
        if old is new:
            self.pod_restarts.labels(pod.id).inc()
        elif new is PodState.EJECTED:
            self.ejections.labels(pod.id).inc()

    def observe_loads(self, fleet: FleetSnapshot, now_s: float) -> None:
        loads = {(status.pod.id,): status.load for status in fleet.pods if status.load.scraped_at_s}
        self.pod_running.replace({pod: load.running for pod, load in loads.items()})
        self.pod_waiting.replace({pod: load.waiting for pod, load in loads.items()})
        self.pod_kv_usage.replace({pod: load.kv_usage for pod, load in loads.items()})
        self.pod_load_age_s.replace({pod: max(0.0, now_s - load.scraped_at_s) for pod, load in loads.items()})

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
        self.degraded_matches.labels(model).inc()

    def attempt_ended(self, pod: PodId, result: str) -> None:
        self.sent.labels(pod, result).value += 1

    def retried(self, reason: str) -> None:
        self.retries.labels(reason).inc()

    def retry_refused(self, reason: str) -> None:
        self.retries_refused.labels(reason).inc()

    def continued(self, method: str, cause: str, result: str) -> None:
        self.continuations.labels(method, cause, result).inc()

    def token_gap(self, model: str, workload: str, gap_s: float) -> None:
        self.inter_token_s.labels(model, workload).observe(gap_s)

    def queue_left(self, model: str, waited_s: float) -> None:
        self.queue_s.labels(model).observe(waited_s)

    def place_refused(self, model: str, reason: str) -> None:
        self.queue_refused.labels(model, reason).inc()

    def queue_learnt(self, model: str, error_share: float, rest_ms: float) -> None:
        self.queue_error.labels(model).set(error_share)
        self.queue_rest_s.labels(model).set(rest_ms / 1000)


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Add `warmroute_build_info` and `process_*`. There are none of the latter without /proc."""
    info = Gauge(registry, of_process.BUILD_INFO)
    info.replace({(__version__, platform.python_version()): 1.0})
    ProcessCollector(registry=registry)
