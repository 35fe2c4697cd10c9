"""An SLO in router.yaml, and another one of a tenant, move the counters that the alert reads."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from router.admission.tenant import Slo
from tests.stories.conftest import Deploy

pytestmark = [pytest.mark.net, pytest.mark.anyio]


async def test_first_tokens_are_counted_by_the_slo_of_the_model_and_of_the_tenant(
    deploy: Deploy, tmp_path: Path
) -> None:
    """Two streams begin within a minute, and one has a nanosecond."""
    strict, file = "slo: {ttft_ms: 0.000001}", tmp_path / "tenants.yaml"
    keys = {name: sha256(name.encode()).hexdigest() for name in ("usual", "strict")}
    file.write_text(
        "tenants:\n" + "".join(f"- {{name: {n}, keys: [{k}], {strict * (n == 'strict')}}}\n" for n, k in keys.items())
    )

    async with deploy(1, model={"slo": Slo(ttft_ms=60_000.0)}, tenants=file) as deployment:
        for name in ("usual", "usual", "strict"):
            headers = {"authorization": f"Bearer {name}"}
            body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True}
            assert (await deployment.client.post("/v1/chat/completions", json=body, headers=headers)).is_success
        await deployment.until(lambda: deployment.program.metrics.in_flight.value == 0)
        lines = (await deployment.admin.get("/metrics")).text.splitlines()
    start = "warmroute_slo_requests_total{met="
    found = sorted(line for line in lines if line.startswith(start))
    labels = 'model="demo",policy="cost_aware"'
    assert found == [f'{start}"false",{labels}}} 1.0', f'{start}"true",{labels}}} 2.0']
