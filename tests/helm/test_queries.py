"""Alerts and scaling triggers use metrics that the router exports, with labels and buckets that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from helm.monitoring.metric_catalog import DECLARED
from router.observe.metrics import Metrics, add_process_metrics
from tests.helm.charts import Rendered, example, minimal

MONITORED = {"monitoring": {"prometheusRule": {"enabled": True}}, "autoscaling": {"keda": {"enabled": True}}}


def queries(rendered: Rendered) -> Iterator[str]:
    for rule in rendered.all("PrometheusRule"):
        yield from (one["expr"] for group in rule["spec"]["groups"] for one in group["rules"])
    for scaler in rendered.all("ScaledObject"):
        yield from (trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"])


@pytest.fixture(scope="module")
def exported() -> str:
    """Names of the router's series, as HELP and TYPE lines."""
    metrics = Metrics()
    add_process_metrics(metrics.registry)
    return metrics.render().decode()


def test_every_metric_exists(exported: str) -> None:
    named = {name for query in queries(minimal(MONITORED)) for name in re.findall(r"warmroute_\w+", query)}
    families = {re.sub(r"_(bucket|count|sum|total)$", "", name) for name in named}
    assert len(families) > 5
    assert not [
        name for name in families if f"# TYPE {name} " not in exported and f"# TYPE {name}_total " not in exported
    ]


def test_every_bucket_exists() -> None:
    queried = [query for query in queries(minimal(MONITORED)) if 'le="' in query]
    buckets = [found for query in queried for found in re.findall(r'(\w+_bucket)\{[^}]*le="([\d.]+)"', query)]
    assert buckets
    for name, bound in buckets:
        bounds = DECLARED[name.removesuffix("_bucket")].buckets
        assert float(bound) in bounds and bound == str(float(bound)), "as it is exported"


def test_triggers_count_the_routers_of_this_release_only() -> None:
    for trigger in example("prefill-decode").one("ScaledObject")["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        series = re.findall(r"warmroute_\w+\{([^}]*)\}", query)
        assert series
        assert all('namespace="llm",container="router",pod=~"r-warmroute-' in one for one in series)


def test_alerts_carry_a_severity_and_own_labels() -> None:
    rule = example("multi-zone").one("PrometheusRule")
    for alert in rule["spec"]["groups"][0]["rules"]:
        assert alert["labels"] == {"team": "inference", "severity": alert["labels"]["severity"]}
        assert "$labels" in alert["annotations"]["summary"]
