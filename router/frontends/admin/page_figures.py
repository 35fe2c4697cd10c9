"""Computes the figures that the operators' page shows, and the sentences at its top: what needs attention now.

Figures are sums, quantiles and shares of the metrics of /metrics, summed over the labels that none needs. Sentences are
made of the present state and of counters at two times. A sentence names at most `MAX_NAMES` pods. Red ones are first:
clients get errors, or soon will.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import add, itemgetter, sub
from statistics import median
from sys import float_info
from typing import Any, Literal

import msgspec

from router.decision import Direct
from router.errors import UnknownEndpoint, shortened
from router.frontends.admin.views import WithoutPods
from router.observe import thresholds
from router.observe.declared import of_decisions, of_pods, of_process, of_requests
from router.observe.ended import CLIENT_GONE
from router.observe.fast_metrics import Declaration, Labels, Numbers
from router.observe.recent_decisions import RecentDecisions
from router.policy.decide import expected_ttft_ms
from router.types import Matching, PodId, PodState, PodStatus

SERVED = ("ok", CLIENT_GONE)
"""The results of requests that did not fail."""
BEYOND = float_info.max
"""A quantile above the last bucket, because JSON has no infinity."""
SHOWN: Mapping[Declaration, tuple[str, ...]] = {
    of_requests.IN_FLIGHT: (),
    of_requests.REQUESTS: ("result",),
    of_requests.CLASS_REQUESTS: ("class", "result"),
    of_requests.TTFT_S: ("class",),
    of_requests.TPOT_S: ("class",),
    of_requests.PHASE_S: ("phase",),
    of_requests.RETRIES: (),
    of_requests.REPORTED_PROMPT_TOKENS: (),
    of_requests.PROMPT_TOKENS: (),
    of_requests.AVAILABLE_TOKENS: (),
    of_requests.CAPTURED_TOKENS: (),
    of_requests.DELIVERED_TOKENS: (),
    of_requests.TENANT_IN_FLIGHT_TOKENS: ("tenant",),
    of_requests.UNREAD_PROMPTS: ("reason",),
    of_requests.SLO_REQUESTS: ("model", "met"),
    of_requests.REUSE_INTERVAL_S: ("model",),
    of_decisions.TTFT_ERROR: (),
    of_decisions.EVICTED_SOON_TOKENS: ("model",),
    of_decisions.EVICTED_SOON_S: ("model",),
    of_decisions.PLACED_PROMPT_TOKENS: ("placement",),
    of_decisions.PLACED_CACHED_TOKENS: ("placement",),
    of_decisions.PLACED_ERROR: ("model",),
    of_decisions.PREFILL_SAVED_S: ("placement",),
    of_decisions.PREFILL_SAVED_GPU_S: ("placement",),
    of_pods.TRANSFER_SLOWDOWN: ("link",),
    of_process.LOOP_LAG_S: (),
    of_process.DEGRADED_MATCHES: (),
    of_process.RECEIPTS_LOST: (),
}
"""The metrics that figures and notices need, each with the labels that it keeps."""
TOKEN_LINES = {
    "available": (of_requests.AVAILABLE_TOKENS, of_requests.PROMPT_TOKENS),
    "captured": (of_requests.CAPTURED_TOKENS, of_requests.PROMPT_TOKENS),
    "delivered": (of_requests.DELIVERED_TOKENS, of_requests.REPORTED_PROMPT_TOKENS),
}

MetricRows = list[tuple[Labels, Numbers]]
"""The series of a metric: the values of the labels that it keeps, and its numbers."""

_Key = Callable[[Labels], str | None]
"""What series are summed by; None: not this one."""


class Quantiles(msgspec.Struct, frozen=True, omit_defaults=True):
    """Quantiles of a histogram; None without values, `BEYOND` above its last bound."""

    count: float = 0.0
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


def _first(labels: Labels) -> str:
    return labels[0] if labels else ""


class MetricsGrowth:
    """How much the metrics of a snapshot grew since an earlier one; `before`: empty for the start of the router."""

    def __init__(self, now: Mapping[str, MetricRows], before: Mapping[str, MetricRows]) -> None:
        self._now = now
        self._before = before

    def figures(self) -> dict[str, Any]:
        """What the page shows of the time between two snapshots. `failed`: requests that failed, by result, unless
        their client left; those of `classes` were decided. By placement: `placed_shares` of prompt tokens that caches
        have or would have, `saved_s` prefill seconds of pods that hits saved, `saved_gpu_s` of their GPUs.
        `degraded`: matches without the cluster index. `reuse_s`: times between two uses of a prefix, by model.
        `evicted_tokens` were evicted too soon, by model; `evicted_s`: their prefill."""
        answers = self.answers()
        return {
            "requests": sum(answers.values()),
            "failed": {result: count for result, count in answers.items() if result not in SERVED},
            "classes": self._classes(),
            "ttft_s": self.ttft_s(),
            "ttft_error": self._quantiles(of_decisions.TTFT_ERROR)[""],
            "token_shares": self.token_shares(),
            "placed_shares": self._placed_shares(),
            "saved_s": self._values(of_decisions.PREFILL_SAVED_S),
            "saved_gpu_s": self._values(of_decisions.PREFILL_SAVED_GPU_S),
            "phases_s": self._quantiles(of_requests.PHASE_S),
            "loop_lag_s": self._quantiles(of_process.LOOP_LAG_S)[""],
            "retries": self._values(of_requests.RETRIES)[""],
            "degraded": self._values(of_process.DEGRADED_MATCHES)[""],
            "unread_prompts": sum(self.unread().values()),
            "receipts_lost": self._values(of_process.RECEIPTS_LOST)[""],
            "reuse_s": self._quantiles(of_requests.REUSE_INTERVAL_S),
            "evicted_tokens": self._values(of_decisions.EVICTED_SOON_TOKENS),
            "evicted_s": self._values(of_decisions.EVICTED_SOON_S),
        }

    def unread(self) -> dict[str, float]:
        return self._values(of_requests.UNREAD_PROMPTS)

    def slo_requests(self, met: str) -> defaultdict[str, float]:
        """Those that met the SLO of their model ("true"), or did not, by model."""
        return self._values(of_requests.SLO_REQUESTS, lambda labels: labels[0] if labels[-1] == met else None)

    def answers(self) -> dict[str, float]:
        """The answers that clients got, by result, most frequent first; also those without a class or pod. Without the
        answers to unknown URLs, which are of no API."""
        found = self._values(of_requests.REQUESTS)
        found.pop(UnknownEndpoint.code, None)
        return {result: found[result] for result in sorted(found, key=found.__getitem__, reverse=True) if found[result]}

    def ttft_s(self) -> Quantiles:
        return self._quantiles(of_requests.TTFT_S, lambda _: "")[""]

    def token_shares(self) -> dict[str, float | None]:
        """Shares of prompt tokens, by line; None without tokens."""
        found: dict[str, float | None] = {}
        for line, (part, whole) in TOKEN_LINES.items():
            tokens = self._values(whole)[""]
            found[line] = min(self._values(part)[""] / tokens, 1.0) if tokens else None
        return found

    def _placed_shares(self) -> dict[str, float]:
        cached = self._values(of_decisions.PLACED_CACHED_TOKENS)
        tokens = self._values(of_decisions.PLACED_PROMPT_TOKENS)
        return {placement: cached[placement] / whole for placement, whole in tokens.items() if whole}

    def _classes(self) -> dict[str, dict[str, Any]]:
        """A request failed if its result is an error and its client did not leave."""
        requests = of_requests.CLASS_REQUESTS
        failures = self._values(requests, lambda labels: None if labels[1] in SERVED else labels[0])
        ttft_s, tpot_s = self._quantiles(of_requests.TTFT_S), self._quantiles(of_requests.TPOT_S)
        return {
            name: {"requests": ended, "failures": failures[name], "ttft_s": ttft_s[name], "tpot_s": tpot_s[name]}
            for name, ended in self._values(requests).items()
        }

    def _values(self, declared: Declaration, key: _Key = _first) -> defaultdict[str, float]:
        return defaultdict(float, {name: value for name, (value, *_) in self._grown(declared, key).items()})

    def _quantiles(self, declared: Declaration, key: _Key = _first) -> defaultdict[str, Quantiles]:
        grown = self._grown(declared, key).items()
        return defaultdict(Quantiles, {name: quantiles(declared.buckets, counts) for name, (*counts, _) in grown})

    def _grown(self, declared: Declaration, key: _Key) -> dict[str, Numbers]:
        before = _summed(self._before.get(declared.name, ()), key)
        return {
            name: [max(value, 0.0) for value in map(sub, numbers, before[name])] if name in before else numbers
            for name, numbers in _summed(self._now.get(declared.name, ()), key).items()
        }


def _summed(rows: Sequence[tuple[Labels, Numbers]], key: _Key) -> dict[str, Numbers]:
    found: dict[str, Numbers] = {}
    for labels, numbers in rows:
        if (name := key(labels)) is not None:
            found[name] = list(map(add, found[name], numbers)) if name in found else numbers
    return found


def quantiles(bounds: Sequence[float], counts: Sequence[float]) -> Quantiles:
    """`counts`: of each bucket, the last without a bound."""
    return Quantiles(sum(counts), *(quantile(bounds, counts, share) for share in (0.5, 0.9, 0.95, 0.99)))


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """By linear interpolation within a bucket."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    below, low = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if below + count >= wanted:
            return low + (bound - low) * (wanted - below) / count
        below, low = below + count, bound
    return BEYOND


MINUTE_S, NOBODY_S = 60.0, 50.0
"""The history, and how much of it must show that nobody is served."""
RECENT_S = 15.0
"""Over which times of first tokens are computed."""
MIN_LATENESS, MIN_LATE_TOKENS, MIN_OTHER_TOKENS = 1.8, 3, 10
"""How late the latest first tokens of a pod are, and how many of them and of other pods' are needed for a notice. It
appears sooner than one about a learnt slowdown."""
MIN_UNREAD, MIN_MISSED = 5, 5
"""Fewer requests that were routed by load only, or missed their SLO, in a minute are not shown."""
LATEST_DECISIONS, LATEST_OF_POD = 500, 7
"""With more of a pod, its slow ones would be half of them too late."""
RELOAD_SHOWN_S = 600.0
MAX_NAMES, MAX_CHARACTERS, MAX_ERROR_CHARACTERS = 3, 64, 400
NO_REASONS: Mapping[str, str] = {}


class Notice(msgspec.Struct, frozen=True):
    """One sentence. `about` names the subject for programs; `view` of the page shows more. Red: clients get errors."""

    about: str
    text: str
    view: Literal["now", "policies", "health"] = "now"
    is_red: bool = False


@dataclass(frozen=True, slots=True)
class Counted:
    at_s: float
    transfers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Number of measured transfers and of slow ones, by kind of link."""
    metrics: Mapping[str, MetricRows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """The state now. Ages are in seconds; None: unknown, or there is none."""

    pods: int = 0
    source_error: str = ""
    """Why a source of pods finds none."""
    unserved: Mapping[str, str] = field(default_factory=dict)
    """Why no pod is ready, by model; of "": of any model."""
    without_pods: WithoutPods = WithoutPods.FAIL
    ejected: Mapping[str, str] = field(default_factory=dict)
    """Ejected pods, and why."""
    unwell: Mapping[str, str] = field(default_factory=dict)
    """Ready pods that fail their health checks, and why they stay ready."""
    restarted: Sequence[str] = ()
    """In the last minute."""
    events_lost: Sequence[str] = ()
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    """Times of prefills relative to the class, of pods that differ from it."""
    lateness: Mapping[str, float] = field(default_factory=dict)
    tenant_tokens: Mapping[str, float] = field(default_factory=dict)
    waiting: int = 0
    index_age_s: float | None = None
    policy_error: str = ""
    reload_age_s: float | None = None
    reload_review: str = ""
    reload_ttft_ratio: float = 1.0
    matching: Mapping[str, tuple[Matching, str]] = field(default_factory=dict)
    """How prompts are matched on each ready pod, and why not by KV events."""
    providers_failing: int = 0
    """Identity providers whose signing keys could not be fetched the last time."""


class CountedHistory:
    """The counters of the last minute, one entry a snapshot. Older ones are dropped."""

    def __init__(self) -> None:
        self._kept: deque[Counted] = deque()

    def add(self, now: Counted) -> None:
        self._kept.append(now)
        while self._kept[0].at_s < now.at_s - MINUTE_S:
            self._kept.popleft()

    @property
    def now(self) -> Counted:
        return self._kept[-1]

    def since(self, span_s: float) -> Counted:
        """The first entry of the last `span_s`."""
        return next(one for one in self._kept if one.at_s >= self.now.at_s - span_s)

    def notices(self, present: Present) -> list[Notice]:
        """What needs attention by the last entry and `present`."""
        first, now = self._kept[0], self.now
        grown = MetricsGrowth(now.metrics, first.metrics)
        lately = MetricsGrowth(now.metrics, {}) if first is now else grown
        return [
            *_unserved(present),
            *_failing(grown.answers(), now.at_s - first.at_s),
            *_pods(present),
            *_slo(lately),
            *_index(present),
            *_matching(present),
            *_unread(lately),
            *_restarts(present),
            *_policies(present),
            *_providers(present),
            *_flood(present),
            *_links(self._kept),
        ]


def counted_of(metrics: Mapping[str, MetricRows]) -> Counted:
    slow_from = of_pods.TRANSFER_SLOWDOWN.buckets.index(of_pods.SLOW_TRANSFER) + 1
    slowdowns = {link: counts for (link,), (*counts, _) in metrics[of_pods.TRANSFER_SLOWDOWN.name]}
    return Counted(
        time.monotonic(),
        {link: (sum(counts), sum(counts[slow_from:])) for link, counts in slowdowns.items()},
        metrics,
    )


def lateness_of(seen: Iterable[tuple[PodId, float]]) -> dict[PodId, float]:
    """The median of actual over expected times to first token of each late pod, relative to that of the other pods.
    `seen`: a pod and its ratio for each of the latest requests. O(requests * late pods)."""
    ratios = defaultdict(list)
    for pod, ratio in seen:
        ratios[pod].append(ratio)
    found = {}
    for pod, every in ratios.items():
        own = every[-LATEST_OF_POD:]
        if len(own) >= MIN_LATE_TOKENS and median(own) >= MIN_LATENESS:
            others = [ratio for other, values in ratios.items() if other != pod for ratio in values]
            if len(others) >= MIN_OTHER_TOKENS and (late := median(own) / max(median(others), 1e-3)) >= MIN_LATENESS:
                found[pod] = late
    return found


def latest_ratios(recent: RecentDecisions, *, streamed: bool) -> Iterator[tuple[PodId, float]]:
    """Observed over expected times of requests that one pod served alone: to the first token of streams, or to the end
    of others, whose steps are counted as those of a lone request."""
    since_s = time.time() - RECENT_S
    for kept, ended in recent.latest(LATEST_DECISIONS):
        if not ended or not ended.served or kept.at_s < since_s or not isinstance(ended.served.plan, Direct):
            continue
        pod, expected_ms, actual_ms = ended.served.pod, expected_ttft_ms(ended.served.cost), ended.ttft_ms
        if not streamed and not kept.scene.stream and ended.result == "ok" and ended.output_tokens:
            expected_ms += ended.output_tokens * pod.speed.step_ms(1, ended.prompt_tokens)
            actual_ms = ended.e2e_ms
        if actual_ms is not None and expected_ms > 0 and streamed is kept.scene.stream:
            yield pod.id, actual_ms / expected_ms


def unserved_of(statuses: Iterable[PodStatus], reason_of: Callable[[PodId], str]) -> dict[str, str]:
    """Why no pod of a model is ready, by model; only under "" if no pod at all is. O(pods * models)."""
    found: dict[str, list[PodStatus]] = defaultdict(list)
    for status in statuses:
        for model in ("", *status.pod.models):
            found[model].append(status)
    down = {model: pods for model, pods in found.items() if all(pod.state is not PodState.READY for pod in pods)}
    return {model: _states(pods, reason_of) for model, pods in down.items() if not model or "" not in down}


def _states(statuses: Sequence[PodStatus], reason_of: Callable[[PodId], str]) -> str:
    """How many pods are in each state, and the first known reason."""
    states = Counter(status.state.value for status in statuses)
    reasons = ((status.pod.id, reason_of(status.pod.id)) for status in statuses)
    why = next((f"; {_reasoned(pod, reason)}" for pod, reason in reasons if reason), "")
    return ", ".join(f"{count} {state}" for state, count in states.items()) + why


def _unserved(present: Present) -> Iterator[Notice]:
    do, is_red = present.without_pods.value, present.without_pods is not WithoutPods.WAIT
    if not present.pods:
        todo = present.source_error or "name engines under `pods` in router.yaml, or check what `discovery` selects"
        text = f"No pod is known, so all requests {do}: {shortened(todo, MAX_ERROR_CHARACTERS)}."
        yield Notice("unserved", text, "health", is_red=is_red)
    for model, why in islice(present.unserved.items(), MAX_NAMES):
        of, whose = (f" of {_short(model)}", "its") if model else ("", "all")
        yield Notice("unserved", f"No pod{of} is ready, so {whose} requests {do}: {why}.", is_red=is_red)


def _failing(answers: Mapping[str, float], span_s: float) -> Iterator[Notice]:
    """All requests of a minute failed, for any reason, or some for a reason that is not the client's."""
    total, failed = sum(answers.values()), {name: answers[name] for name in answers if name in thresholds.FAILED}
    count, lately = sum(failed.values()), f"in the last {span_s:.0f} s"
    if answers and span_s >= NOBODY_S and not answers.keys() & SERVED:
        text = f"Nobody was served {lately}: all {total:.0f} requests failed, most of them: {next(iter(answers))}."
        yield Notice("failing", text, is_red=True)
    elif count >= thresholds.SHOWN_FAILURES and count > thresholds.SHOWN_FAILED_SHARE * total:
        share = f"{count:.0f} of {total:.0f} requests ({count / total:.0%})"
        yield Notice("failing", f"{share} failed {lately}, most of them: {next(iter(failed))}.", is_red=True)


def _pods(present: Present) -> Iterator[Notice]:
    if present.ejected and "" not in present.unserved:
        text = f"{_of_pods(present.ejected, present.pods)} ejected: {_names(present.ejected, present.ejected)}."
        yield Notice("ejected", text)
    for pod, why in islice(present.unwell.items(), MAX_NAMES):
        yield Notice("unwell", f"{_short(pod)} fails its health checks, and still gets requests: {why}.")
    for pod, ratio in sorted(present.slowdowns.items(), key=lambda item: -item[1])[:MAX_NAMES]:
        if ratio >= thresholds.SHOWN_SLOWDOWN:
            text = f"{_short(pod)} computes {ratio:.1f} times slower than other pods of its class."
            yield Notice("slow", text)
    for pod, ratio in islice(present.lateness.items(), MAX_NAMES):
        if present.slowdowns.get(pod, 1.0) < thresholds.SHOWN_SLOWDOWN:
            yield Notice("slow", f"Requests on {_short(pod)} take {ratio:.1f} times as long as expected.")
    if lost := present.events_lost:
        text = f"KV events were lost: {_names(lost)}. Their caches are partly unknown until they restart."
        yield Notice("events", text)


def _slo(grown: MetricsGrowth) -> Iterator[Notice]:
    met = grown.slo_requests("true")
    for model, missed in islice(grown.slo_requests("false").items(), MAX_NAMES):
        count = met[model] + missed
        if missed >= MIN_MISSED and met[model] < thresholds.SLO_SHARE * count:
            yield Notice("slo", f"{missed:.0f} of {count:.0f} first tokens of {_short(model)} came later than its SLO.")


def _matching(present: Present) -> Iterator[Notice]:
    """Pods that are routed by load only, and pods whose caches are guessed, by reason; the most frequent reasons."""
    by_reason: dict[tuple[Matching, str], list[str]] = defaultdict(list)
    for pod, found in present.matching.items():
        if found[0] in (Matching.OFF, Matching.NO_EVENTS):
            by_reason[found].append(pod)
    groups = sorted(by_reason.items(), key=lambda group: -len(group[1]))
    for (matching, reason), pods in groups[:MAX_NAMES]:
        by_load = " are routed by load only" if matching is Matching.OFF else ""
        of = f"{_of_pods(pods, present.pods)} ({_names(pods)})"
        yield Notice("matching", f"{of}{by_load}: {shortened(reason, MAX_ERROR_CHARACTERS)}.")
    if more := [pod for _, pods in groups[MAX_NAMES:] for pod in pods]:
        text = f"{_of_pods(more, present.pods)} have other reasons; `warmroute pods` lists them."
        yield Notice("matching", text)


def _unread(grown: MetricsGrowth) -> Iterator[Notice]:
    by_reason, requests = grown.unread(), sum(grown.answers().values())
    unread = sum(by_reason.values())
    if unread >= MIN_UNREAD and unread > thresholds.UNREAD_SHARE * requests:
        reason = max(by_reason, key=by_reason.__getitem__)
        text = f"{unread:.0f} of {requests:.0f} requests were routed by load only, most of them: {_short(reason)}."
        yield Notice("unread", text, "health")


def _restarts(present: Present) -> Iterator[Notice]:
    if found := present.restarted:
        text = f"{_of_pods(found, present.pods)} restarted in the last minute, with empty caches: {_names(found)}."
        yield Notice("restarts", text)


def _policies(present: Present) -> Iterator[Notice]:
    if present.policy_error:
        error = shortened(present.policy_error, MAX_ERROR_CHARACTERS)
        yield Notice("policy", f"Policy files are invalid; the last valid set stays: {error}", "policies")
    age_s = present.reload_age_s
    if age_s is not None and age_s < RELOAD_SHOWN_S and present.reload_ttft_ratio > thresholds.WORSE_TTFT_RATIO:
        change = f"mean predicted TTFT {present.reload_ttft_ratio - 1:+.0%}"
        text = f"Policies were changed {age_s:.0f} s ago, for the worse: {change}; {present.reload_review}."
        yield Notice("policy", text, "policies")


def _index(present: Present) -> Iterator[Notice]:
    if present.index_age_s is not None and present.index_age_s > thresholds.SHOWN_INDEX_AGE_S:
        text = f"The shared index is {present.index_age_s:.0f} s old: Redis does not answer."
        yield Notice("index", text, "health")


def _providers(present: Present) -> Iterator[Notice]:
    if present.providers_failing:
        text = (
            f"The signing keys of {present.providers_failing} identity providers cannot be fetched: tokens"
            " signed with known keys stay valid, others are refused. The log names them."
        )
        yield Notice("identity", text, "health")


def _flood(present: Present) -> Iterator[Notice]:
    total = sum(present.tenant_tokens.values())
    if not total or present.waiting < max(present.pods, 1):
        return
    tenant, tokens = max(present.tenant_tokens.items(), key=itemgetter(1))
    if thresholds.TENANT_SHARE < (share := tokens / total) < thresholds.ONLY_TENANT_SHARE:
        who = f"Tenant {_short(tenant)} has" if tenant else "Clients without a tenant have"
        waiting = f"{present.waiting} requests wait in engines"
        yield Notice("tenant", f"{who} {share:.0%} of the prompt tokens being served; {waiting}.")


def _links(kept: Sequence[Counted]) -> Iterator[Notice]:
    """By the shortest time that has `SHOWN_TRANSFERS`: many good ones before an incident hide no slow ones."""
    for link, (total, total_slow) in kept[-1].transfers.items():
        for before in reversed(kept):
            earlier, earlier_slow = before.transfers.get(link, (0.0, 0.0))
            if (count := total - earlier) >= thresholds.SHOWN_TRANSFERS:
                slow = total_slow - earlier_slow
                if slow >= thresholds.SHOWN_SLOW_SHARE * count:
                    text = (
                        f"{slow:.0f} of the latest {count:.0f} transfers of KV over links {_short(link)} took more than"
                        f" {of_pods.SLOW_TRANSFER:g} times as long as configured."
                    )
                    yield Notice("link", text, "health")
                break


def _of_pods(found: Collection[str], pods: int) -> str:
    return f"{len(found)} of {pods} pods"


def _names(pods: Collection[str], reasons: Mapping[str, str] = NO_REASONS) -> str:
    more = len(pods) - MAX_NAMES
    shown = ", ".join(_reasoned(pod, reasons.get(pod, "")) for pod in islice(pods, MAX_NAMES))
    return shown + (f" and {more} more" if more > 0 else "")


def _reasoned(pod: str, reason: str) -> str:
    return f"{_short(pod)} ({shortened(reason, MAX_ERROR_CHARACTERS)})" if reason else _short(pod)


def _short(text: str) -> str:
    return shortened(text, MAX_CHARACTERS)
