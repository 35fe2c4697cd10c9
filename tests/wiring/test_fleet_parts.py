"""The configuration of ejections reaches the breaker; what a pod reports otherwise is a change."""

from __future__ import annotations

from msgspec import structs

from router.config.schema import Probes
from router.engines.adapter import PodFacts
from router.fleet.breaker import EjectionRules
from router.wiring.fleet_parts import ejection_rules, generation_change
from tests.policy.scenes import make_pod


def test_every_key_of_the_configuration_applies() -> None:
    """Each has its own value here."""
    probes = Probes(
        failures_to_eject=4,
        clients_to_eject=5,
        min_ready_share=0.25,
        slow_ttft_factor=7.0,
        slow_ttfts_to_eject=6,
        doubt_window_s=8.0,
    )
    assert ejection_rules(probes) == EjectionRules(4, 5, 0.25, 7.0, 6, 8.0)


def test_the_defaults_of_configuration_and_breaker_agree() -> None:
    """The publisher uses the defaults of the breaker."""
    assert ejection_rules(Probes()) == EjectionRules()


def test_a_pod_that_serves_something_else_is_a_change_of_its_generation() -> None:
    """With what it reported before; its first description is no change, nor is an equal one."""
    served = make_pod("a", models=("m",), version="0.24.1", weights="w", block_size_tokens=16)
    same = PodFacts(models=("m",), version="0.24.1", weights="w", block_size_tokens=16)
    assert generation_change(make_pod("a"), same) == generation_change(served, same) == ""
    newer = structs.replace(same, version="0.25.0", weights="w2", adapters=("one",))
    assert generation_change(served, newer) == "weights w2, before w; version 0.25.0, before 0.24.1"
