"""All metrics of the router, on one registry.

Names start with `warmroute_` and end with their unit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Metric

from router.errors import Stopping
from router.observe.class_metrics import ClassMetrics
from router.observe.exposition import pieces
from router.observe.fast_metrics import Counter, Gauge, Histogram, Labels
from router.observe.kv_stream_metrics import KvStreamMetrics
from router.observe.phase import PHASES
from router.observe.receipts import Outcome
from router.policy.calibration import CalibrationRow
from router.policy.review import Comparison
from router.types import FleetSnapshot, InFlight, PodId, PodState, PrefixTrust

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_POD_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Fewer than of models, because there are many pods."""
_PHASE_SECONDS = (0.00002, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 10.0, 60.0)
_LAG_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

KNOWN_STATES = tuple(state for state in PodState if state is not PodState.GONE)
"""States of pods that have series."""


class Metrics:
    """The registry and its metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            r, "warmroute_requests", "Requests that ended, by endpoint, model and result.", "endpoint model result"
        )
        self.sent = Counter(r, "warmroute_pod_requests", "Attempts, by pod and result.", "pod result")
        self.ttft_s = Histogram(
            r,
            "warmroute_time_to_first_token_seconds",
            "Seconds from arrival to first token of streamed requests.",
            "model",
            buckets=_SECONDS,
        )
        self.duration_s = Histogram(
            r,
            "warmroute_request_duration_seconds",
            "Seconds from arrival to end of requests.",
            "model",
            buckets=_SECONDS,
        )
        phase_s = Histogram(
            r, "warmroute_phase_seconds", "Seconds of requests in each phase.", "phase", buckets=_PHASE_SECONDS
        )
        self._phase_s = {phase: phase_s.labels(phase) for phase in PHASES}
        self.loop_lag_s = Histogram(
            r,
            "warmroute_loop_lag_seconds",
            "Seconds by which the event loop was late for a timer: 100 samples a second, 20 while idle.",
            buckets=_LAG_SECONDS,
        )
        self.retries = Counter(r, "warmroute_retries", "Attempts after a failure, by reason.", "reason")
        self.retries_refused = Counter(
            r,
            "warmroute_retries_refused",
            "Failures that were not retried for lack of retry budget, by reason.",
            "reason",
        )
        self.in_flight = Gauge(r, "warmroute_in_flight_requests", "Requests being served.").labels()
        self._declare_prompts(r)
        self._declare_pods(r)
        self._declare_discovery(r)
        self._declare_handoffs(r)
        self._declare_prices(r)
        self._declare_index(r)
        self._declare_workers(r)
        self._declare_shadow(r)
        self._declare_policies(r)
        self.by_class = ClassMetrics(r, _SECONDS)

    def _declare_prompts(self, r: CollectorRegistry) -> None:
        """Prompts, and their predicted and reported cached tokens."""
        self.prompt_tokens = Counter(r, "warmroute_prompt_tokens", "Prompt tokens of served requests.", "model")
        self.cached_predicted = Counter(
            r, "warmroute_cached_tokens_predicted", "Prompt tokens predicted to be in the chosen pod's cache.", "model"
        )
        self.cached_actual = Counter(
            r, "warmroute_cached_tokens_actual", "Cached prompt tokens as reported by engines.", "model"
        )
        self.cached_error = Histogram(
            r,
            "warmroute_cached_tokens_error",
            "Absolute difference between predicted and reported cached tokens of a request, in tokens.",
            "model",
            buckets=(0, 16, 64, 256, 1024, 4096, 16384),
        )
        self.unread_prompts = Counter(
            r, "warmroute_unread_prompts", "Requests routed without prefix matching, by reason.", "model reason"
        )
        self.incremental_mismatches = Counter(
            r,
            "warmroute_incremental_prompt_mismatches",
            "Incrementally read prompts that differed from the whole prompt; the first disables it for the model.",
            "model",
        )
        self.prompt_cache_bytes = Gauge(r, "warmroute_prompt_cache_bytes", "Estimated bytes of prompt caches.", "model")

    def _declare_pods(self, r: CollectorRegistry) -> None:
        """Pods, their loads and their KV events."""
        self.pod_ttft_s = Histogram(
            r,
            "warmroute_pod_time_to_first_token_seconds",
            "Seconds from arrival to first token of streamed requests, by the pod that streamed it.",
            "pod",
            buckets=_POD_SECONDS,
        )
        self.pod_in_flight = Gauge(r, "warmroute_pod_in_flight_requests", "Requests being served, by pod.", "pod")
        self.pod_state = Gauge(r, "warmroute_pod_state", "1 for the current state of a pod, else 0.", "pod state")
        self.pod_trust = Gauge(
            r, "warmroute_pod_prefix_trust", "1 for the result of a pod's parity self-test, else 0.", "pod trust"
        )
        self.pod_running = Gauge(
            r, "warmroute_pod_running_requests", "Running requests in the last scrape of a pod's load.", "pod"
        )
        self.pod_waiting = Gauge(
            r, "warmroute_pod_waiting_requests", "Waiting requests in the last scrape of a pod's load.", "pod"
        )
        self.pod_kv_usage = Gauge(
            r, "warmroute_pod_kv_usage_ratio", "Used share of the KV cache in the last scrape of a pod's load.", "pod"
        )
        self.pod_load_age_s = Gauge(
            r, "warmroute_pod_load_age_seconds", "Seconds since the last scrape of a pod's load.", "pod"
        )
        self.ejections_refused = Counter(
            r,
            "warmroute_ejections_refused",
            "Ejections refused because too few pods would stay ready (probes.min_ready_share), by pod.",
            "pod",
        )
        self.kv = KvStreamMetrics(r)
        self.index_blocks = Gauge(r, "warmroute_index_block_holders", "Pairs of block and holder in the index.")

    def _declare_discovery(self, r: CollectorRegistry) -> None:
        self.discovery_age_s = Gauge(
            r,
            "warmroute_discovery_age_seconds",
            "Seconds since the pods of a discovery source were last up to date.",
            "source",
        )
        self.resync_differences = Counter(
            r,
            "warmroute_discovery_resync_differences",
            "Changes of pods since the start that a watch had lost and a full list corrected, by source.",
            "source",
        )

    def observe_discovery(self, sources: Mapping[str, tuple[float, int]]) -> None:
        """Set the metrics of each source: age in seconds, and differences."""
        self.discovery_age_s.replace({(name,): age_s for name, (age_s, _) in sources.items()})
        self.resync_differences.replace({(name,): count for name, (_, count) in sources.items()})

    def _declare_handoffs(self, r: CollectorRegistry) -> None:
        self.handoffs = Counter(
            r, "warmroute_handoffs", "Handoffs from a prefill to a decode pod, by dialect and result.", "dialect result"
        )
        self.handoff_s = Histogram(
            r,
            "warmroute_handoff_seconds",
            "Seconds from the prefill response (or from sending, for dialects that send both at once) to the first byte"
            " of the decode response, streamed requests.",
            "dialect",
            buckets=_SECONDS,
        )

    def _declare_prices(self, r: CollectorRegistry) -> None:
        """Expected times, and the calibration of pods and links."""
        self.ttft_predicted_s = Histogram(
            r,
            "warmroute_time_to_first_token_predicted_seconds",
            "Expected seconds to first token of streamed requests.",
            "model",
            buckets=_SECONDS,
        )
        self.ttft_error = Histogram(
            r,
            "warmroute_time_to_first_token_error_ratio",
            "Absolute difference between expected and actual time to first token, relative to the actual.",
            "model",
            buckets=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
        )
        self.regret_s = Histogram(
            r,
            "warmroute_regret_seconds",
            "Seconds by which the best other candidate was expected to be faster than the chosen one was, sampled.",
            "model",
            buckets=(0, *_SECONDS),
        )
        self.coefficient = Gauge(
            r,
            "warmroute_calibration_coefficient",
            "Calibrated coefficients of a class of pods, of one pod (label pod) or of a kind of links.",
            "subject pod coefficient",
        )
        self.confidence = Gauge(
            r,
            "warmroute_calibration_confidence",
            "Confidence of a calibration: 0 for the prior alone, up to 1.",
            "subject pod",
        )
        self.calibration_error = Gauge(
            r,
            "warmroute_calibration_error_ratio",
            "Mean absolute relative error of recent times, by the prior and by the calibration.",
            "subject pod by",
        )

    def observe_ttft(self, model: str, expected_ms: float, actual_ms: float) -> None:
        """Add the time to first token of one streamed response."""
        self.ttft_predicted_s.labels(model).observe(expected_ms / 1000)
        self.ttft_error.labels(model).observe(abs(actual_ms - expected_ms) / max(actual_ms, 1e-3))

    def observe_calibration(self, rows: Iterable[CalibrationRow]) -> None:
        """Update the gauges; called before each rendering."""
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

    def _declare_index(self, r: CollectorRegistry) -> None:
        self.degraded_matches = Counter(
            r, "warmroute_degraded_matches", "Prefix matches without an up-to-date cluster index.", "model"
        )
        self.index_age_s = Gauge(
            r, "warmroute_index_age_seconds", "Seconds since the replica of the cluster index was up to date."
        )
        self.index_bytes = Gauge(r, "warmroute_index_bytes", "Bytes of memory of the replica's table.")
        self.index_dropped_blocks = Counter(
            r, "warmroute_index_dropped_blocks", "Blocks that did not fit into index.redis.max_replica_bytes."
        )
        self.index_reads = Counter(r, "warmroute_index_holders_read", "Full reads of a holder's blocks.")
        self.index_holder = Gauge(
            r, "warmroute_index_holder_complete", "1 while no changes of a holder are missing, else 0.", "model holder"
        )
        self.replicas = Gauge(r, "warmroute_other_replicas", "Other routers that registered recently.")

    def _declare_workers(self, r: CollectorRegistry) -> None:
        self.workers = Gauge(r, "warmroute_workers", "Worker processes of this router.")
        self.workers.set(1)
        self.worker_updates_dropped = Counter(
            r,
            "warmroute_worker_updates_dropped",
            "Updates not sent to a worker that does not read; it receives a full snapshot later.",
        )

    def _declare_shadow(self, r: CollectorRegistry) -> None:
        """Shadow policies and receipts."""
        self.shadow_decisions = Counter(
            r,
            "warmroute_shadow_decisions",
            "Decisions of a shadow policy, by agreement with the live policy.",
            "policy class agrees",
        )
        self.shadow_dropped = Counter(
            r,
            "warmroute_shadow_dropped",
            "Sampled requests without a comparison: the router was busy, or the shadow policy had no candidate.",
            "policy class",
        )
        self.shadow_sooner_s = Counter(
            r,
            "warmroute_shadow_sooner_seconds",
            "Seconds by which the shadow's choice was expected to be faster, by the policy that priced both choices.",
            "policy class prices",
        )
        self.shadow_later_s = Counter(
            r,
            "warmroute_shadow_later_seconds",
            "Seconds by which the shadow's choice was expected to be slower, by the policy that priced both choices.",
            "policy class prices",
        )
        self.shadow_regret_s = Histogram(
            r,
            "warmroute_shadow_regret_seconds",
            "Seconds by which first tokens came later than expected from the shadow's choice, where it differed.",
            "policy class",
            buckets=(0, *_SECONDS),
        )
        self.receipts_lost = Counter(r, "warmroute_receipts_lost", "Receipts that could not be written to Redis.")

    def observe_shadow(self, policy: str, workload: str, found: Comparison, ttft_ms: float | None) -> None:
        """Add one comparison; `workload` is the class of the request."""
        self.shadow_decisions.labels(policy, workload, "yes" if found.agrees else "no").inc()
        if found.agrees:
            return
        for prices, gain_ms in (("live", found.live_gain_ms), ("shadow", found.other_gain_ms)):
            counter = self.shadow_sooner_s if gain_ms > 0 else self.shadow_later_s
            counter.labels(policy, workload, prices).inc(abs(gain_ms) / 1000)
        if ttft_ms is not None:
            self.shadow_regret_s.labels(policy, workload).observe(max(0.0, ttft_ms - found.other_ms) / 1000)

    def _declare_policies(self, r: CollectorRegistry) -> None:
        self.policy_info = Gauge(r, "warmroute_policy_info", "1 for each active policy.", "policy version set_version")
        self.policy_reloads = Counter(r, "warmroute_policy_reloads", "Policy reloads, by result.", "result")
        self.policy_reload_failed = Gauge(
            r, "warmroute_policy_reload_failed", "1 while the policy files are invalid and the last valid set is used."
        )

    def observe_policies(self, set_version: str, versions: Mapping[str, str]) -> None:
        """Set the active policies: version by name."""
        self.policy_info.replace({(name, version, set_version): 1.0 for name, version in versions.items()})

    def is_serving(self) -> bool:
        return self.in_flight.value > 0

    def figures(self) -> dict[str, int]:
        """Requests that ended, those of them that the router cut off because it stopped, and those in flight."""
        found = [(labels[-1], count.value) for labels, count in self.requests.items()]
        cut = sum(value for result, value in found if result == Stopping.code)
        ended = sum(value for _, value in found)
        return {"requests": int(ended), "cut": int(cut), "in_flight": int(self.in_flight.value)}

    def observe_request(self, ended: Outcome) -> None:
        """Count one request that ended. A pod serves its model, or did."""
        model = ended.model
        self.requests.labels(ended.endpoint, model, ended.result).inc()
        self.duration_s.labels(model).observe(ended.e2e_ms / 1000)
        if ended.ttft_ms is not None and ended.served is not None:
            self.ttft_s.labels(model).observe(ended.ttft_ms / 1000)
            self.pod_ttft_s.labels(ended.served.pod.id).observe(ended.ttft_ms / 1000)

    def observe_phases(self, taken_s: Mapping[str, float]) -> None:
        for phase, seconds in taken_s.items():
            self._phase_s[phase].observe(seconds)

    def observe_prediction(self, ended: Outcome, predicted_tokens: int) -> None:
        """Add one served prompt, of which `predicted_tokens` were expected to be cached."""
        model, actual_tokens = ended.model, ended.cached_tokens
        self.prompt_tokens.labels(model).inc(ended.prompt_tokens)
        self.cached_predicted.labels(model).inc(predicted_tokens)
        if actual_tokens is not None:
            self.cached_actual.labels(model).inc(actual_tokens)
            self.cached_error.labels(model).observe(abs(actual_tokens - predicted_tokens))

    def observe_fleet(
        self, fleet: FleetSnapshot, inflight: Mapping[PodId, InFlight], block_holders: int, now_s: float
    ) -> None:
        """Update the gauges of pods and index; called before each rendering. Removes the series of other pods, also
        those of late results."""
        pods = {status.pod.id: status for status in fleet.pods}
        for metric in (self.sent, self.pod_ttft_s, self.ejections_refused):
            metric.remove_where(lambda labels: labels[0] not in pods)
        self.kv.keep(pods)
        self.pod_state.replace_states({(pod,): status.state for pod, status in pods.items()}, KNOWN_STATES)
        self.pod_trust.replace_states({(pod,): status.pod.trust for pod, status in pods.items()}, PrefixTrust)
        self.pod_in_flight.replace({(pod,): inflight[pod].requests if pod in inflight else 0 for pod in pods})
        self.index_blocks.set(block_holders)
        loads = {(pod,): status.load for pod, status in pods.items() if status.load.scraped_at_s}
        self.pod_running.replace({pod: load.running for pod, load in loads.items()})
        self.pod_waiting.replace({pod: load.waiting for pod, load in loads.items()})
        self.pod_kv_usage.replace({pod: load.kv_usage for pod, load in loads.items()})
        self.pod_load_age_s.replace({pod: max(0.0, now_s - load.scraped_at_s) for pod, load in loads.items()})

    def render(self, families: Iterable[Metric] | None = None) -> bytes:
        """The exposition text of the registry, or of `families`."""
        return b"".join(pieces(self.registry.collect() if families is None else families))

    async def render_in_turns(self, families: Iterable[Metric] | None = None) -> bytes:
        """The same in pieces, one in each turn of the event loop: all metrics of 100 pods take more than 10 ms."""
        texts: list[bytes] = []
        for text in pieces(self.registry.collect() if families is None else families):
            texts.append(text)
            await asyncio.sleep(0)
        return b"".join(texts)
