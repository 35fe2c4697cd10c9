"""The configuration of a load in the keys of another checkout's router."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.bench.checkout import HERE, Checkout, UnknownSettings
from loadtest.bench.duties import Duty, lacking

OLD = Checkout(Path("old"), Path("python"), frozenset({"pods", "feeds", "limits"}))
CONFIG: dict[str, object] = {"pods": [], "limits": {}, "probes": {"self_test": False}}


def test_this_router_gets_the_configuration_as_it_is() -> None:
    assert HERE.known(CONFIG) == CONFIG
    assert HERE.has_admin_port


def test_an_older_router_gets_its_own_key_for_the_self_test() -> None:
    assert OLD.known(CONFIG) == {"pods": [], "limits": {}, "feeds": {"parity": False}}
    assert not OLD.has_admin_port


def test_an_older_queue_gets_the_slo_of_the_first_model() -> None:
    """In the limits that it would have chosen itself; without a queue an older router has no SLO."""
    old, slo = Checkout(Path("old"), Path("python"), frozenset({"models", "admission"})), {"ttft_ms": 9.0}
    found = old.known({"models": [{"name": "m", "slo": slo}], "admission": {"max_requests": 1}})
    limits = {"ttft_ms": 9.0, "tpot_ms": "inf", "idle_prefills": 0.0}
    assert found == {"models": [{"name": "m"}], "admission": {"max_requests": 1, "slo": limits}}
    assert old.known({"models": [{"name": "m", "slo": slo}]}) == {"models": [{"name": "m"}]}
    assert HERE.known({"models": [{"name": "m", "slo": slo}]}) == {"models": [{"name": "m", "slo": slo}]}


def test_settings_that_a_router_lacks_are_named() -> None:
    with pytest.raises(UnknownSettings, match="old has no setting admission, tenants"):
        OLD.known({**CONFIG, "tenants": "tenants.yaml", "admission": {}})


def test_duties_that_a_router_lacks_are_known_before_it_runs() -> None:
    """KV events and Redis need no key of their own."""
    duties = [Duty.TENANTS, Duty.QUOTAS, Duty.QUEUE, Duty.EVENTS, Duty.REDIS]
    assert lacking(OLD, duties) == ["admission", "tenants"]
    assert lacking(HERE, list(Duty)) == []
