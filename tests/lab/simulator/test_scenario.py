"""A YAML file becomes the fleet that it describes."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.simulator.generate import TrafficMix
from loadtest.simulator.router_view import Knowledge
from loadtest.simulator.scenario import DIALECT, BelievedSpec, Conditions, FleetSpec
from router.config.load import load, shipped
from router.errors import ConfigError
from router.types import AttentionKind, LayerType, Link, Links, PodSpeed, Role
from tests.kit.worlds import SPEED, prior

FLEET = """
model: m
pods:
  - {count: 2, hardware: h, kv_tokens: 1000, gpus: 4}
  - {count: 1, hardware: h, kv_tokens: 500, cpu_kv_tokens: 700, role: decode}
link: {t0_ms: 0.5, gb_per_s: 12.0}
conditions: {routers: 3, event_delay_ms: 20, exchange_ms: null}
knowledge: {events: false}
"""


def read(folder: Path, text: str) -> FleetSpec:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return load(path, FleetSpec)


@pytest.mark.parametrize("path", sorted((shipped("config") / "fleets").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_fleet_loads(path: Path) -> None:
    """And can be built."""
    spec = load(path, FleetSpec)
    assert len(spec.build(prior).pods) == sum(group.count for group in spec.pods)


@pytest.mark.parametrize("path", sorted((shipped("config") / "traffic").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_traffic_loads(path: Path) -> None:
    """And yields a session."""
    first = next(iter(load(path, TrafficMix).traffic().sessions))
    assert first.requests[0].prompt_tokens > 0


def test_a_file_becomes_its_fleet(tmp_path: Path) -> None:
    """Pods group by group, with the coefficients of the prior."""
    spec = read(tmp_path, FLEET)
    fleet = spec.build(prior)
    assert [pod.known.id for pod in fleet.pods] == ["pod-0001", "pod-0002", "pod-0003"]
    assert [pod.known.role for pod in fleet.pods] == [Role.BOTH, Role.BOTH, Role.DECODE]
    assert [(pod.true.kv_tokens, pod.true.cpu_kv_tokens) for pod in fleet.pods] == [(1000, 0), (1000, 0), (500, 700)]
    assert {(pod.known.speed, pod.true.speed, pod.known.kv_bytes_per_token) for pod in fleet.pods} == {
        (SPEED, SPEED, 1000)
    }
    assert {(pod.known.handoff, pod.known.pulls) for pod in fleet.pods} == {(DIALECT, DIALECT)}
    assert fleet.link == Link(0.5, 12e6)
    assert fleet.believed_links == Links(elsewhere=fleet.link, cpu=Link(0.0, 20e6))
    assert fleet.splits
    assert spec.gpus == 2 * 4 + 1
    assert spec.conditions == Conditions(routers=3, event_delay_ms=20, exchange_ms=None)
    assert spec.knowledge == Knowledge(events=False)


def test_pods_without_a_link_use_only_their_own_tiers(tmp_path: Path) -> None:
    """There is no link between pods."""
    text = FLEET.replace("link: {t0_ms: 0.5, gb_per_s: 12.0}", "pcie_gb_per_s: 50")
    fleet = read(tmp_path, text).build(prior)
    assert fleet.link is None
    assert fleet.believed_links == Links(cpu=Link(0.0, 50e6))


@pytest.mark.parametrize(("number", "counts"), [(3, [2, 1]), (9, [6, 3]), (4, [3, 1]), (2, [1, 1])])
def test_groups_keep_their_proportions(tmp_path: Path, number: int, counts: list[int]) -> None:
    """As near as whole pods allow."""
    spec = read(tmp_path, FLEET)
    assert spec.pod_count == 3
    assert [group.count for group in spec.with_pods(number).pods] == counts


def test_too_few_pods_for_the_groups_are_refused(tmp_path: Path) -> None:
    """A fleet without one of its groups would be another fleet."""
    with pytest.raises(ConfigError, match="1 pods are too few for 2 groups"):
        read(tmp_path, FLEET).with_pods(1)


def test_a_slow_group_takes_longer_and_the_router_knows(tmp_path: Path) -> None:
    """Prefill and decode; the router's own error comes on top."""
    spec = read(tmp_path, FLEET.replace("role: decode", "slowdown: 2") + "believed: {compute: 0.5}\n")
    fast, _, slow = spec.build(prior).pods
    assert slow.true.speed.coefficients == tuple(2 * each for each in SPEED.coefficients)
    assert fast.true.speed == SPEED
    assert slow.known.speed.c1_ms_per_token == SPEED.c1_ms_per_token
    assert slow.known.speed.d0_ms == 2 * SPEED.d0_ms


def test_groups_of_layers_are_repeated_in_their_order(tmp_path: Path) -> None:
    """As an engine numbers them."""
    spec = read(tmp_path, FLEET + "kv_groups: [2 x window 1024, state, full]\n")
    window = LayerType(AttentionKind.WINDOW, 0, 1024)
    groups = (window, window, LayerType(AttentionKind.STATE, 0), LayerType(AttentionKind.FULL, 0))
    assert [pod.true.kv_groups for pod in spec.build(prior).pods] == [groups] * 3


def test_errors_change_only_what_the_router_believes(tmp_path: Path) -> None:
    """The true pods and links stay the same."""
    spec = read(tmp_path, FLEET)
    misjudged = spec.model_copy(update={"believed": BelievedSpec(compute=2.0, bandwidth=0.5)})
    right, wrong = spec.build(prior), misjudged.build(prior)
    assert [pod.true for pod in wrong.pods] == [pod.true for pod in right.pods]
    assert wrong.link == right.link
    assert wrong.believed_links == Links(elsewhere=Link(0.5, 6e6), cpu=Link(0.0, 10e6))
    believed = PodSpeed(
        SPEED.c0_ms,
        SPEED.c1_ms_per_token * 2,
        SPEED.c2_ms_per_token2 * 2,
        SPEED.d0_ms,
        SPEED.d1_ms_per_request,
        SPEED.d2_ms_per_context_token,
    )
    assert {pod.known.speed for pod in wrong.pods} == {believed}


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("gpus: 4", "gpu: 4", r"fleet\.yaml:4: pods\.0\.gpu: unknown key; did you mean 'gpus'"),
        ("gb_per_s", "gbps", r"fleet\.yaml:6: link\.gbps: unknown key"),
        ("routers: 3", "router: 3", r"fleet\.yaml:7: conditions\.router: unknown key; did you mean 'routers'"),
        ("events: false", "event: false", r"fleet\.yaml:8: knowledge\.event: unknown key; did you mean 'events'"),
        ("knowledge:", "slo: {ttft_ms: 9}\nknowledge:", r"fleet\.yaml:8: slo: was removed; .* or use --slo"),
        ("knowledge:", "admission: {slo: {}}\nknowledge:", r"fleet\.yaml:8: admission\.slo: unknown key"),
        ("model: m", "modell: m", r"fleet\.yaml:2: modell: unknown key; did you mean 'model'"),
        ("count: 2", "count: 0", r"fleet\.yaml:4: pods\.0\.count: "),
        ("routers: 3", "routers: 0", r"fleet\.yaml:7: conditions\.routers: "),
        ("link:", "kv_groups: [windows 8, full]\nlink:", r"fleet\.yaml:6: kv_groups: .*windows 8: expected \"full\""),
        ("link:", "kv_groups: [window 8]\nlink:", r"fleet\.yaml:6: kv_groups: .*exactly one group must be `full`"),
        ("routers: 3", "scrape_ms: 0", r"fleet\.yaml:7: conditions\.scrape_ms: "),
    ],
)
def test_a_mistake_is_reported_with_file_line_and_key(tmp_path: Path, good: str, bad: str, message: str) -> None:
    """On every level."""
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, FLEET.replace(good, bad))


def test_a_mistake_in_a_traffic_file_is_reported(tmp_path: Path) -> None:
    """Down to the kinds."""
    path = tmp_path / "traffic.yaml"
    path.write_text("sessions_per_s: 1\nduration_s: 1\nkinds:\n  chat:\n    prefix: 3\n")
    with pytest.raises(ConfigError, match=r"traffic\.yaml:5: kinds\.chat\.prefix: unknown key"):
        load(path, TrafficMix)
