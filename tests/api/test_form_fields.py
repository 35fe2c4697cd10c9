"""Forms with fields that steer the engine are refused."""

from __future__ import annotations

import pytest

from router.api.form_fields import MAX_FIELDS, check_form
from router.engines.steering import CONTAINERS, STEERING_FIELDS
from router.errors import MalformedRequest

MULTIPART = b"multipart/form-data; boundary=b"
NAMED = b"filename=\"\xc3\xa9.wav\"; filename*=utf-8''%C3%A9"
URLENCODED = b"application/x-www-form-urlencoded; charset=utf-8"


def form(*lines: bytes) -> bytes:
    """A form whose parts have these content-dispositions."""
    return b"".join(b"--b\r\n%b\r\nx-mine: 1\r\n\r\nvalue\r\n" % line for line in lines) + b"--b--\r\n"


@pytest.mark.parametrize("name", sorted(STEERING_FIELDS | CONTAINERS))
def test_a_field_that_steers_the_engine_is_refused(name: str) -> None:
    """The error names it and the key."""
    for body, kind in (
        (form(b'Content-Disposition: form-data; name="%b"' % name.encode()), MULTIPART),
        (b"model=m&%b=1" % name.encode(), URLENCODED),
    ):
        with pytest.raises(MalformedRequest, match="trust_engine_fields") as caught:
            check_form(body, kind)
        assert caught.value.param == name


@pytest.mark.parametrize(
    "line",
    [
        b'content-disposition:form-data;name="rid"',
        b'CONTENT-DISPOSITION: form-data; NAME="rid"',
        b"Content-Disposition: form-data; name=rid",
        b'Content-Disposition: form-data; name="rid[a]"',
        b'Content-Disposition: form-data; name="rid"; filename="a.wav"',
        b'Content-Disposition: form-data; name="a"; name="rid"',
        b'Content-Disposition: form-data; filename="a"; name="rid"',
        b"Content-Disposition: form-data; name*=utf-8''r%69d",
        b'Content-Disposition: form-data; name="r\\id"',
        b'Content-Disposition: form-data; name="a"; x="\\"; name="rid"',
        b'Content-Disposition : form-data; name="rid"',
        b"Content-Disposition: form-data",
    ],
)
def test_other_spellings_of_such_a_field_are_refused(line: bytes) -> None:
    """Also lines that parsers read in different ways."""
    with pytest.raises(MalformedRequest):
        check_form(form(b'Content-Disposition: form-data; name="model"', line), MULTIPART)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (form(b'Content-Disposition: form-data; name="file"; filename="a \\"b\\".wav"'), MULTIPART),
        (form(b'Content-Disposition: form-data; name="file"; ' + NAMED), MULTIPART),
        (form(b'Content-Disposition: form-data; name="timestamp_granularities[]"'), MULTIPART),
        (form(b'Content-Disposition: form-data; name="prompt"') + b" say content-disposition: rid", MULTIPART),
        (b"model=m&prompt=rid%3D1&x=priority", URLENCODED),
        (b"RIFF\x00rid=1&priority=2", b"audio/wav"),
        (b"", b""),
    ],
)
def test_other_forms_are_accepted(body: bytes, kind: bytes) -> None:
    """Files, and texts with the same words."""
    check_form(body, kind)


@pytest.mark.parametrize("body", [b"r%69d=1", b"a=1;rid=1", b"r+id=1&%72id", b"rid%5Ba%5D=1"])
def test_urlencoded_names_are_decoded(body: bytes) -> None:
    """With both separators."""
    with pytest.raises(MalformedRequest):
        check_form(body, URLENCODED)


@pytest.mark.parametrize("kind", [MULTIPART, URLENCODED])
def test_a_form_has_a_bounded_number_of_fields(kind: bytes) -> None:
    """As in engines: checking more would block other requests."""
    for count in (MAX_FIELDS, MAX_FIELDS + 1):
        body = form(*[b'Content-Disposition: form-data; name="a"'] * count)
        if kind is URLENCODED:
            body = b"&".join([b"a"] * count)
        if count == MAX_FIELDS:
            check_form(body, kind)
        else:
            with pytest.raises(MalformedRequest, match="fields"):
                check_form(body, kind)
