"""The messages of Envoy's external processing (`envoy.service.ext_proc.v3`) and of gRPC's health checks that the picker
reads and writes.

Only the fields that it uses. Names of messages differ from Envoy's, because only numbers and types are sent; text is
`bytes`, so that no header can be invalid. `tests/extproc/test_messages.py` compares them with Envoy's own definitions.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

PACKAGE = "warmroute.extproc"
_REPEATED = "*"
_SCALARS = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "enum": FieldDescriptorProto.TYPE_INT32,
}
SCHEMA = {
    "Struct": "fields:1:Field*",
    "Field": "key:1:bytes value:2:Value",
    "Value": "kind/number_value:2:double kind/string_value:3:bytes kind/struct_value:5:Struct kind/list_value:6:List",
    "List": "values:1:Value*",
    "Header": "key:1:bytes value:2:bytes raw_value:3:bytes",
    "Headers": "headers:1:Header*",
    "SetHeader": "header:1:Header append_action:3:enum",
    "HeaderMutation": "set_headers:1:SetHeader* remove_headers:2:bytes*",
    "StreamedBody": "body:1:bytes end_of_stream:2:bool",
    "BodyMutation": "mutation/body:1:bytes mutation/streamed_response:3:StreamedBody",
    "NamedStruct": "key:1:bytes value:2:Struct",
    "Metadata": "filter_metadata:1:NamedStruct*",
    "ProtocolConfig": "request_body_mode:1:enum response_body_mode:2:enum",
    "HttpHeaders": "headers:1:Headers end_of_stream:3:bool",
    "HttpBody": "body:1:bytes end_of_stream:2:bool",
    "HttpTrailers": "",
    "ProcessingRequest": "request/request_headers:2:HttpHeaders request/response_headers:3:HttpHeaders "
    "request/request_body:4:HttpBody request/response_body:5:HttpBody request/request_trailers:6:HttpTrailers "
    "request/response_trailers:7:HttpTrailers metadata_context:8:Metadata attributes:9:NamedStruct* "
    "protocol_config:11:ProtocolConfig",
    "CommonResponse": "header_mutation:2:HeaderMutation body_mutation:3:BodyMutation clear_route_cache:5:bool",
    "PartResponse": "response:1:CommonResponse",
    "TrailersResponse": "",
    "HttpStatus": "code:1:enum",
    "StreamedImmediateResponse": "response/headers_response:1:HttpHeaders response/body_response:2:StreamedBody",
    "ImmediateResponse": "status:1:HttpStatus headers:2:HeaderMutation body:3:bytes",
    "ProcessingResponse": "response/request_headers:1:PartResponse response/response_headers:2:PartResponse "
    "response/request_body:3:PartResponse response/response_body:4:PartResponse "
    "response/request_trailers:5:TrailersResponse response/response_trailers:6:TrailersResponse "
    "response/immediate_response:7:ImmediateResponse dynamic_metadata:8:Struct "
    "response/streamed_immediate_response:11:StreamedImmediateResponse",
    "HealthCheckRequest": "service:1:bytes",
    "HealthCheckResponse": "status:1:enum",
}
"""The fields of each message: `[oneof/]name:number:type[*]`."""


def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="warmroute/extproc.proto", package=PACKAGE, syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for field in fields.split():
            _add_field(message, *field.split(":"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in SCHEMA}


def _add_field(message: Any, name: str, number: str, kind: str) -> None:
    oneof, _, name = name.rpartition("/")
    plain = kind.removesuffix(_REPEATED)
    field = message.field.add(name=name, number=int(number))
    is_repeated = kind.endswith(_REPEATED)
    field.label = FieldDescriptorProto.LABEL_REPEATED if is_repeated else FieldDescriptorProto.LABEL_OPTIONAL
    if plain in _SCALARS:
        field.type = _SCALARS[plain]
    else:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{plain}"
    if oneof:
        if not message.oneof_decl:
            message.oneof_decl.add(name=oneof)
        field.oneof_index = 0


CLASSES = _classes()
ProcessingRequest: Any = CLASSES["ProcessingRequest"]
ProcessingResponse: Any = CLASSES["ProcessingResponse"]
HealthCheckRequest: Any = CLASSES["HealthCheckRequest"]
HealthCheckResponse: Any = CLASSES["HealthCheckResponse"]

_BODIES = (b"\x22\x0a", b"\x2a\x0a")
"""How a message with a body of the request or response begins, but for the length behind the first byte."""


def bytes_besides_body(data: bytes) -> int:
    """The bytes of a `ProcessingRequest`, without those of a body that it begins with."""
    begin = 1 + _length(data, 1)[1]
    if data[:1] + data[begin : begin + 1] not in _BODIES:
        return len(data)
    return len(data) - _length(data, begin + 1)[0]


def _length(data: bytes, begin: int) -> tuple[int, int]:
    """A number of up to 4 bytes, and how many it has."""
    number = 0
    for place, byte in enumerate(data[begin : begin + 4]):
        number |= (byte & 127) << 7 * place
        if byte < 128:
            return number, place + 1
    return 0, 0


NONE, BUFFERED, FULL_DUPLEX_STREAMED = 0, 2, 4
"""Modes in which Envoy sends bodies."""
OVERWRITE = 2
"""`append_action`: replace the header, or add it."""
