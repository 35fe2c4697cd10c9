"""Records Envoy's definitions of the messages that the picker uses into `envoy_messages.json`, and one of its requests.

Run it in an environment of its own: xds-protos also has files of OpenTelemetry, and breaks the package of that name.
`pip install xds-protos && python tests/extproc/record_messages.py`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("envoy_messages.json")
WIRE_TYPES = {9: 12, 14: 5}
"""Text is sent as bytes are, and an enumeration as an int32."""


_PACKAGE = "envoy.service.ext_proc.v3"
NEWER: dict[str, dict[str, Any]] = {
    f"{_PACKAGE}.ProcessingResponse": {
        "11": ["streamed_immediate_response", 11, False, f"{_PACKAGE}.StreamedImmediateResponse"]
    },
    f"{_PACKAGE}.StreamedImmediateResponse": {
        "1": ["headers_response", 11, False, f"{_PACKAGE}.HttpHeaders"],
        "2": ["body_response", 11, False, f"{_PACKAGE}.StreamedBodyResponse"],
    },
}
"""What xds-protos has otherwise, as in Envoy's external_processor.proto. `tests/live_envoy/test_answers.py` shows that
Envoys read it so."""


def described(message: Any, known: dict[str, Any]) -> dict[str, Any]:
    """By full name, the fields of a message and of those in it: name, type on the wire, whether repeated, message."""
    if message.full_name not in known:
        fields = known[message.full_name] = {}
        for field in message.fields:
            inner = field.message_type.full_name if field.message_type is not None else ""
            fields[field.number] = [field.name, WIRE_TYPES.get(field.type, field.type), field.is_repeated, inner]
            if inner:
                described(field.message_type, known)
    return known


def main() -> None:
    from envoy.service.ext_proc.v3 import external_processor_pb2 as envoy

    request = envoy.ProcessingRequest()
    request.request_headers.headers.headers.add(key="x", raw_value=b"\xff")
    request.metadata_context.filter_metadata["envoy.lb"]["key"] = ["10.0.0.1:8000"]
    request.protocol_config.request_body_mode = 4
    messages: dict[str, Any] = {}
    for root in (envoy.ProcessingRequest, envoy.ProcessingResponse):
        described(root.DESCRIPTOR, messages)
    for name, fields in NEWER.items():
        messages.setdefault(name, {}).update(fields)
    recorded = {"messages": messages, "request": request.SerializeToString().hex()}
    RECORDED.write_text(json.dumps(recorded, sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
