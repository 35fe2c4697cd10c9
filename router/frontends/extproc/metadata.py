"""What a gateway says of a request besides its bytes: which pods may serve it, who sent it, which pod has served it;
and the request headers of llm-d and of Gateway API's inference extension, by the names of the router's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from router.addresses import read_address
from router.request.inbound import HeaderList
from router.request.queues import DEADLINE_HEADER

POD_HEADER = b"x-gateway-destination-endpoint"
_LB, _SUBSET = b"envoy.lb", b"envoy.lb.subset_hint"
_SUBSET_KEY, _SERVED_KEY = POD_HEADER + b"-subset", POD_HEADER + b"-served"
MAX_FIELDS, MAX_ADDRESSES = 64, 4096
"""Fields that are looked at, and addresses that are read of one."""


def addresses_in(message: Any) -> frozenset[str] | None:
    """Addresses of the pods that may serve the request; None for all."""
    for field in _struct(message.metadata_context.filter_metadata, _SUBSET):
        if field.key == _SUBSET_KEY:
            return frozenset(_listed(field.value))
    return None


def served_in(message: Any) -> str:
    """The address of the pod that the gateway has sent the request to; "" if it does not say."""
    for field in _struct(message.metadata_context.filter_metadata, _LB):
        if field.key == _SERVED_KEY and (served := list(_listed(field.value))):
            return served[-1]
    return _attribute(message, b"upstream.address")


def peer_in(message: Any) -> str:
    """The client's address, from the attribute `source.address`; "" if it is not sent."""
    return host_of(_attribute(message, b"source.address"))


def host_of(address: str) -> str:
    """The host of `host:port`; "" for anything else."""
    try:
        return read_address(address)[0]
    except ValueError:
        return ""


def _attribute(message: Any, name: bytes) -> str:
    for extension in islice(message.attributes, MAX_FIELDS):
        for field in islice(extension.value.fields, MAX_FIELDS):
            if field.key == name:
                return str(field.value.string_value.decode("latin-1"))
    return ""


def _struct(structs: Any, name: bytes) -> Any:
    found = (struct.value.fields for struct in islice(structs, MAX_FIELDS) if struct.key == name)
    return islice(next(found, ()), MAX_FIELDS)


def _listed(value: Any) -> Iterator[str]:
    """The addresses in a list of texts, or in one text with commas."""
    texts = [one.string_value for one in islice(value.list_value.values, MAX_ADDRESSES)]
    texts = texts or value.string_value.split(b",", MAX_ADDRESSES)[:MAX_ADDRESSES]
    return (text.strip().decode("latin-1") for text in texts if text.strip())


# --- headers ---

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
