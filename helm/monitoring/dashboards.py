"""The Grafana dashboards: rows of panels, each with queries of declared metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from helm.monitoring import process_families
from helm.monitoring.metric_catalog import DECLARED
from helm.monitoring.promql import DASHBOARD as D
from helm.monitoring.promql import PUBLISHERS, Expr, name_of
from router.observe.declared import of_decisions, of_pods, of_pools, of_process, of_publisher, of_requests
from router.observe.fast_metrics import Declaration, MetricKind

Json = dict[str, Any]
Unit = Literal["short", "s", "percentunit", "reqps", "bytes", "Bps", "ops", "none"]
WIDTH, HEIGHT, ACROSS = 24, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Line:
    """One query of a panel. `legend` names labels in double braces."""

    expr: Expr
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart; `about` says how to read it. `stacked`: the lines are parts of a whole."""

    title: str
    unit: Unit
    lines: tuple[Line, ...]
    about: str = ""
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard; `name` is its file. Its panels are in rows with titles."""

    name: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    def panels(self) -> Iterator[Panel]:
        for _, panels in self.rows:
            yield from panels


def _panel(title: str, unit: Unit, *lines: Line, about: str = "", stacked: bool = False) -> Panel:
    return Panel(title, unit, lines, about, stacked)


def _legend(declared: Declaration, by: str) -> str:
    return " ".join(f"{{{{{name_of(declared, label)}}}}}" for label in by.split())


def _rate(title: str, unit: Unit, declared: Declaration, by: str, about: str = "") -> Panel:
    """Increases per second of a counter."""
    return _panel(title, unit, Line(D.rate(declared, by), _legend(declared, by) or title), about=about, stacked=True)


def _quantiles(title: str, declared: Declaration, by: str, about: str = "", unit: Unit = "s") -> Panel:
    """Median and 99th percentile."""
    lines = [
        Line(D.quantile(share, declared, by), f"p{share * 100:g} {_legend(declared, by)}") for share in (0.5, 0.99)
    ]
    return _panel(title, unit, *lines, about=about)


def _gauge(title: str, unit: Unit, how: str, declared: Declaration, by: str, about: str = "", **match: str) -> Panel:
    return _panel(title, unit, Line(D.total(how, declared, by, **match), _legend(declared, by) or title), about=about)


def _published(title: str, how: str, declared: Declaration, by: str) -> Panel:
    """A figure of publishers; `how` is empty for counters."""
    expr = PUBLISHERS.total(how, declared, by) if how else PUBLISHERS.rate(declared, by)
    return _panel(title, "short", Line(expr, _legend(declared, by)))


def _stages(by: str = "") -> tuple[Line, ...]:
    """Available, captured and delivered tokens, as shares of the prompt tokens."""
    prompts, reported = D.rate(of_requests.PROMPT_TOKENS, by), D.rate(of_requests.REPORTED_PROMPT_TOKENS, by)
    legend = _legend(of_requests.PROMPT_TOKENS, by)
    return (
        Line(D.rate(of_requests.AVAILABLE_TOKENS, by) / prompts, f"available {legend}".strip()),
        Line(D.rate(of_requests.CAPTURED_TOKENS, by) / prompts, f"captured {legend}".strip()),
        Line(D.rate(of_requests.DELIVERED_TOKENS, by) / reported, f"delivered {legend}".strip()),
    )


def _tenant_hits() -> Panel:
    tokens = of_requests.TENANT_TOKENS
    share = D.rate(tokens, "tenant", stage="delivered") / D.rate(tokens, "tenant", stage="all")
    return _panel("Cached tokens delivered by tenant", "percentunit", Line(share, "{{tenant}}"))


def _slo() -> Panel:
    by = "model policy"
    met = D.rate(of_requests.SLO_REQUESTS, by, met="true") / D.rate(of_requests.SLO_REQUESTS, by)
    return _panel("First tokens within the SLO", "percentunit", Line(met, "{{model}} {{policy}}"))


def _bandwidth() -> Panel:
    """Shows bytes per second of the time in which KV was transferred."""
    expr = D.rate(of_pods.TRANSFER_BYTES, "link") / D.sum_rate(of_pods.TRANSFER_S, "link")
    return _panel("Bandwidth of one transfer", "Bps", Line(expr, "{{link}}"))


def _transfer_ratio() -> Panel:
    median = D.quantile(0.5, of_pods.TRANSFER_SLOWDOWN, "link")
    return _panel("Time of transfers against the configuration, median", "none", Line(median, "{{link}}"))


STAGES = (
    "Available: held by some pod. Captured: held by the chosen pod. Delivered: reported by its engine. Available over"
    " captured: load weighed more. Captured over delivered: evicted meanwhile. Delivered over captured: the index is"
    " late."
)
WORTH = (
    "By the pods' calibrated coefficients. chosen: where requests were sent. round_robin, least_load: with the caches"
    " that pods would have then. These equal chosen while the error is above 3 points."
)
EVICTED = "Learnt number of requests that would have used an evicted block: above 0.5, larger caches pay."

OVERVIEW = Dashboard(
    "overview",
    "warmroute / Overview",
    (
        (
            "Clients",
            (
                _rate("Requests by result", "reqps", of_requests.REQUESTS, "result"),
                _rate("Requests by model", "reqps", of_requests.REQUESTS, "model"),
                _gauge("Requests in flight", "short", "sum", of_requests.IN_FLIGHT, ""),
                _quantiles("Time to first token by model", of_requests.TTFT_S, "model"),
                _quantiles("Time to first token by class", of_requests.TTFT_S, "class"),
                _slo(),
                _quantiles("Time per output token", of_requests.TPOT_S, "model"),
                _quantiles("Time between tokens", of_requests.INTER_TOKEN_S, "model", "Of every sixteenth stream."),
                _quantiles("Request duration", of_requests.DURATION_S, "model"),
                _panel("Cached tokens of prompts", "percentunit", *_stages(), about=STAGES),
            ),
        ),
        (
            "Pods",
            (
                _gauge("Pods by state", "short", "sum", of_pods.POD_STATE, "state", "Each router counts its pods."),
                _gauge("Running requests", "short", "max", of_pods.POD_RUNNING, "pod"),
                _gauge("Waiting requests", "short", "max", of_pods.POD_WAITING, "pod"),
                _gauge("Pods by engine and role", "none", "max", of_pods.POD_INFO, "pod model engine version role"),
                _gauge("KV cache use", "percentunit", "max", of_pods.POD_KV_USAGE, "pod"),
                _rate("Attempts by pod and result", "reqps", of_pods.POD_REQUESTS, "pod result"),
                _quantiles("Time to first token by pod", of_pods.POD_TTFT_S, "pod"),
                _gauge("Slowdown against the class", "none", "max", of_pods.POD_SLOWDOWN, "pod", "1: as others."),
                _rate("Restarts", "ops", of_pods.POD_RESTARTS, "pod", "The cache is empty afterwards."),
            ),
        ),
        (
            "Pools",
            (
                _gauge("Requests that wait for a first pod", "short", "sum", of_requests.WAITING_FOR_PODS, "model"),
                _gauge("Desired replicas", "none", "sum", of_pools.POOL_DESIRED_REPLICAS, "pool model role resource"),
                _gauge("Ready replicas", "none", "max", of_pools.POOL_READY_REPLICAS, "pool model role"),
                _gauge("Saturation", "percentunit", "sum", of_pools.POOL_SATURATION, "pool model role"),
                _gauge("Queued prompt tokens", "short", "sum", of_pools.POOL_QUEUED_TOKENS, "pool model role"),
                _gauge("Prefill backlog", "s", "sum", of_pools.POOL_BACKLOG_S, "pool model role"),
                _gauge("Prefill load", "none", "sum", of_pools.POOL_PREFILL_LOAD, "pool model role"),
                _gauge("Running requests of pools", "short", "max", of_pools.POOL_RUNNING, "pool model role"),
                _gauge("Free KV tokens", "short", "max", of_pools.POOL_KV_FREE_TOKENS, "pool model role"),
            ),
        ),
        (
            "Tenants",
            (
                _rate("Requests by tenant", "reqps", of_requests.CLASS_REQUESTS, "tenant", "The 20 busiest."),
                _rate("Requests by name", "reqps", of_requests.NAMED_REQUESTS, "name model", "Of the file of names."),
                _rate(
                    "Fallbacks", "reqps", of_requests.FALLBACKS, "name model reason", "Other models of a name served."
                ),
                _rate("Requests by class", "reqps", of_requests.CLASS_REQUESTS, "class"),
                _panel(
                    "Prompt tokens by tenant",
                    "short",
                    Line(D.rate(of_requests.TENANT_TOKENS, "tenant", stage="all"), "{{tenant}}"),
                    stacked=True,
                ),
                _gauge("Prompt tokens in flight", "short", "sum", of_requests.TENANT_IN_FLIGHT_TOKENS, "tenant"),
                _rate(
                    "Requests above a quota", "reqps", of_requests.QUOTA_REFUSALS, "tenant limit", "Answered with 429."
                ),
                _rate("Tokens by tenant", "short", of_requests.USAGE_TOKENS, "tenant kind", "All requests that ended."),
            ),
        ),
    ),
)

HITS = Dashboard(
    "hits",
    "warmroute / Hits and evictions",
    (
        (
            "Where prompts are cached",
            (
                _panel("Cached tokens of prompts", "percentunit", *_stages(), about=STAGES),
                _panel("By model", "percentunit", *_stages("model"), about=STAGES),
                _panel("By class", "percentunit", *_stages("class"), about=STAGES),
                _rate("Available tokens by tier", "short", of_requests.AVAILABLE_TOKENS, "tier"),
                _rate("Captured tokens by tier", "short", of_requests.CAPTURED_TOKENS, "tier", "peer: pulled."),
                _rate("Prompt tokens that prefill pods compute", "short", of_requests.SPLIT_TOKENS, "dialect tokens"),
                _tenant_hits(),
                _rate("Decisions by reason", "reqps", of_decisions.DECISIONS, "plan reason"),
                _rate("Prefill that hits saved", "s", of_decisions.PREFILL_SAVED_S, "model placement", WORTH),
                _rate("Their tokens", "short", of_decisions.PLACED_CACHED_TOKENS, "model placement", WORTH),
                _rate("Prompt tokens of these", "short", of_decisions.PLACED_PROMPT_TOKENS, "model placement"),
                _gauge("Error of their cached share", "percentunit", "max", of_decisions.PLACED_ERROR, "model"),
                _quantiles("Depth of prefixes in tokens", of_requests.PREFIX_DEPTH, "model", unit="short"),
                _quantiles("Interval between uses of a prefix", of_requests.REUSE_INTERVAL_S, "model"),
                _gauge("Evicted blocks needed again", "none", "max", of_decisions.EVICTED_REUSE, "model", EVICTED),
                _rate("Tokens needed within a minute of eviction", "short", of_decisions.EVICTED_SOON_TOKENS, "model"),
                _rate("Their prefill seconds", "none", of_decisions.EVICTED_SOON_S, "model", "Each second: pods."),
                _quantiles("Predicted against reported cached tokens", of_requests.CACHED_ERROR, "model", unit="short"),
            ),
        ),
        (
            "What the router knows",
            (
                _gauge("Block holders in the index", "short", "max", of_process.INDEX_BLOCKS, ""),
                _rate("KV events by pod", "ops", of_pods.KV_EVENTS, "pod"),
                _rate("KV streams that lost events", "ops", of_pods.KV_GAPS, "pod"),
                _gauge("Complete KV streams", "none", "min", of_pods.KV_STREAM_COMPLETE, "pod", "0: events are lost."),
                _gauge(
                    "Failed self-tests", "none", "max", of_pods.POD_TRUST, "pod", "1: not matched.", trust="mismatch"
                ),
                _gauge(
                    "Pods routed by load only", "none", "max", of_pods.POD_MATCHING, "pod", "1: off.", matching="off"
                ),
                _gauge("Age of the shared index", "s", "max", of_process.INDEX_AGE_S, ""),
                _gauge(
                    "Complete holders of the shared index", "none", "min", of_process.INDEX_HOLDER_COMPLETE, "holder"
                ),
                _rate("Matches without a current index", "reqps", of_process.DEGRADED_MATCHES, "model"),
                _rate("Blocks that do not fit", "ops", of_process.INDEX_DROPPED_BLOCKS, ""),
                _rate("Requests without prefix matching", "reqps", of_requests.UNREAD_PROMPTS, "reason"),
            ),
        ),
        (
            "Publishers",
            (
                _published("Holders by state", "sum", of_publisher.PUBLISHER_STATE, "state"),
                _published("Complete holders", "min", of_publisher.PUBLISHER_COMPLETE, "holder"),
                _published("Blocks waiting for Redis", "sum", of_publisher.PUBLISHER_PENDING, "holder"),
                _published("Blocks written", "", of_publisher.PUBLISHER_WRITTEN, "holder"),
                _published("Reloads of holders", "", of_publisher.PUBLISHER_RELOADS, "holder"),
                _published("Orphaned blocks", "", of_publisher.PUBLISHER_ORPHANS, "holder"),
            ),
        ),
    ),
)

PREDICTION = Dashboard(
    "prediction",
    "warmroute / Prediction and regret",
    (
        (
            "Expected and actual",
            (
                _quantiles("Expected time to first token", of_decisions.TTFT_PREDICTED_S, "model"),
                _quantiles("Actual time to first token", of_requests.TTFT_S, "model"),
                _quantiles("Relative error", of_decisions.TTFT_ERROR, "model", unit="percentunit"),
                _quantiles("Regret", of_decisions.REGRET_S, "model", "Against the best other candidate, sampled."),
                _panel(
                    "Mean expected and actual time",
                    "s",
                    Line(D.mean(of_decisions.TTFT_PREDICTED_S, "model"), "expected {{model}}"),
                    Line(D.mean(of_requests.TTFT_S, "model"), "actual {{model}}"),
                ),
                _rate("Decisions by policy", "reqps", of_decisions.DECISIONS, "policy reason"),
            ),
        ),
        (
            "Calibration",
            (
                _gauge("Coefficients", "none", "avg", of_decisions.COEFFICIENT, "subject pod coefficient"),
                _gauge("Confidence", "percentunit", "avg", of_decisions.CONFIDENCE, "subject pod"),
                _gauge(
                    "Error by prior and calibration", "percentunit", "avg", of_decisions.CALIBRATION_ERROR, "subject by"
                ),
            ),
        ),
        (
            "Policies",
            (
                _gauge("Active policies", "none", "max", of_decisions.POLICY_INFO, "policy version"),
                _rate("Reloads", "ops", of_decisions.POLICY_RELOADS, "result"),
                _gauge("Expected TTFT after the last reload", "none", "max", of_decisions.POLICY_RELOAD_TTFT, ""),
                _gauge("Invalid policy files", "none", "max", of_decisions.POLICY_RELOAD_FAILED, ""),
            ),
        ),
    ),
)

TRANSFERS = Dashboard(
    "transfers",
    "warmroute / P/D and transfers",
    (
        (
            "Handoffs",
            (
                _rate("Handoffs by result", "reqps", of_pods.HANDOFFS, "dialect result"),
                _quantiles("Time from prefill response to decode response", of_pods.HANDOFF_S, "dialect"),
                _gauge("Transfers in progress", "short", "sum", of_pods.TRANSFERS, "pod"),
                _rate("Bytes transferred", "Bps", of_pods.TRANSFER_BYTES, "link"),
                _bandwidth(),
                _quantiles("Time of transfers", of_pods.TRANSFER_S, "link"),
                _transfer_ratio(),
                _rate("Decisions by plan", "reqps", of_decisions.DECISIONS, "plan"),
            ),
        ),
        (
            "Pulls and links",
            (
                _panel(
                    "Tokens pulled from peers",
                    "short",
                    Line(D.rate(of_requests.CAPTURED_TOKENS, "model", tier="peer"), "{{model}}"),
                    stacked=True,
                ),
                _panel(
                    "Coefficients of links",
                    "none",
                    Line(
                        D.total("avg", of_decisions.COEFFICIENT, "subject coefficient", pod=""),
                        "{{subject}} {{coefficient}}",
                    ),
                ),
                _gauge("Requests in flight by pod", "short", "sum", of_pods.POD_IN_FLIGHT, "pod"),
            ),
        ),
    ),
)

ROUTER = Dashboard(
    "router",
    "warmroute / Router internals",
    (
        (
            "Time in the router",
            (
                _quantiles("Phases", of_requests.PHASE_S, "phase"),
                _quantiles("Loop lag", of_process.LOOP_LAG_S, "", "Late timers: a stall delays every request."),
                _panel("CPU", "none", Line(D.rate(process_families.CPU_S), "CPU"), about="Cores."),
                _gauge("Memory", "bytes", "sum", process_families.RESIDENT_BYTES, ""),
                _gauge("Prompt caches", "bytes", "sum", of_requests.PROMPT_CACHE_BYTES, "model"),
                _gauge("Index replica", "bytes", "sum", of_process.INDEX_BYTES, ""),
                _gauge("Open files", "short", "sum", process_families.OPEN_FDS, ""),
                _gauge("Other routers", "short", "max", of_process.REPLICAS, ""),
            ),
        ),
        (
            "Failures",
            (
                _rate("Retries", "reqps", of_requests.RETRIES, "reason"),
                _rate("Retries refused", "reqps", of_requests.RETRIES_REFUSED, "reason"),
                _rate("Broken streams, and how they went on", "reqps", of_requests.CONTINUATIONS, "method outcome"),
                _rate("Cancellations by phase", "reqps", of_requests.CANCELLATIONS, "phase"),
                _rate("Ejections", "ops", of_pods.EJECTIONS, "pod"),
                _rate("Ejections refused", "ops", of_pods.EJECTIONS_REFUSED, "pod"),
                _gauge("Age of discovery", "s", "max", of_pods.DISCOVERY_AGE_S, "source"),
                _rate("Changes that a watch had lost", "ops", of_pods.RESYNC_DIFFERENCES, "source"),
                _gauge("Age of pod loads", "s", "max", of_pods.POD_LOAD_AGE_S, "pod"),
                _rate("Receipts lost", "ops", of_process.RECEIPTS_LOST, ""),
                _rate("Lines of usage lost", "ops", of_process.USAGE_LOST, ""),
                _gauge("Identity providers that fail", "none", "max", of_process.IDENTITY_PROVIDERS_FAILING, ""),
                _rate(
                    "Prompts that differ when read incrementally", "ops", of_requests.INCREMENTAL_MISMATCHES, "model"
                ),
                _rate("Compared prompts by rule", "ops", of_requests.PROMPTS_COMPARED, "rule result"),
                _rate("Full reads of holders", "ops", of_process.INDEX_READS, ""),
                _gauge("Version", "none", "max", of_process.BUILD_INFO, "version python_version"),
            ),
        ),
    ),
)


def _further(shown: Sequence[Dashboard]) -> tuple[Panel, ...]:
    """A panel for each metric of routers that no dashboard shows, by all of its labels."""
    names = {
        one.name
        for dashboard in shown
        for panel in dashboard.panels()
        for line in panel.lines
        for one in line.expr.uses
    }
    return tuple(_plain(one) for one in DECLARED.values() if one.name not in names)


def _plain(declared: Declaration) -> Panel:
    by = " ".join(declared.labels)
    match declared.kind:
        case MetricKind.COUNTER:
            return _rate(declared.name, "short", declared, by, declared.help)
        case MetricKind.GAUGE:
            return _gauge(declared.name, "short", "max", declared, by, declared.help)
        case MetricKind.HISTOGRAM:
            return _quantiles(declared.name, declared, by, declared.help, unit="short")


_SHOWN = (OVERVIEW, HITS, PREDICTION, TRANSFERS, ROUTER)
DASHBOARDS = (*_SHOWN[:-1], replace(ROUTER, rows=(*ROUTER.rows, ("Further metrics", _further(_SHOWN)))))


# --- Grafana's JSON ---


def dashboard_file(dashboard: Dashboard) -> str:
    """The dashboard as a file that Grafana imports."""
    return json.dumps(_dashboard(dashboard), indent=1) + "\n"


def _dashboard(dashboard: Dashboard) -> Json:
    links = {"type": "dashboards", "tags": ["warmroute"], "title": "warmroute", "asDropdown": True, "keepTime": True}
    return {
        "uid": f"warmroute-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["warmroute"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [links | {"includeVars": True}],
        "templating": {"list": list(_variables())},
        "panels": list(_placed(dashboard)),
    }


def _variables() -> Iterator[Json]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    versions = of_process.BUILD_INFO.series
    for name, label, query in (
        ("namespace", "namespace", f"label_values({versions}, namespace)"),
        ("router", "pod", f'label_values({versions}{{namespace=~"$namespace"}}, pod)'),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": {"text": "All", "value": "$__all"},
        }


def _placed(dashboard: Dashboard) -> Iterator[Json]:
    """Rows and panels with their places on a grid."""
    y, number, width = 0, 0, WIDTH // ACROSS
    for title, panels in dashboard.rows:
        number += 1
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "panels": []} | _at(0, y, WIDTH, 1)
        y += 1
        for first in range(0, len(panels), ACROSS):
            for column, panel in enumerate(panels[first : first + ACROSS]):
                number += 1
                yield {"id": number, **_chart(panel), **_at(column * width, y, width, HEIGHT)}
            y += HEIGHT


def _at(x: int, y: int, width: int, height: int) -> Json:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _chart(panel: Panel) -> Json:
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": stacking, "showPoints": "never"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": line.expr.bare,
                "legendFormat": line.legend,
                **({"exemplar": True} if any(one.exemplars for one in line.expr.uses) else {}),
            }
            for at, line in enumerate(panel.lines)
        ],
    }
