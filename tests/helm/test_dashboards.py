"""Dashboards show declared metrics only, and every metric of a router has a place."""

from __future__ import annotations

import json
import re

import pytest

from helm.monitoring.dashboards import ACROSS, DASHBOARDS, WIDTH, Dashboard, dashboard_file
from helm.monitoring.metric_catalog import DECLARED
from helm.monitoring.metrics_page import metrics_page, unit_of, uses
from helm.monitoring.promql import DASHBOARD, EACH_ROUTER, name_of
from router.observe.declared import of_pods, of_process, of_requests
from tests.helm.charts import minimal


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.name)
def test_every_panel_has_a_place_of_its_own(dashboard: Dashboard) -> None:
    """On Grafana's grid, 24 columns wide, and with a number of its own."""
    found = json.loads(dashboard_file(dashboard))
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < WIDTH
        taken |= cells
    numbers = [panel["id"] for panel in found["panels"]]
    assert len(set(numbers)) == len(numbers) > ACROSS


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.name)
def test_every_query_is_balanced_and_filtered(dashboard: Dashboard) -> None:
    """By the namespace and the routers that the viewer selects, or by the namespace for publishers."""
    for panel in dashboard.panels():
        for line in panel.lines:
            text = line.expr.text
            assert text.count("(") == text.count(")") and text.count("{") == text.count("}")
            assert text.count("namespace=~") == len(re.findall(r"\b(?:warmroute|process)_\w+\{", text)) > 0
            shown = set(re.findall(r"\{\{(\w+)\}\}", line.legend))
            grouped = {label for group in re.findall(r"by \(([^)]*)\)", text) for label in group.split(", ")}
            assert shown <= grouped, panel.title


def test_every_metric_is_in_a_panel_or_an_alert() -> None:
    """New ones are in the last row of the router's dashboard until they have a better place."""
    assert DECLARED.keys() == uses().keys()


def test_the_reference_page_names_every_metric_with_its_use() -> None:
    """Type, labels and where it is shown."""
    page = metrics_page()
    for declared in DECLARED.values():
        section = page.split(f"### {declared.series}\n")[1].split("\n### ")[0]
        assert declared.help in section and declared.kind.value in section
        assert all(f"`{label}`" in section for label in declared.labels)
        assert "Used by" in section
    assert unit_of(of_requests.TTFT_S) == "seconds"
    assert unit_of(of_process.REPLICAS) == ""


def test_labels_that_a_scrape_has_as_well_are_renamed() -> None:
    """Prometheus puts `exported_` before the metric's own."""
    assert EACH_ROUTER.total("max", of_pods.POD_KV_USAGE, "pod").text == (
        "max by (namespace, pod, exported_pod) (warmroute_pod_kv_usage_ratio)"
    )
    assert name_of(of_requests.REQUESTS, "endpoint") == "exported_endpoint"


def test_queries_of_missing_labels_types_and_buckets_are_refused() -> None:
    """When the files are generated."""
    with pytest.raises(ValueError, match="has no label 'tenant'; it has endpoint, model, result"):
        DASHBOARD.rate(of_requests.REQUESTS, "tenant")
    with pytest.raises(ValueError, match="warmroute_other_replicas is a gauge"):
        DASHBOARD.rate(of_process.REPLICAS)
    with pytest.raises(ValueError, match="is a counter"):
        DASHBOARD.quantile(0.5, of_requests.REQUESTS)
    with pytest.raises(ValueError, match=r"has no bucket 0\.07"):
        DASHBOARD.share_above(0.07, of_process.LOOP_LAG_S)


def test_the_chart_ships_each_dashboard_as_a_config_map() -> None:
    """With the label by which Grafana's sidecar finds it."""
    maps = list(minimal({"monitoring": {"dashboards": {"enabled": True}}}).all("ConfigMap"))
    found = {name: one for one in maps for name in one["data"] if name.endswith(".json")}
    assert found.keys() == {f"{dashboard.name}.json" for dashboard in DASHBOARDS}
    for dashboard in DASHBOARDS:
        config_map = found[f"{dashboard.name}.json"]
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(config_map["data"][f"{dashboard.name}.json"])["title"] == dashboard.title
