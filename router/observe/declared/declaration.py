"""What describes a metric: one value for the code that counts, the reference page, dashboards and alerts."""

from __future__ import annotations

from enum import StrEnum

import msgspec

LABELS = {
    "by": "`prior` or `learnt`",
    "cause": "Causes of broken streams that `request/continuation/` distinguishes",
    "class": "Workload classes of the configuration; empty where a request ended before it was classified",
    "coefficient": "Coefficients of the cost model",
    "dialect": "Handoff dialects of the router",
    "engine": "Engines of the router",
    "endpoint": "OpenAI endpoints that the router distinguishes; `other` for the rest",
    "holder": "Pods and stores in the shared index",
    "kind": "`prompt`, `cached`, `computed` or `output`",
    "limit": "`requests`, `prompt`, `output` or `concurrent`",
    "link": "Kinds of links between pods",
    "met": "`true` or `false`",
    "matching": "`events`, `predicted`, `no_events` or `off`",
    "model": "Models of the configuration and of pods; empty where a request names none of them",
    "phase": "The seven phases of a request",
    "pod": "Pods of the fleet; a pod's series leave with it",
    "placement": "`chosen`: where requests were sent; or `round_robin`: to all pods in turn",
    "plan": "`direct`, `pull` or `split`",
    "policy": "Policies of the configuration; empty where a request ended before it was decided",
    "pool": "Pools of pods: `pool` in the configuration, or the label `warmroute.dev/pool`",
    "python_version": "Version of Python",
    "reason": "Codes of the router",
    "resource": "`prefill`, `kv_cache` or `decode_steps`",
    "method": "How streams are continued: `ids`, `replay`, `retry`, `finish`; `none`",
    "outcome": "`joined`, `left`, `differs`, `failed`, or why a stream was not continued",
    "result": "`ok` or a code of the router",
    "role": "`both`, `prefill` or `decode`",
    "set_version": "Digest of all policies",
    "source": "Discovery sources of the configuration",
    "stage": "`all`, `available`, `captured` or `delivered`",
    "state": "All states of a pod or holder",
    "subject": "Classes of pods (model/engine/hardware) and kinds of links",
    "tenant": "The 20 busiest tenants, and `other`",
    "tier": "`gpu`, `cpu`, `disk`, `remote`; `peer` for what is pulled from another pod",
    "trust": "All results of a parity self-test",
    "version": "Digest of a policy, or version of a program",
}
"""Where the values of each label come from. All are bounded: clients choose the names of tenants only."""


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Declaration(msgspec.Struct, frozen=True):
    """One metric. `name` is without the suffixes of samples; it ends with the unit."""

    kind: MetricKind
    name: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()
    """Ascending upper bounds (inclusive) of a histogram, without infinity."""
    exemplars: bool = False
    """Whether its buckets name recorded traces."""

    @property
    def series(self) -> str:
        """The name of its samples; those of a histogram add `_bucket`, `_sum` or `_count`."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name


def counter(name: str, text: str, labels: str = "") -> Declaration:
    """A number that only grows. `labels` are names separated by spaces."""
    return Declaration(MetricKind.COUNTER, name, text, tuple(labels.split()))


def gauge(name: str, text: str, labels: str = "") -> Declaration:
    return Declaration(MetricKind.GAUGE, name, text, tuple(labels.split()))


def histogram(
    name: str, text: str, labels: str = "", *, buckets: tuple[float, ...], exemplars: bool = False
) -> Declaration:
    """Values counted by upper bound."""
    bounds = tuple(map(float, buckets))
    return Declaration(MetricKind.HISTOGRAM, name, text, tuple(labels.split()), bounds, exemplars)
