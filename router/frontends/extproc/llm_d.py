"""The request headers of llm-d and of Gateway API's inference extension, by the names of the router's own."""

from __future__ import annotations

from collections.abc import Mapping

from router.request.inbound import HeaderList
from router.request.queues import DEADLINE_HEADER

OBJECTIVE_HEADER = b"x-gateway-inference-objective"
MODEL_HEADER = b"x-llm-d-model-name-rewrite"


def aliases(tenant_header: str) -> Mapping[bytes, bytes]:
    """llm-d's names, newer ones last, and the router's own. `tenant_header`: see `Edge`."""
    tenant = tenant_header.lower().encode()
    return {
        b"x-gateway-inference-fairness-id": tenant,
        b"x-llm-d-inference-fairness-id": tenant,
        b"x-llm-d-inference-objective": OBJECTIVE_HEADER,
        b"x-gateway-model-name-rewrite": MODEL_HEADER,
        b"x-slo-ttft-ms": DEADLINE_HEADER,
        b"x-llm-d-slo-ttft-ms": DEADLINE_HEADER,
    }


def translated(headers: HeaderList, own: Mapping[bytes, bytes]) -> HeaderList:
    """The headers, and for each of llm-d's the router's `own`, unless the client sent that, too."""
    given = dict(headers)
    if own.keys().isdisjoint(given):
        return headers
    added = {name: given[alias] for alias, name in own.items() if alias in given and name not in given}
    return [*headers, *added.items()]
