"""Whether a first token met the SLO is counted by the limits of the model, or of the tenant, on a virtual clock."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.admission.admission_queue import AdmissionConfig
from router.admission.tenant import OPEN_TENANT, Slo, Tenant
from router.cost_model import PodSpeed
from router.types import Links
from tests.kit.memory_front import CHAT, TOKEN, USAGE, MemoryRouter

MODEL, STRICT = Slo(ttft_ms=1000.0), Tenant(name="strict", slo=Slo(ttft_ms=400.0))
NAME = "warmroute_slo_requests_total"


def counted(rig: MemoryRouter) -> dict[str, float]:
    """Requests by whether they met their SLO."""
    labels = {"model": "m", "policy": "cost_aware"}
    found = {met: rig.known.metrics.registry.get_sample_value(NAME, labels | {"met": met}) for met in ("true", "false")}
    return {met: value for met, value in found.items() if value}


def answer(rig: MemoryRouter, after_s: float, tenant: Tenant | None = None, **head: Any) -> None:
    """Serve a chat whose first token comes after this time."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    served = rig.front.receive(CHAT, json.dumps(body).encode(), tenant or OPEN_TENANT, **head)
    served.head()
    rig.now_s += after_s
    for piece in (TOKEN, USAGE):
        served.piece(piece)
    served.end()


@pytest.mark.parametrize(
    ("tenant", "after_s", "met"),
    [
        (None, 0.9, "true"),
        (None, 1.1, "false"),
        (STRICT, 0.3, "true"),
        (STRICT, 0.9, "false"),
        (Tenant(name="usual"), 0.9, "true"),
    ],
)
def test_a_first_token_is_measured_by_the_slo_of_the_model_or_of_the_tenant(
    tenant: Tenant | None, after_s: float, met: str
) -> None:
    """A tenant without one has that of the model."""
    rig = MemoryRouter(slo=MODEL)
    answer(rig, after_s, tenant)
    assert counted(rig) == {met: 1.0}


def test_without_an_slo_nothing_is_counted_unless_the_tenant_has_one() -> None:
    """So the alert cannot fire."""
    rig = MemoryRouter()
    answer(rig, 99.0)
    assert counted(rig) == {}
    answer(rig, 99.0, STRICT)
    assert counted(rig) == {"false": 1.0}


def test_a_long_prompt_may_take_idle_prefills() -> None:
    """50 tokens at 20 ms are a second of prefill."""
    rig = MemoryRouter(slo=Slo(ttft_ms=1000.0, idle_prefills=3.0))
    rig.known.fleet.calibrate(dict.fromkeys("abc", PodSpeed(0.0, 20.0, 0.0)), Links())
    for after_s in (2.9, 3.1):
        answer(rig, after_s)
    assert counted(rig) == {"true": 1.0, "false": 1.0}


def test_a_queue_counts_by_the_slo_that_it_refuses_by() -> None:
    """That of the model, else its own default of two seconds; not where the client chose a deadline."""
    for slo, met in ((MODEL, {"false": 1.0}), (None, {"true": 1.0})):
        rig = MemoryRouter(admission=AdmissionConfig(), slo=slo)
        answer(rig, 1.5)
        answer(rig, 1.5, headers=[(b"x-request-deadline-ms", b"9000")])
        assert counted(rig) == met
