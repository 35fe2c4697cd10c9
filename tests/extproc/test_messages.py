"""Are the picker's messages those of Envoy?"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("grpc")
external_processor_pb2 = pytest.importorskip("envoy.service.ext_proc.v3.external_processor_pb2")

from google.protobuf.descriptor import FieldDescriptor  # noqa: E402

from router.frontends.extproc.messages import CLASSES  # noqa: E402

ENVOYS = {
    "ProcessingRequest": external_processor_pb2.ProcessingRequest.DESCRIPTOR,
    "ProcessingResponse": external_processor_pb2.ProcessingResponse.DESCRIPTOR,
}
ON_THE_WIRE = {
    FieldDescriptor.TYPE_STRING: FieldDescriptor.TYPE_BYTES,
    FieldDescriptor.TYPE_ENUM: FieldDescriptor.TYPE_INT32,
}


def compare(own: Any, envoys: Any, seen: set[str]) -> None:
    """Every own field has the name, number, type and label of Envoy's, and so have those of its messages."""
    if own.name in seen:
        return
    seen.add(own.name)
    for field in own.fields:
        theirs = envoys.fields_by_number.get(field.number)
        assert theirs is not None, f"{envoys.full_name} has no field {field.number}"
        assert field.name == theirs.name, f"{envoys.full_name}.{theirs.name} is called {field.name}"
        assert field.type == ON_THE_WIRE.get(theirs.type, theirs.type), field.full_name
        assert field.is_repeated == theirs.is_repeated, field.full_name
        if field.message_type is not None:
            compare(field.message_type, theirs.message_type, seen)


@pytest.mark.parametrize("name", sorted(ENVOYS))
def test_fields_have_envoys_names_numbers_and_types(name: str) -> None:
    compare(CLASSES[name].DESCRIPTOR, ENVOYS[name], set())


def test_a_request_of_envoy_is_read() -> None:
    theirs = external_processor_pb2.ProcessingRequest()
    theirs.request_headers.headers.headers.add(key="x", raw_value=b"\xff")
    theirs.metadata_context.filter_metadata["envoy.lb"]["key"] = ["10.0.0.1:8000"]
    theirs.protocol_config.request_body_mode = 4
    own = CLASSES["ProcessingRequest"].FromString(theirs.SerializeToString())
    assert own.WhichOneof("request") == "request_headers"
    assert own.request_headers.headers.headers[0].raw_value == b"\xff"
    [metadata] = own.metadata_context.filter_metadata
    [field] = metadata.value.fields
    assert (metadata.key, field.key) == (b"envoy.lb", b"key")
    assert field.value.list_value.values[0].string_value == b"10.0.0.1:8000"
    assert own.protocol_config.request_body_mode == 4
