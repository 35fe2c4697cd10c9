"""What a tenant and its SLO say."""

from __future__ import annotations

from router.admission.tenant import NO_SLO, OPEN_TENANT, Slo


def test_a_long_prompt_may_take_a_multiple_of_its_idle_prefill() -> None:
    """A short one has the fixed limit."""
    slo = Slo(ttft_ms=2000.0, idle_prefills=3.0)
    assert (slo.ttft_limit_ms(100.0), slo.ttft_limit_ms(1000.0)) == (2000.0, 3000.0)


def test_without_tenants_everybody_is_one_tenant_without_limits() -> None:
    """As before tenants."""
    assert NO_SLO.ttft_limit_ms(1e9) == float("inf") and OPEN_TENANT.slo is None
    assert (OPEN_TENANT.name, OPEN_TENANT.weight, OPEN_TENANT.band) == ("", 1.0, 0)
