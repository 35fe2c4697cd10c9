"""Every alert fires in its incident, and none does while all is well: checked by promtool, Prometheus's own tool."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helm.generate import CHART
from helm.monitoring.alerts import ALERTS, FAILED, Alert, commands, runbook
from helm.monitoring.metric_catalog import DECLARED
from router.cli import COMMANDS
from router.frontends.admin.views import pod_rows
from tests.helm.charts import minimal
from tests.helm.prometheus_tool import needs_promtool, promtool

RULES = CHART / "files" / "alerts.yaml"
MINUTES = 30
TARGET = 'namespace="llm",pod="r-0"'
POD = f'{TARGET},exported_pod="gpu-0"'

pytestmark = needs_promtool

WELL: Mapping[str, str] = {
    f'warmroute_build_info{{{TARGET},version="1"}}': "1",
    f'warmroute_pod_state{{{POD},state="ready"}}': "1",
    f'warmroute_pod_state{{{POD},state="ejected"}}': "0",
    f'warmroute_requests_total{{{TARGET},model="m",result="ok"}}': "0+600",
    f'warmroute_requests_total{{{TARGET},model="m",result="pod_error"}}': "0+1",
    f'warmroute_requests_total{{{TARGET},model="m",result="malformed_request"}}': "0+300",
    f'warmroute_slo_requests_total{{{TARGET},model="m",policy="p",met="true"}}': "0+95",
    f'warmroute_slo_requests_total{{{TARGET},model="m",policy="p",met="false"}}': "0+5",
    f"warmroute_pod_slowdown_ratio{{{POD}}}": "1.3",
    f'warmroute_pod_slowdown_ratio{{{TARGET},exported_pod="gpu-1"}}': "1",
    f"warmroute_pod_restarts_total{{{POD}}}": "0+0",
    f"warmroute_pod_load_age_seconds{{{POD}}}": "1",
    f'warmroute_discovery_age_seconds{{{TARGET},source="kubernetes"}}': "20",
    f"warmroute_policy_reload_failed{{{TARGET}}}": "0",
    f"warmroute_identity_providers_failing{{{TARGET}}}": "0",
    f"warmroute_policy_reload_ttft_ratio{{{TARGET}}}": "1.1",
    f'warmroute_policy_reloads_total{{{TARGET},result="ok"}}': "0+1",
    f'warmroute_tenant_in_flight_prompt_tokens{{{TARGET},tenant="a"}}': "4000",
    f'warmroute_tenant_in_flight_prompt_tokens{{{TARGET},tenant="b"}}': "5000",
    f"warmroute_pool_prefill_backlog_seconds{{{TARGET}}}": "3",
    f"warmroute_pool_ready_replicas{{{TARGET}}}": "2",
    f'warmroute_time_to_first_token_error_ratio_bucket{{{TARGET},model="m",le="1.0"}}': "0+97",
    f'warmroute_time_to_first_token_error_ratio_count{{{TARGET},model="m"}}': "0+100",
    f'warmroute_prompt_tokens_total{{{TARGET},model="m"}}': "0+600000",
    f'warmroute_reported_prompt_tokens_total{{{TARGET},model="m"}}': "0+300000",
    f'warmroute_cached_tokens_captured_total{{{TARGET},model="m",tier="gpu"}}': "0+400000",
    f'warmroute_cached_tokens_delivered_total{{{TARGET},model="m"}}': "0+190000",
    f'warmroute_pod_prefix_trust{{{POD},trust="mismatch"}}': "0",
    f'warmroute_pod_matching{{{POD},matching="off"}}': "0",
    f'warmroute_pod_matching{{{POD},matching="no_events"}}': "0",
    f'warmroute_unread_prompts_total{{{TARGET},model="m",reason="media"}}': "0+5",
    f'warmroute_prompts_compared_total{{{TARGET},model="m",rule="text parts",result="equal"}}': "0+5",
    f'warmroute_prompts_compared_total{{{TARGET},model="m",rule="text parts",result="differs"}}': "0",
    f"warmroute_kv_stream_complete{{{POD}}}": "1",
    f"warmroute_index_age_seconds{{{TARGET}}}": "1",
    f"warmroute_index_dropped_blocks_total{{{TARGET}}}": "0+0",
    f'warmroute_handoffs_total{{{TARGET},dialect="nixl",result="ok"}}': "0+100",
    f'warmroute_handoffs_total{{{TARGET},dialect="nixl",result="decode_failed"}}': "0+1",
    f'warmroute_transfer_slowdown_ratio_bucket{{{TARGET},link="rack",le="3.0"}}': "0+36",
    f'warmroute_transfer_slowdown_ratio_count{{{TARGET},link="rack"}}': "0+60",
    f'warmroute_retries_refused_total{{{TARGET},reason="upstream_broken"}}': "0+1",
    f'warmroute_loop_lag_seconds_bucket{{{TARGET},le="0.05"}}': "0+6000",
    f"warmroute_loop_lag_seconds_count{{{TARGET}}}": "0+6000",
    f"process_open_fds{{{TARGET}}}": "300",
    f"process_max_fds{{{TARGET}}}": "1024",
    f'warmroute_provider_money_total{{{TARGET},provider="hosted"}}': "3",
    f'warmroute_requests_waiting_for_pods{{{TARGET},model="m"}}': "0",
}
"""A fleet in which all is well: value a minute, or start and increase a minute."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Series that differ from a well fleet, and labels of the alert that must fire. None: the series is missing."""

    changed: Mapping[str, str | None]
    labels: Mapping[str, str]
    well: Mapping[str, str] | None = None


def changed(start: str, value: str | None) -> dict[str, str | None]:
    """The series of a well fleet that starts like this, with another value."""
    [series] = [one for one in WELL if one.startswith(start)]
    return {series: value}


OF_ROUTER = {"namespace": "llm", "pod": "r-0"}
OF_POD = {"namespace": "llm", "exported_pod": "gpu-0"}
READY, EJECTED = (f'warmroute_pod_state{{{POD},state="{state}"}}' for state in ("ready", "ejected"))
INCIDENTS: Mapping[str, Incident] = {
    "WarmrouteNoReadyPod": Incident({READY: None, EJECTED: None}, OF_ROUTER),
    "WarmrouteRequestsWaitForPods": Incident(
        changed("warmroute_requests_waiting_for_pods", "3"), {"namespace": "llm", "model": "m"}
    ),
    "WarmrouteRequestsFail": Incident(
        changed(f'warmroute_requests_total{{{TARGET},model="m",result="pod_error"}}', "0+60"), {"namespace": "llm"}
    ),
    "WarmrouteSloMissed": Incident(
        changed(f'warmroute_slo_requests_total{{{TARGET},model="m",policy="p",met="true"}}', "0+40"),
        {"namespace": "llm", "model": "m"},
    ),
    "WarmroutePodEjected": Incident({READY: "0", EJECTED: "1"}, OF_POD),
    "WarmroutePodSlow": Incident(changed(f"warmroute_pod_slowdown_ratio{{{POD}}}", "2.6"), OF_POD),
    "WarmrouteCachesLost": Incident(changed("warmroute_pod_restarts", "0+1"), {"namespace": "llm"}),
    "WarmrouteLoadStale": Incident(changed("warmroute_pod_load_age", "60"), {**OF_ROUTER, **OF_POD}),
    "WarmrouteDiscoveryStale": Incident(
        changed("warmroute_discovery_age", "0+60"), {**OF_ROUTER, "source": "kubernetes"}
    ),
    "WarmroutePolicyInvalid": Incident(changed("warmroute_policy_reload_failed", "1"), OF_ROUTER),
    "WarmroutePolicyWorse": Incident(changed("warmroute_policy_reload_ttft", "1.8"), OF_ROUTER),
    "WarmrouteTenantFloods": Incident(
        changed(f'warmroute_tenant_in_flight_prompt_tokens{{{TARGET},tenant="a"', "90000"),
        {"namespace": "llm", "tenant": "a"},
    ),
    "WarmrouteIdentityProviderFails": Incident(changed("warmroute_identity_providers_failing", "1"), OF_ROUTER),
    "WarmroutePredictionWrong": Incident(
        changed("warmroute_time_to_first_token_error_ratio_bucket", "0+30"), {"namespace": "llm", "model": "m"}
    ),
    "WarmrouteCacheEvicted": Incident(
        changed("warmroute_cached_tokens_delivered", "0+60000"), {"namespace": "llm", "model": "m"}
    ),
    "WarmrouteParityMismatch": Incident(changed("warmroute_pod_prefix_trust", "1"), OF_POD),
    "WarmrouteMatchingOff": Incident(changed(f'warmroute_pod_matching{{{POD},matching="off"', "1"), OF_POD),
    "WarmroutePromptsUnread": Incident(changed("warmroute_unread_prompts", "0+60"), {"namespace": "llm", "model": "m"}),
    "WarmroutePromptsDiffer": Incident(
        changed(f'warmroute_prompts_compared_total{{{TARGET},model="m",rule="text parts",result="differs"', "1"),
        {"namespace": "llm", "model": "m", "rule": "text parts"},
    ),
    "WarmrouteKvEventsMissing": Incident(changed(f'warmroute_pod_matching{{{POD},matching="no_events"', "1"), OF_POD),
    "WarmrouteKvEventsIncomplete": Incident(changed("warmroute_kv_stream_complete", "0"), OF_POD),
    "WarmrouteIndexStale": Incident(changed("warmroute_index_age", "0+60"), OF_ROUTER),
    "WarmrouteIndexFull": Incident(changed("warmroute_index_dropped", "0+5"), OF_ROUTER),
    "WarmrouteHandoffsFail": Incident(
        changed(f'warmroute_handoffs_total{{{TARGET},dialect="nixl",result="decode_failed"}}', "0+50"),
        {"namespace": "llm", "dialect": "nixl"},
    ),
    "WarmrouteLinkSlow": Incident(
        changed("warmroute_transfer_slowdown_ratio_bucket", "0+6"),
        {"namespace": "llm", "link": "rack"},
    ),
    "WarmrouteRetriesRefused": Incident(
        changed("warmroute_retries_refused", "0+60"), {"namespace": "llm", "reason": "upstream_broken"}
    ),
    "WarmrouteLoopLag": Incident(changed("warmroute_loop_lag_seconds_bucket", "0+5700"), OF_ROUTER),
    "WarmrouteOpenFiles": Incident(changed("process_open_fds", "1000"), OF_ROUTER),
    "WarmrouteProviderPaid": Incident(
        changed("warmroute_provider_money", "0+0.1"), {"namespace": "llm", "provider": "hosted"}
    ),
}


def test_the_rules_are_valid() -> None:
    """For Prometheus itself."""
    promtool("check", "rules", str(RULES))


def test_every_alert_has_an_incident_and_every_series_is_declared() -> None:
    """So that the tests below cannot pass because a name is wrong."""
    assert [alert.name for alert in ALERTS] == list(INCIDENTS)
    names = {series.partition("{")[0] for series in WELL}
    bare = {
        name.removesuffix("_total").removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for name in names
    }
    assert bare <= DECLARED.keys()
    assert all(code in FAILED for code in ("pod_error", "internal_error", "upstream_timeout", "no_ready_pod"))
    assert "malformed_request" not in FAILED and "ok" not in FAILED.split("|")


def test_no_alert_fires_while_all_is_well(tmp_path: Path) -> None:
    """Also for clients that send invalid requests, and engines that report no cached tokens for half of the prompts."""
    check(tmp_path, {}, {alert.name: [] for alert in ALERTS})


@pytest.mark.parametrize(("met", "missed", "fires"), [(None, "0+9", True), (None, None, False)])
def test_a_model_misses_its_slo_with_no_first_token_in_time_and_never_without_one(
    tmp_path: Path, met: str | None, missed: str | None, fires: bool
) -> None:
    """A model without an SLO has no series."""
    start, alert = f'warmroute_slo_requests_total{{{TARGET},model="m",policy="p",met=', "WarmrouteSloMissed"
    fired = {"exp_labels": {"namespace": "llm", "model": "m", "severity": "warning"}}
    changes = {**changed(f'{start}"true"', met), **changed(f'{start}"false"', missed)}
    check(tmp_path, changes, {alert: [fired] if fires else []})


@pytest.mark.parametrize("name", INCIDENTS)
def test_an_incident_fires_its_alert(tmp_path: Path, name: str) -> None:
    """With the labels that its summary names."""
    incident = INCIDENTS[name]
    alert = next(one for one in ALERTS if one.name == name)
    check(tmp_path, incident.changed, {name: [{"exp_labels": {**incident.labels, "severity": alert.severity}}]})


def check(folder: Path, changes: Mapping[str, str | None], expected: Mapping[str, list[Any]]) -> None:
    """Run the rules over half an hour of a well fleet with these changes."""
    series = {name: values for name, values in {**WELL, **changes}.items() if values is not None}
    for alerts in expected.values():
        for one in alerts:
            one["exp_annotations"] = annotated(one["exp_labels"], next(iter(expected)))
    test = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": f"{with_step(values)}x{MINUTES}"} for name, values in series.items()
        ],
        "alert_rule_test": [
            {"eval_time": f"{MINUTES}m", "alertname": name, "exp_alerts": alerts} for name, alerts in expected.items()
        ],
    }
    path = folder / "tests.yaml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", str(path))


def with_step(values: str) -> str:
    return values if "+" in values else f"{values}+0"


def annotated(labels: Mapping[str, str], name: str) -> dict[str, str]:
    """Those of an alert, with these labels."""
    alert = next(one for one in ALERTS if one.name == name)
    summary = alert.summary
    for label, value in labels.items():
        summary = summary.replace(f"{{{{ $labels.{label} }}}}", value)
    url = f"RUNBOOK.md#{alert.name.lower()}"
    return {"summary": summary, "description": f"{alert.means} {alert.act}", "runbook_url": url}


# --- the runbook ---


def test_a_refusal_that_is_meant_is_no_failure() -> None:
    """`admission` refuses requests that would be late, and quotas those above them."""
    assert not {"overloaded", "share_exceeded", "rate_limit_exceeded"} & set(FAILED.removeprefix("~").split("|"))


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_commands_of_the_runbook_run_in_a_pod_of_the_chart(alert: Alert) -> None:
    """In the form of `kubectl exec`, with the token that the chart mounts; and they exist."""
    for command in commands(alert):
        assert command.startswith("kubectl -n NAMESPACE exec deployment/RELEASE-warmroute -c router -- warmroute ")
        name = command.split(" -- warmroute ")[1].split()[0]
        assert name in COMMANDS and command.endswith("--bearer-file /run/secrets/warmroute/admin/token")


def test_fields_that_the_runbook_names_exist() -> None:
    fields = {field for one in ALERTS for field in re.findall(r"warmroute pods --json`, `(\w+)`", one.look)}
    assert fields == {"kv_events"} and all(f'"{field}"' in inspect.getsource(pod_rows) for field in fields)


def test_every_alert_leads_to_its_paragraph() -> None:
    """`runbook_url` is the anchor, behind the address that the values name."""
    headings = {line.removeprefix("## ").lower() for line in runbook().splitlines() if line.startswith("## ")}
    for url, prefix in (("", "RUNBOOK.md#"), ("https://wiki.example/runbook", "https://wiki.example/runbook#")):
        rule = {"monitoring": {"prometheusRule": {"enabled": True, "runbookUrl": url}}}
        groups = minimal(rule).one("PrometheusRule")["spec"]["groups"]
        alerts = [one for group in groups for one in group["rules"] if "alert" in one]
        assert len(alerts) == len(ALERTS)
        for one in alerts:
            assert one["annotations"]["runbook_url"] == prefix + one["alert"].lower()
            assert one["alert"].lower() in headings and one["annotations"]["summary"]
