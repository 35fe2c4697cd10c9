"""Every request of a tenant has one line of usage, however it ends."""

from __future__ import annotations

import json

from router.admission.admission_queue import AdmissionConfig
from router.admission.quotas import Quota
from router.admission.tenant import Slo, Tenant
from router.errors import UpstreamBroken
from tests.kit.memory_front import CHAT, TOKEN, MemoryExchange, MemoryRouter

WHOLE = b'{"choices":[{"message":{"content":"a"}}],"usage":{"prompt_tokens":50,"completion_tokens":4}}'
TENANT = Tenant(name="acme", quotas=(Quota(requests_per_minute=9),))


def endings(router: MemoryRouter) -> list[tuple[int, str, int]]:
    """Status, result and output tokens of each line, all of which are of the tenant."""
    found = [json.loads(line) for line in router.known.usage_lines]
    assert {one["tenant"] for one in found} == {"acme"} and len({one["id"] for one in found}) == len(found)
    return [(one["status"], one["result"], one["output_tokens"]) for one in found]


def whole(served: MemoryExchange, status: int = 200) -> None:
    """An answer in one piece."""
    served.head(status, is_stream=False)
    served.piece(WHOLE if status == 200 else b"{}")
    served.end()


def test_answers_and_failures_of_a_pod_have_a_line() -> None:
    """A pod that dies in a stream leaves what was sent; one that dies before its answer, nothing."""
    router = MemoryRouter(records_all=True)
    whole(router.chat(TENANT, stream=False))
    cut = router.chat(TENANT)
    cut.head()
    for _ in range(2):
        cut.piece(TOKEN)
    cut.fail(UpstreamBroken("cut", pod=cut.asked[-1]))
    failed = router.chat(TENANT)
    while not failed.is_over:
        failed.fail(UpstreamBroken("gone", pod=failed.asked[-1]))
    whole(router.chat(TENANT), 422)
    expected = [(200, "ok", 4), (200, "upstream_broken", 2), (502, "upstream_broken", 0)]
    assert endings(router) == [*expected, (422, "pod_refused", 0)]


def test_refusals_of_the_router_have_a_line() -> None:
    """By the model, which counts as a request, the queue and the quota."""
    slo = Slo(ttft_ms=60_000.0, tpot_ms=100.0)
    router = MemoryRouter(records_all=True, admission=AdmissionConfig(), slo=slo)
    tenant = Tenant(name="acme", quotas=(Quota(requests_per_minute=2),))
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "late"}]}).encode()
    router.chat(tenant, model="none")
    router.front.receive(CHAT, body, tenant, headers=[(b"x-request-deadline-ms", b"0")])
    router.chat(tenant)
    expected = [(404, "model_not_found", 0), (503, "overloaded", 0), (429, "rate_limit_exceeded", 0)]
    assert endings(router) == expected


def test_without_tenants_requests_have_a_line_too() -> None:
    router = MemoryRouter(records_all=True)
    whole(router.chat(stream=False))
    (line,) = router.known.usage_lines
    assert (json.loads(line)["tenant"], json.loads(line)["output_tokens"]) == ("", 4)
