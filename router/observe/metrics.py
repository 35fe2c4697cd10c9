"""What can be paged on?

Every metric of the router, declared once, on a registry of its own. Names start with `warmroute_`, units stand in them.
This file never decides anything and never reads a prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Gauge, Metric, generate_latest
from prometheus_client.registry import Collector

from router.observe.phase import PHASES
from router.observe.slices import Slices
from router.observe.tally import Counter, Histogram, Labels, Level, Readings, RowHistogram
from router.policy.calibration import CalibrationRow
from router.policy.review import Comparison
from router.types import FleetSnapshot, InFlight, PodId

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PHASE_SECONDS = (0.00002, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 10.0, 60.0)
_LAG_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

PIECE_SAMPLES, HEAD_LINES = 200, 2
"""Rendered at once, a millisecond or less; HELP and TYPE stand above them."""


class Metrics:
    """The registry and its members."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "warmroute_requests", "Requests by how they ended.", ["endpoint", "model", "result"], registry=r
        )
        self.sent = Counter("warmroute_pod_requests", "Attempts by pod and result.", ["pod", "result"], registry=r)
        self.ttft_s = Histogram(
            "warmroute_time_to_first_token_seconds",
            "Arrival to first token, streamed requests.",
            ["model"],
            buckets=_SECONDS,
            registry=r,
        )
        self.duration_s = Histogram(
            "warmroute_request_duration_seconds", "Arrival to end.", ["model"], buckets=_SECONDS, registry=r
        )
        self.phase_s = RowHistogram(
            "warmroute_phase_seconds", "Time in each phase.", "phase", PHASES, buckets=_PHASE_SECONDS, registry=r
        )
        self.loop_lag_s = Histogram(
            "warmroute_loop_lag_seconds",
            "How late the event loop came to a timer, looked at 100 times a second; 20 times while nobody is served.",
            [],
            buckets=_LAG_SECONDS,
            registry=r,
        )
        self.retries = Counter("warmroute_retries", "Further candidates tried.", ["reason"], registry=r)
        self.retries_refused = Counter(
            "warmroute_retries_refused", "Failures that the retry budget let stand.", ["reason"], registry=r
        )
        self.in_flight = Level("warmroute_in_flight_requests", "Requests being served.", registry=r)
        self._declare_prompts(r)
        self._declare_pods(r)
        self._declare_handoffs(r)
        self._declare_prices(r)
        self._declare_index(r)
        self._declare_workers(r)
        self._declare_shadow(r)
        self._declare_policies(r)
        self.slices = Slices(r, _SECONDS)

    def _declare_prompts(self, r: CollectorRegistry) -> None:
        """What was read of prompts, and how much of them was expected and found in caches."""
        self.prompt_tokens = Counter("warmroute_prompt_tokens", "Prompt tokens routed.", ["model"], registry=r)
        self.cached_predicted = Counter(
            "warmroute_cached_tokens_predicted",
            "Prompt tokens expected in the chosen pod's cache.",
            ["model"],
            registry=r,
        )
        self.cached_actual = Counter(
            "warmroute_cached_tokens_actual", "Cached prompt tokens as engines reported them.", ["model"], registry=r
        )
        self.cached_error = Histogram(
            "warmroute_cached_tokens_error",
            "Absolute difference of predicted and reported cached tokens, where an engine reports them.",
            ["model"],
            buckets=(0, 16, 64, 256, 1024, 4096, 16384),
            registry=r,
        )
        self.unread_prompts = Counter(
            "warmroute_unread_prompts", "Prompts routed without a prefix, by reason.", ["model", "reason"], registry=r
        )
        self.incremental_mismatches = Counter(
            "warmroute_incremental_prompt_mismatches",
            "Incrementally read prompts that differed from the whole prompt; the first disables it for the model.",
            ["model"],
            registry=r,
        )

    def _declare_pods(self, r: CollectorRegistry) -> None:
        """How pods are, and what they announce."""
        self.pod_in_flight = Readings("warmroute_pod_in_flight_requests", "Leases by pod.", ["pod"], registry=r)
        self.pod_state = Readings("warmroute_pod_state", "1 for the state a pod is in.", ["pod", "state"], registry=r)
        self.pod_trust = Readings(
            "warmroute_pod_prefix_trust", "1 for the outcome of a pod's parity self-test.", ["pod", "trust"], registry=r
        )
        self.kv_events = Counter("warmroute_kv_events", "KV events applied, by pod.", ["pod"], registry=r)
        self.kv_stream = Gauge(
            "warmroute_kv_stream_complete", "1 while a pod's KV event stream has no unfilled gap.", ["pod"], registry=r
        )
        self.index_blocks = Gauge("warmroute_index_block_holders", "Block-holder pairs in the index.", registry=r)

    def _declare_handoffs(self, r: CollectorRegistry) -> None:
        """Those of prefill and decode on two pods."""
        self.handoffs = Counter(
            "warmroute_handoffs", "Splits between two pods, by what came of them.", ["dialect", "result"], registry=r
        )
        self.handoff_s = Histogram(
            "warmroute_handoff_seconds",
            "Streamed requests: from the prefill pod's answer (where both are asked at once, from then) to the first"
            " byte of the decode pod's.",
            ["dialect"],
            buckets=_SECONDS,
            registry=r,
        )

    def _declare_prices(self, r: CollectorRegistry) -> None:
        """Whether what was expected came, and what was learnt."""
        self.ttft_predicted_s = Histogram(
            "warmroute_time_to_first_token_predicted_seconds",
            "Expected time to first token of the plans that were carried out, streamed requests.",
            ["model"],
            buckets=_SECONDS,
            registry=r,
        )
        self.ttft_error = Histogram(
            "warmroute_time_to_first_token_error_ratio",
            "Absolute difference of expected and actual time to first token, to the actual.",
            ["model"],
            buckets=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
            registry=r,
        )
        self.regret_s = Histogram(
            "warmroute_regret_seconds",
            "How much sooner the best of the other candidates was expected to be than the chosen one was; sampled.",
            ["model"],
            buckets=(0, *_SECONDS),
            registry=r,
        )
        self.coefficient = Readings(
            "warmroute_calibration_coefficient",
            "What is known of a class of pods, of a pod that differs from it (else empty), or of a kind of links.",
            ["subject", "pod", "coefficient"],
            registry=r,
        )
        self.confidence = Readings(
            "warmroute_calibration_confidence", "0 for the prior alone, to 1.", ["subject", "pod"], registry=r
        )
        self.calibration_error = Readings(
            "warmroute_calibration_error_ratio",
            "Mean absolute relative error of lately observed times, by the prior and by what was learnt.",
            ["subject", "pod", "by"],
            registry=r,
        )

    def observe_ttft(self, model: str, expected_ms: float, actual_ms: float) -> None:
        """Add one streamed answer."""
        by = (model,)
        self.ttft_predicted_s.of[by].observe(expected_ms / 1000)
        self.ttft_error.of[by].observe(abs(actual_ms - expected_ms) / max(actual_ms, 1e-3))

    def observe_regret(self, model: str, regret_ms: float) -> None:
        """Add one look back."""
        self.regret_s.labels(model).observe(regret_ms / 1000)

    def observe_calibration(self, rows: Iterable[CalibrationRow]) -> None:
        """Take the gauges; called before each rendering."""
        coefficients: dict[Labels, float] = {}
        confidences: dict[Labels, float] = {}
        errors: dict[Labels, float] = {}
        for row in rows:
            coefficients[row.subject, row.pod, row.coefficient] = row.value
            confidences[row.subject, row.pod] = row.confidence
            errors[row.subject, row.pod, "prior"] = row.error_before
            errors[row.subject, row.pod, "learnt"] = row.error_after
        self.coefficient.take(coefficients)
        self.confidence.take(confidences)
        self.calibration_error.take(errors)

    def _declare_index(self, r: CollectorRegistry) -> None:
        """Those of a router that shares an index with others."""
        self.degraded_matches = Counter(
            "warmroute_degraded_matches", "Matches without an up-to-date cluster index.", ["model"], registry=r
        )
        self.index_age_s = Gauge(
            "warmroute_index_age_seconds", "Since the copy of the cluster index was up to date.", registry=r
        )
        self.index_bytes = Gauge("warmroute_index_bytes", "Memory of the copy's table.", registry=r)
        self.index_dropped_blocks = Gauge(
            "warmroute_index_dropped_blocks", "Blocks that did not fit into index.redis.max_replica_bytes.", registry=r
        )
        self.index_reads = Gauge(
            "warmroute_index_holders_read", "Times that a holder's blocks were read anew.", registry=r
        )
        self.index_holder = Gauge(
            "warmroute_index_holder_complete",
            "By holder of the cluster index: 1, or 0 while changes of it are lost.",
            ["model", "holder"],
            registry=r,
        )
        self.replicas = Gauge("warmroute_other_replicas", "Other routers that were heard of lately.", registry=r)

    def _declare_workers(self, r: CollectorRegistry) -> None:
        """Those of a router of several processes."""
        self.workers = Gauge("warmroute_workers", "Processes that serve as this router.", registry=r)
        self.workers.set(1)
        self.worker_updates_dropped = Counter(
            "warmroute_worker_updates_dropped",
            "Updates not sent to a worker that does not read; it receives a full snapshot later.",
            [],
            registry=r,
        )

    def _declare_shadow(self, r: CollectorRegistry) -> None:
        """Those of a policy that decides beside the live one, and of receipts."""
        self.shadow_decisions = Counter(
            "warmroute_shadow_decisions", "Decisions of a shadow policy.", ["policy", "class", "agrees"], registry=r
        )
        self.shadow_dropped = Counter(
            "warmroute_shadow_dropped",
            "Sampled requests that were not compared: the router was busy, or the shadow had no price for them.",
            ["policy", "class"],
            registry=r,
        )
        self.shadow_sooner_s = Counter(
            "warmroute_shadow_sooner_seconds",
            "By how much first tokens were expected sooner by the shadow's choice, as either policy prices both.",
            ["policy", "class", "prices"],
            registry=r,
        )
        self.shadow_later_s = Counter(
            "warmroute_shadow_later_seconds",
            "By how much first tokens were expected later by the shadow's choice, as either policy prices both.",
            ["policy", "class", "prices"],
            registry=r,
        )
        self.shadow_regret_s = Histogram(
            "warmroute_shadow_regret_seconds",
            "How much later first tokens came than the shadow's choice was expected to bring them, where it differed.",
            ["policy", "class"],
            buckets=(0, *_SECONDS),
            registry=r,
        )
        self.receipts_lost = Counter(
            "warmroute_receipts_lost", "Lines of receipts that Redis did not take.", [], registry=r
        )

    def observe_shadow(self, policy: str, workload: str, found: Comparison, ttft_ms: float | None) -> None:
        """Add one comparison; `workload` is the class of its request."""
        self.shadow_decisions.labels(policy, workload, "yes" if found.agrees else "no").inc()
        if found.agrees:
            return
        for prices, gain_ms in (("live", found.live_gain_ms), ("shadow", found.other_gain_ms)):
            counter = self.shadow_sooner_s if gain_ms > 0 else self.shadow_later_s
            counter.labels(policy, workload, prices).inc(abs(gain_ms) / 1000)
        if ttft_ms is not None:
            self.shadow_regret_s.labels(policy, workload).observe(max(0.0, ttft_ms - found.other_ms) / 1000)

    def _declare_policies(self, r: CollectorRegistry) -> None:
        """Those of the policies in force and of their reloading."""
        self.policy_info = Gauge(
            "warmroute_policy_info", "1 for each policy in force.", ["policy", "version", "set_version"], registry=r
        )
        self.policy_reloads = Counter("warmroute_policy_reloads", "Reloads by result.", ["result"], registry=r)
        self.policy_reload_failed = Gauge(
            "warmroute_policy_reload_failed",
            "1 while the policy files are wrong and the last good ones decide.",
            registry=r,
        )

    def observe_policies(self, set_version: str, versions: Mapping[str, str]) -> None:
        """Take what is in force now: version by policy."""
        self.policy_info.clear()
        for name, version in versions.items():
            self.policy_info.labels(name, version, set_version).set(1)

    def is_serving(self) -> bool:
        """Is anybody waiting for an answer, or for the rest of one?"""
        return self.in_flight.value > 0

    def observe_request(
        self, endpoint: str, model: str, result: str, duration_ms: float, ttft_ms: float | None
    ) -> None:
        """Add one that has ended; `ttft_ms` of a streamed one."""
        by = (model,)
        self.requests.of[endpoint, model, result].value += 1
        self.duration_s.of[by].observe(duration_ms / 1000)
        if ttft_ms is not None:
            self.ttft_s.of[by].observe(ttft_ms / 1000)

    def observe_prediction(
        self, model: str, prompt_tokens: int, predicted_tokens: int, actual_tokens: int | None
    ) -> None:
        """Add one served prompt: what we expected to be cached, and what the engine said was."""
        by = (model,)
        self.prompt_tokens.of[by].value += prompt_tokens
        self.cached_predicted.of[by].value += predicted_tokens
        if actual_tokens is not None:
            self.cached_actual.of[by].value += actual_tokens
            self.cached_error.of[by].observe(abs(actual_tokens - predicted_tokens))

    def observe_fleet(self, fleet: FleetSnapshot, inflight: Mapping[PodId, InFlight], block_holders: int) -> None:
        """Take the gauges that are read off other owners; called before each rendering."""
        pods = [(status.pod.id, status) for status in fleet.pods]
        self.pod_state.take({(pod, status.state.value): 1.0 for pod, status in pods})
        self.pod_trust.take({(pod, status.pod.trust.value): 1.0 for pod, status in pods})
        self.pod_in_flight.take({(pod,): inflight[pod].requests if pod in inflight else 0 for pod, _ in pods})
        self.index_blocks.set(block_holders)

    def render(self, families: Iterable[Metric] | None = None) -> bytes:
        """The exposition text; `families` in place of its own, where they are given."""
        return b"".join(self._rendered(families))

    async def render_in_turns(self, families: Iterable[Metric] | None = None) -> bytes:
        """The same, a piece in each turn of the event loop: with a hundred pods the whole takes more than 10 ms."""
        texts: list[bytes] = []
        for text in self._rendered(families):
            texts.append(text)
            await asyncio.sleep(0)
        return b"".join(texts)

    def _rendered(self, families: Iterable[Metric] | None) -> Iterator[bytes]:
        for family in self.registry.collect() if families is None else families:
            yield from _pieces(family)


def _pieces(family: Metric) -> Iterator[bytes]:
    """A family of many pods by and by; what stands above its samples comes once."""
    whole, said = family.samples, b""
    for first in range(0, max(len(whole), 1), PIECE_SAMPLES):
        family.samples = whole[first : first + PIECE_SAMPLES]
        text = generate_latest(_Alone(family))
        yield text.removeprefix(said)
        said = b"".join(text.splitlines(keepends=True)[:HEAD_LINES])


class _Alone(Collector):
    """A registry of one family that has been collected already."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family
