"""Parses and checks request bodies.

Only the fields that the router needs are decoded; all others are forwarded as received. Numbers and booleans are
parsed as leniently as engines do, so that no body is refused that an engine would accept, except for the length of a
`Name`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not, itemgetter
from typing import Any

import msgspec

from router.apis.api import Api
from router.apis.body_types import MAX_NAME_CHARACTERS, ChatBody, OtherBody
from router.engines.steering import CONTAINERS, STEERING_FIELDS
from router.errors import DECODE_ERRORS, MalformedRequest, not_json
from router.guards import short_float
from router.types import Endpoint, PromptKind

MAX_SEARCHED_BYTES = 256 * 1024
"""Maximum size of one of `CONTAINERS`."""
MAX_SEARCHED_FIELDS = 4096
"""Maximum fields of a body with engine fields and of its `CONTAINERS`; searching them takes 4 ms."""
MAX_NESTING = 4
"""Depth to which `CONTAINERS` inside each other are searched; deeper ones are dropped."""

MAX_NUMBER_BYTES = 64
"""Maximum size of a number, or of a string with a number."""
LARGE_BYTES = 1024 * 1024
"""Larger bodies are not checked for UTF-8 in one call."""
MAX_DECODED_BYTES = 4 * 1024 * 1024
"""Maximum size of a body without messages and prompt. A string of this size is decoded in 5 ms."""
_DETECTED = sorted(STEERING_FIELDS | CONTAINERS)


def _decoder(body: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    """A decoder for a body, which also detects the fields that may steer an engine."""
    engine_fields = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in _DETECTED]
    extended = msgspec.defstruct(body.__name__, engine_fields, bases=(body,), kw_only=True)
    return msgspec.json.Decoder(extended, strict=False, float_hook=short_float)


def _raw_decoder(body: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    """A decoder for a body that leaves all fields undecoded, except for the list of messages."""
    raw = [
        (name, list[msgspec.Raw] if name == "messages" else msgspec.Raw | msgspec.UnsetType, msgspec.UNSET)
        for name in (*body.__struct_fields__, *_DETECTED)
    ]
    return msgspec.json.Decoder(msgspec.defstruct(body.__name__, raw, kw_only=True))


_ENGINE_FIELDS_OF = attrgetter(*_DETECTED)
_NO_ENGINE_FIELDS = (msgspec.UNSET,) * len(_DETECTED)
_INTEGER = msgspec.json.Decoder(int | None, strict=False)
_FLOAT = msgspec.json.Decoder(float | None, strict=False)
_NUMBERS: dict[str, msgspec.json.Decoder[Any]] = {
    "temperature": _FLOAT,
    "top_p": _FLOAT,
    **dict.fromkeys(
        ("n", "best_of", "n_predict", "seed", "truncate_prompt_tokens", "max_tokens", "max_completion_tokens"), _INTEGER
    ),
    "max_output_tokens": _INTEGER,
}
_VIEW: Callable[[msgspec.Raw], memoryview] = memoryview
_FIRST_BYTE = itemgetter(0)
_NULL = msgspec.Raw(b"null")
_NOTHING = msgspec.Raw(b"[]")
_OBJECT_BEGINS = re.compile(rb"\s*\{")
_CONTAINER_NAMES = ", ".join(sorted(CONTAINERS))
_RAW_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_TYPES = {"str": "a string", "array": "an array", "object": "an object", "int": "an integer", "float": "a number"}
_TYPES |= {"bool": "true or false", "null": "null"}
"""What a type of msgspec is in JSON."""


class BodyParser:
    """Parses the bodies of one API."""

    def __init__(self, api: Api) -> None:
        numbers = [name for name in _NUMBERS if name in api.body.__struct_fields__ and api.body is not OtherBody]
        self._api = api
        self._decoder = _decoder(api.body)
        self._raw_decoder = _raw_decoder(api.body)
        self._numbers = tuple(numbers)
        self._numbers_of = attrgetter(*numbers) if numbers else None
        self._undecoded = api.raw_fields | {*_DETECTED, *numbers}
        """Fields that the decoder leaves raw."""
        self._prompt_of = attrgetter(*api.prompt_fields) if api.prompt_fields else None

    def parse(self, body: bytes, *, max_messages: int = 16_384) -> Any:
        """The decoded fields of a body. Raises `MalformedRequest` that names the field. A body of more than
        `LARGE_BYTES` must be valid UTF-8: `LargeBodies` has checked it."""
        try:
            parsed = self._decoder.decode(body) if len(body) <= MAX_DECODED_BYTES else self._decoded_in_parts(body)
            if len(body) <= LARGE_BYTES and not body.isascii():
                body.decode()  # msgspec checks the JSON of raw values, but not their UTF-8
        except msgspec.ValidationError as error:
            raise _wrong_field(str(error)) from error
        except DECODE_ERRORS as error:
            raise not_json(error, body) from error
        if self._numbers_of is not None:
            for name, raw in _without(msgspec.UNSET, self._numbers, self._numbers_of(parsed)):
                setattr(parsed, name, _number(name, raw))
        api = self._api
        if api.items:
            _check_items(parsed, api.items, max_messages)
        if api.prompt is PromptKind.CHAT:
            _check_chat(parsed)
        elif api.prompt is PromptKind.COMPLETION and bytes(memoryview(parsed.prompt)[:1]) not in (b'"', b"["):
            raise MalformedRequest("`prompt` must be a string or an array.", param="prompt")
        return parsed

    def _decoded_in_parts(self, body: bytes) -> Any:
        """The fields of a body. A repeated field is decoded once."""
        fields = msgspec.structs.asdict(self._raw_decoder.decode(body))
        given = {name: value for name, value in fields.items() if value is not msgspec.UNSET}
        kept = {name: given[name] for name in self._undecoded & given.keys() if given[name] != _NULL}
        size_bytes = sum(len(memoryview(value)) for name, value in given.items() if name not in kept)
        if size_bytes > MAX_DECODED_BYTES:
            raise MalformedRequest(
                f"The request body has {size_bytes} bytes besides messages and prompt, more than {MAX_DECODED_BYTES}."
            )
        parsed = self._decoder.decode(msgspec.json.encode({**given, **dict.fromkeys(kept, _NOTHING)}))
        for name, value in kept.items():
            setattr(parsed, name, value)
        return parsed

    def prompt_fields(self, parsed: Any) -> dict[str, Any]:
        """The fields that determine the prompt's tokens."""
        if self._prompt_of is None:
            return {}
        given = _without(None, self._api.prompt_fields, self._prompt_of(parsed))
        return {name: value for name, value in given if value is not msgspec.UNSET}


PARSERS = {endpoint: BodyParser(endpoint.api) for endpoint in Endpoint}


def _number(name: str, raw: msgspec.Raw) -> Any:
    size_bytes = len(memoryview(raw))
    if size_bytes > MAX_NUMBER_BYTES:
        raise MalformedRequest(f"`{name}` has {size_bytes} bytes, more than {MAX_NUMBER_BYTES}.", param=name)
    try:
        return _NUMBERS[name].decode(raw)
    except msgspec.ValidationError as error:
        raise _wrong_field(f"{error} - at `${name}`", bytes(raw).decode()) from error


def _wrong_field(problem: str, value: str = "") -> MalformedRequest:
    """What a field must be, from a message of msgspec, and the value that it has."""
    path, message = _PATH.search(problem), _PATH.sub("", problem)
    types = [" or ".join(_TYPES.get(one, one) for one in each.split(" | ")) for each in re.findall("`(.*?)`", message)]
    param = path[1] if path else ""
    if message.startswith("Object missing"):
        param, why = types[0], "is required"  # of the body: no other object of it has required fields
    elif message.startswith("Expected"):
        longest = f" of at most {MAX_NAME_CHARACTERS} characters" if "of length" in message else ""
        why = f"must be {types[0]}{longest}, got {value or (types[1:] or ['more'])[0]}"
    else:
        why = f"is a number out of range{value and f', got {value}'}" if message.startswith("Number") else message
    return MalformedRequest(f"{f'`{param}`' if param else 'The request body'} {why}.", param=param or None)


def _without(missing: object, names: Sequence[str], values: Sequence[Any]) -> Iterable[tuple[str, Any]]:
    """The fields that are not `missing`. Most are missing, and those cost no step of Python."""
    return compress(zip(names, values, strict=True), map(is_not, values, repeat(missing)))


def has_engine_fields(parsed: Any) -> bool:
    """Whether the body has a field that may steer an engine, also if its name is escaped."""
    return bool(_ENGINE_FIELDS_OF(parsed) != _NO_ENGINE_FIELDS)


def without_engine_fields(body: bytes, others: frozenset[str] = frozenset()) -> bytes:
    """The body without `STEERING_FIELDS`, at the top and inside `CONTAINERS`, and without `others` at the top. Other
    values keep their bytes.

    Raises `MalformedRequest` if the body is not a JSON object.
    """
    try:
        fields = _RAW_OBJECT.decode(body)
        wanted = {name: value for name, value in fields.items() if name not in others}
        kept = _FieldSearch().without_steering(wanted, MAX_NESTING)
    except DECODE_ERRORS as error:
        raise not_json(error, body) from error
    unchanged = len(kept) == len(fields) and CONTAINERS.isdisjoint(fields)
    return body if unchanged else msgspec.json.encode(kept)


class _FieldSearch:
    """Removes the steering fields of one body. Raises `MalformedRequest` after `MAX_SEARCHED_FIELDS`."""

    def __init__(self) -> None:
        self._visited = 0

    def without_steering(self, fields: dict[str, msgspec.Raw], levels: int) -> dict[str, msgspec.Raw]:
        self._visit(len(fields))
        kept = {name: value for name, value in fields.items() if name not in STEERING_FIELDS}
        for name in CONTAINERS & kept.keys():
            kept[name] = self._searched(kept[name], levels)
        return kept

    def _searched(self, value: msgspec.Raw, levels: int) -> msgspec.Raw:
        """An object, or a list of objects, without steering fields; null for anything else, which no engine accepts."""
        if not levels:
            return _NULL
        text, inner = bytes(value), levels - 1
        if len(text) > MAX_SEARCHED_BYTES:
            raise MalformedRequest(f"{_CONTAINER_NAMES} may have {MAX_SEARCHED_BYTES} bytes each.")
        if text.startswith(b"{"):
            return msgspec.Raw(msgspec.json.encode(self.without_steering(_RAW_OBJECT.decode(text), inner)))
        if text.startswith(b"["):
            items = _RAW_LIST.decode(text)
            self._visit(len(items))
            return msgspec.Raw(msgspec.json.encode([self._searched(item, inner) for item in items]))
        return _NULL

    def _visit(self, count: int) -> None:
        self._visited += count
        if self._visited > MAX_SEARCHED_FIELDS:
            raise MalformedRequest(
                f"A body with engine fields may have {MAX_SEARCHED_FIELDS} fields, "
                f"with those inside of {_CONTAINER_NAMES}."
            )


def may_be_json_object(body: bytes) -> bool:
    """Whether an engine could decode an object: also from UTF-16 and such, which `without_engine_fields` refuses."""
    return json.detect_encoding(body) != "utf-8" or _OBJECT_BEGINS.match(body) is not None


def read_other(body: bytes) -> Any:
    """The decoded fields of a body for `Endpoint.OTHER`; None for anything else than JSON in UTF-8 with a `model`."""
    try:
        parsed = PARSERS[Endpoint.OTHER].parse(body)
    except MalformedRequest:
        return None
    return parsed if parsed.model else None


def _check_chat(parsed: ChatBody) -> None:
    if not parsed.messages:
        raise MalformedRequest("`messages` must have at least one message.", param="messages")
    first_bytes = bytes(map(_FIRST_BYTE, map(_VIEW, parsed.messages)))
    if rest := first_bytes.lstrip(b"{"):
        where = f"messages[{len(first_bytes) - len(rest)}]"
        raise MalformedRequest(f"`{where}` must be an object.", param=where)
    if parsed.continue_final_message and parsed.add_generation_prompt:
        raise MalformedRequest(
            "`continue_final_message` and `add_generation_prompt` exclude each other: "
            "the first continues the last message, the second begins a new one.",
            param="continue_final_message",
        )


def _check_items(parsed: Any, field: str, max_items: int) -> None:
    """Check the number of items of a list, which become undecoded values if it is one."""
    items = getattr(parsed, field)
    if isinstance(items, msgspec.Raw) and bytes(memoryview(items)[:1]) == b"[":
        items = _RAW_LIST.decode(items)
        setattr(parsed, field, items)
    if isinstance(items, list) and len(items) > max_items:
        raise MalformedRequest(
            f"`{field}` has {len(items)} items, more than {max_items} (limits.max_messages).", param=field
        )
