"""The picker's messages are those of Envoy, whose definitions are recorded (`record_messages.py`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("grpc")

from router.frontends.extproc.messages import CLASSES
from tests.extproc.record_messages import RECORDED

ENVOYS = json.loads(RECORDED.read_text())


def compare(own: Any, full_name: str, seen: set[str]) -> None:
    """Every own field has the name, number, type and label of Envoy's, and so have those of its messages."""
    if own.name in seen:
        return
    seen.add(own.name)
    for field in own.fields:
        name, wire_type, is_repeated, inner = ENVOYS["messages"][full_name][str(field.number)]
        assert (field.name, field.type, field.is_repeated) == (name, wire_type, is_repeated), full_name
        if field.message_type is not None:
            compare(field.message_type, inner, seen)


@pytest.mark.parametrize("name", ["ProcessingRequest", "ProcessingResponse"])
def test_fields_have_envoys_names_numbers_and_types(name: str) -> None:
    seen = set[str]()
    compare(CLASSES[name].DESCRIPTOR, f"envoy.service.ext_proc.v3.{name}", seen)
    assert len(seen) > 10


def test_a_request_of_envoy_is_read() -> None:
    own = CLASSES["ProcessingRequest"].FromString(bytes.fromhex(ENVOYS["request"]))
    assert own.WhichOneof("request") == "request_headers"
    assert own.request_headers.headers.headers[0].raw_value == b"\xff"
    [metadata] = own.metadata_context.filter_metadata
    [field] = metadata.value.fields
    assert (metadata.key, field.key) == (b"envoy.lb", b"key")
    assert field.value.list_value.values[0].string_value == b"10.0.0.1:8000"
    assert own.protocol_config.request_body_mode == 4
