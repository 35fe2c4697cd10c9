"""Requests whose prompts the router cannot read wait in the same queue and use the same shares as all others."""

from __future__ import annotations

import pytest

from router.admission.tenant import Tenant
from tests.request.busy_pods import BusyPods, Kind

PREFILL_S, CLIENTS, RUN_S = 0.5, 30, 40.0
MESSAGES = [{"role": "user", "content": ""}]
UNREAD = {
    "truncated": Kind("unread", fields={"messages": MESSAGES, "truncate_prompt_tokens": 9}),
    "response": Kind("unread", "/v1/responses", {"input": "", "truncation": "auto"}),
    "other": Kind("unread", "/v1/score", {"text": ""}),
}
READ = Kind("read")


@pytest.mark.parametrize("kind", UNREAD)
def test_tenants_whose_prompts_are_not_read_get_the_same_share(kind: str) -> None:
    """They are priced by the bytes of their bodies."""
    served = BusyPods(PREFILL_S).run(RUN_S, {READ: CLIENTS, UNREAD[kind]: CLIENTS})
    assert served.total() > 0.6 * 3 * RUN_S / PREFILL_S
    assert served["unread"] == pytest.approx(served["read"], rel=0.12)


def test_what_needs_no_prompt_does_not_wait() -> None:
    """Such as a request without a body."""
    busy = BusyPods(PREFILL_S)
    busy.run(5.0, {READ: CLIENTS})
    assert all(busy.front.receive("/v1/other", b"", Tenant(name="read"), method="GET").asked for _ in range(9))
