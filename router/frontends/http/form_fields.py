"""Reads the model of a form, and refuses forms that have fields which steer the engine.

Forms are forwarded as they are, because they carry audio and images, and parsers differ; only a streamed transcription
is asked for its usage. So only forms that have one meaning are accepted: as clients write them, without anything that
two parsers could read in two ways. Large forms are checked in slices between which the event loop runs.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator, Iterator
from itertools import count
from typing import TypeAlias

import msgspec

from router.admission.tenant import OPEN_TENANT, Tenant
from router.engines.steering import CONTAINERS, STEERING_FIELDS
from router.errors import MalformedRequest, shortened
from router.frontends.fair_turns import FairTurns
from router.types import MAX_NAME_CHARACTERS, Endpoint

MAX_PARTS = 1000
"""As many fields as the engines' parser accepts."""
MAX_HEAD_BYTES = 4096
"""Maximum head of a part. One with a filename of 255 characters in both notations has 3,900 bytes."""
SLICE_BYTES = 512 * 1024
"""Searched at once: at most 2 ms."""
INLINE_BYTES = 64 * 1024
"""Larger forms are checked in turns: a thousand parts take up to 8 ms."""
_SHOWN_CHARACTERS = 100

_CONTENT_TYPE = re.compile(
    rb'multipart/form-data(?:; ?charset=utf-8)?; ?boundary=("?)([\w.+-]{1,70})\1(?:; ?charset=utf-8)?', re.IGNORECASE
)
_DISPOSITION = re.compile(
    rb'form-data; ?name=("?)(?P<name>[\w.\[\]-]{1,128})\1'
    rb'(?:; ?filename=(?:"(?:[^"\\;\x00-\x1f\x7f]*|[^"\\=\x00-\x1f\x7f]*)"|[\w.%!~-]+))?'  # not both ; and =
    rb"(?:; ?filename\*=(?i:utf-8)''[\w.%!#$&+^`|~-]*)?"
)
_PART_HEADERS = {
    b"content-disposition": _DISPOSITION,
    b"content-type": re.compile(rb"(?!multipart)[ -~]{1,256}", re.IGNORECASE),
    b"content-length": re.compile(rb"\d{1,20}"),
    b"content-transfer-encoding": re.compile(rb"binary|8bit|7bit", re.IGNORECASE),
}
_REFUSED = frozenset(name.encode() for name in STEERING_FIELDS | CONTAINERS)


_Field: TypeAlias = tuple[bytes, bytes, int]
"""Name, the beginning of the value, and where the value is in the form."""
_READ = frozenset({b"model", b"stream", b"stream_include_usage"})
_TRUE = frozenset({b"true", b"1", b"on", b"t", b"yes", b"y"})
"""As engines read a boolean field, in lower case (pydantic)."""
_END: _Field = (b"", b"", 0)
_ASKING_PART = b'\r\nContent-Disposition: form-data; name="stream_include_usage"\r\n\r\ntrue\r\n'


class FormFields(msgspec.Struct, frozen=True):
    """What the router reads of a form. `model`: "" without one; `model_at`: where it is in the form."""

    model: str = ""
    streams: bool = False
    asks_usage: bool = False
    model_at: int = 0


def declares_form(content_type: bytes) -> bool:
    """Whether any parser might take this content type for a form."""
    lowered = content_type.lower()
    return b"multipart" in lowered or b"form" in lowered


class Forms:
    """Reads and checks forms; one slice of a large one at a time, in fair `turns`. `trusted`: clients may steer
    engines, and send forms that the router cannot read."""

    def __init__(self, turns: FairTurns | None = None, *, trusted: bool = False) -> None:
        self._trusted = trusted
        self._refused: frozenset[bytes] = frozenset() if trusted else _REFUSED
        self._turns = turns or FairTurns()

    async def read(
        self, endpoint: Endpoint, body: bytes, content_type: bytes, tenant: Tenant = OPEN_TENANT
    ) -> FormFields:
        """The fields that the router reads. Raises `MalformedRequest` for a form that is not accepted. `content_type`:
        as the client sent it."""
        try:
            if endpoint is not Endpoint.OTHER:
                raise MalformedRequest(f"{endpoint.value} takes no forms; send JSON (content-type: application/json).")
            found = await self._found(form_check(body, content_type, self._refused), len(body), tenant)
            models = [(value, at) for name, value, at in found if name == b"model"]
            model = _only_name([value for value, _ in models])
        except MalformedRequest:
            if self._trusted:
                return FormFields()
            raise
        fields = {name: value.lower() in _TRUE for name, value, _ in found}
        is_asked, streams = (fields.get(name, False) for name in (b"stream_include_usage", b"stream"))
        return FormFields(model, streams, is_asked, models[0][1] if models else 0)

    async def _found(self, steps: Iterator[_Field | None], size_bytes: int, tenant: Tenant) -> list[_Field]:
        if size_bytes <= INLINE_BYTES:
            return [found for found in steps if found]
        fields = []
        for number in count():
            async with self._turns.turn(tenant, number * SLICE_BYTES, SLICE_BYTES):
                found = next(steps, _END)
                if found is _END:
                    break
                if found:
                    fields.append(found)
                await asyncio.sleep(0)
        return fields


def with_usage_asked(form: bytes) -> bytes:
    """A checked form whose first part asks for the usage of a stream. The client's own field, behind it, counts."""
    return form[: form.index(b"\r\n")] + _ASKING_PART + form


def with_model(form: bytes, fields: FormFields, model: str) -> bytes:
    """A checked form with another model in place of its own."""
    view, at = memoryview(form), fields.model_at
    return b"".join((view[:at], model.encode(), view[at + len(fields.model.encode()) :]))


def form_check(body: bytes, content_type: bytes, refused: frozenset[bytes] = _REFUSED) -> Iterator[_Field | None]:
    """Check the form in steps. A step yields a field of `_READ` with the beginning of its value, or None. Raises
    `MalformedRequest` for a field in `refused`, or for anything that is not written as usual."""
    delimiter = b"--" + _boundary(content_type)
    if not body.startswith(delimiter):
        raise MalformedRequest("The form must begin with -- and the boundary of its content type.")
    start = len(delimiter)
    for number in count(1):
        if body.startswith(b"--", start):
            if body[start + 2 : start + 5] not in (b"", b"\r\n"):
                raise MalformedRequest("The form has more bytes after its closing boundary.")
            return
        if number > MAX_PARTS:
            raise MalformedRequest(f"The form has more than {MAX_PARTS} parts.")
        end = yield from _next_delimiter(body, delimiter, start)
        if end < 0:
            raise MalformedRequest("The form does not end with its closing boundary: -- boundary --.")
        if not body.startswith(b"\r\n", start) or not body.startswith(b"\r\n", end - 2):
            raise MalformedRequest(f"Part {number} of the form has the boundary inside a line.")
        name, value_start = _name(body, start + 2, end - 2, number)
        if (base := name.partition(b"[")[0]) in refused:
            why = "steers the engine and is accepted only from trusted clients (edge.trust_engine_fields)"
            raise MalformedRequest(f"The form field `{base.decode()}` {why}.", param=base.decode())
        if name in _READ:
            yield name, body[value_start : min(end - 2, value_start + MAX_NAME_CHARACTERS + 1)], value_start
        start = end + len(delimiter)


def _boundary(content_type: bytes) -> bytes:
    found = _CONTENT_TYPE.fullmatch(content_type.strip(b" \t"))
    if found is None:
        raise MalformedRequest(
            f"The content type `{_shown(content_type)}` is not accepted; send JSON, or a form as multipart/form-data; "
            "boundary=B, where B has up to 70 letters, digits and _.+-, without other parameters."
        )
    return found[2]


def _next_delimiter(body: bytes, delimiter: bytes, start: int) -> Generator[None, None, int]:
    """The place of the next delimiter; -1 if there is none. Yields after each slice."""
    while start < len(body):
        found = body.find(delimiter, start, start + SLICE_BYTES + len(delimiter) - 1)
        yield None
        if found >= 0:
            return found
        start += SLICE_BYTES
    return -1


def _name(body: bytes, start: int, end: int, number: int) -> tuple[bytes, int]:
    """The field's name in the head of a part, and where its value begins. `number`: of the part."""
    head_end = body.find(b"\r\n\r\n", start, min(end, start + MAX_HEAD_BYTES))
    if head_end < 0:
        raise MalformedRequest(
            f"Part {number} of the form has no head of at most {MAX_HEAD_BYTES} bytes that an empty line ends (CRLF)."
        )
    found: dict[bytes, re.Match[bytes]] = {}
    for line in body[start:head_end].split(b"\r\n"):
        key, _, value = line.partition(b":")
        key = key.lower()
        plain = _PART_HEADERS[key].fullmatch(value.removeprefix(b" ")) if key in _PART_HEADERS else None
        if plain is None or key in found:
            raise _unusual(number, line)
        found[key] = plain
    if b"content-disposition" not in found:
        raise _unusual(number, b"")
    return found[b"content-disposition"]["name"], head_end + 4


def _unusual(number: int, line: bytes) -> MalformedRequest:
    return MalformedRequest(
        f"Part {number} of the form has an unusual head: `{_shown(line)}`. Send content-disposition: form-data; "
        'name="..."; filename="..." once, without a backslash and not with both ; and = in the filename, and at most '
        "content-type, content-length and content-transfer-encoding: binary."
    )


def _only_name(models: list[bytes]) -> str:
    if len(models) > 1:
        raise MalformedRequest("The form has several fields `model`; send one.", param="model")
    value = models[0] if models else b""
    try:
        name = value.decode()
    except UnicodeDecodeError as error:
        raise MalformedRequest("The form field `model` is not UTF-8.", param="model") from error
    if len(value) > MAX_NAME_CHARACTERS:
        raise MalformedRequest(f"The form field `model` has more than {MAX_NAME_CHARACTERS} bytes.", param="model")
    return name


def _shown(given: bytes) -> str:
    return shortened(given.decode("latin-1"), _SHOWN_CHARACTERS)
