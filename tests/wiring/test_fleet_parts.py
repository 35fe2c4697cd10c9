"""The configuration of ejections reaches the breaker."""

from __future__ import annotations

from router.config.schema import Probes
from router.fleet.breaker import EjectionRules
from router.wiring.fleet_parts import ejection_rules


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
