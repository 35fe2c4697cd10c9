"""Only forms with one meaning are accepted, and none that steers an engine."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from starlette.requests import Request

from router.config.schema import Edge
from router.engines.steering import CONTAINERS, STEERING_FIELDS
from router.errors import MalformedRequest
from router.frontends.http.form_fields import (
    MAX_HEAD_BYTES,
    MAX_PARTS,
    SLICE_BYTES,
    FormFields,
    Forms,
    declares_form,
    form_check,
    with_model,
)
from router.types import MAX_NAME_CHARACTERS, Endpoint
from tests.api.edge_to_pod import chain

MULTIPART = b"multipart/form-data; boundary=b"
URLENCODED = b"application/x-www-form-urlencoded"
MODEL = b'Content-Disposition: form-data; name="model"'
MIB = 1024 * 1024


def form(*heads: bytes) -> bytes:
    """A form whose parts have these heads."""
    return b"".join(b"--b\r\n%b\r\n\r\nvalue\r\n" % head for head in heads) + b"--b--\r\n"


def check(body: bytes, content_type: bytes = MULTIPART) -> int:
    """Check a form, and return the number of steps."""
    return sum(1 for _ in form_check(body, content_type))


def named(name: bytes, more: bytes = b"") -> bytes:
    return b'Content-Disposition: form-data; name="%b"%b' % (name, more)


# --- the model ---


def model_in(body: bytes, *, trusted: bool = False) -> str:
    return asyncio.run(Forms(trusted=trusted).read(Endpoint.OTHER, body, MULTIPART)).model


@pytest.mark.parametrize("size_bytes", [5, 2 * SLICE_BYTES])
def test_the_model_of_a_form_is_read(size_bytes: int) -> None:
    """Also behind a large file, or a long one. Without the field it is empty; one with another name is not read."""
    file = form(named(b"file", b'; filename="a"')).replace(b"value", b"-" * size_bytes)[: -len(b"--b--\r\n")]
    assert model_in(file + form(MODEL).replace(b"value", "Ünit/7b".encode())) == "Ünit/7b"
    assert model_in(file + form(MODEL).replace(b"value", b"m" * MAX_NAME_CHARACTERS)) == "m" * MAX_NAME_CHARACTERS
    assert model_in(file + form(named(b"model[]"), named(b"models"), named(b"MODEL"))) == ""


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (form(MODEL, MODEL), "several fields `model`"),
        (form(MODEL).replace(b"value", b"\xff"), "not UTF-8"),
        (form(MODEL).replace(b"value", b"m" * (MAX_NAME_CHARACTERS + 1)), f"more than {MAX_NAME_CHARACTERS} bytes"),
    ],
)
def test_a_model_that_parsers_may_read_in_two_ways_is_refused(body: bytes, problem: str) -> None:
    """Or one that is too long. That of a trusted client counts as absent."""
    with pytest.raises(MalformedRequest, match=problem) as caught:
        model_in(body)
    assert caught.value.param == "model"
    assert model_in(body, trusted=True) == ""


def test_the_model_of_a_trusted_client_is_read_with_fields_that_steer() -> None:
    assert model_in(form(named(b"priority"), MODEL), trusted=True) == "value"


# --- the usage of a streamed transcription ---


def filled(**fields: str) -> bytes:
    """A form with these fields, as clients write it."""
    parts = (b"--b\r\n%b\r\n\r\n%b\r\n" % (named(name.encode()), value.encode()) for name, value in fields.items())
    return b"".join(parts) + b"--b--\r\n"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, FormFields("m")),
        ({"stream": "true"}, FormFields("m", streams=True)),
        ({"stream": "True", "stream_include_usage": "1"}, FormFields("m", streams=True, asks_usage=True)),
        ({"stream": "no", "stream_include_usage": "false"}, FormFields("m")),
    ],
)
def test_whether_a_form_asks_for_a_stream_and_its_usage_is_read(fields: dict[str, str], expected: FormFields) -> None:
    found = asyncio.run(Forms().read(Endpoint.OTHER, filled(model="m", **fields), MULTIPART))
    assert replace(found, model_at=0) == expected


def test_the_model_of_a_form_is_replaced_and_nothing_else() -> None:
    """Wherever its field is, and however long it is."""
    for before, after in (({"file": "m\r\n"}, {}), ({}, {"prompt": "m"}), ({}, {})):
        old, new = (filled(**before, model=model, **after) for model in ("gpt-4ö", "m"))
        assert with_model(old, asyncio.run(Forms().read(Endpoint.OTHER, old, MULTIPART)), "m") == new


@pytest.mark.net
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "fields", "is_asked"),
    [
        ("/v1/audio/transcriptions", {"stream": "true"}, True),
        ("/v1/audio/translations", {"stream": "true"}, True),
        ("/v1/audio/transcriptions", {"stream": "true", "stream_include_usage": "true"}, False),
        ("/v1/audio/transcriptions", {}, False),
        ("/v1/images/edits", {"stream": "true"}, False),
    ],
)
async def test_only_streamed_transcriptions_are_asked_for_their_usage(
    path: str, fields: dict[str, str], *, is_asked: bool
) -> None:
    """The pod reads the client's form with one field more."""
    sent = filled(model="m", **fields)
    async with chain(Edge(), reads_bodies=True) as client:
        head = b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        client.writer.write(head % (path.encode(), MULTIPART, len(sent)) + sent)
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200")
    (request,) = client.pod.requests
    more = {"stream_include_usage"} if is_asked else set()
    assert await starlette_names(request.body, MULTIPART) == {"model", *fields, *more}
    assert request.body.endswith(sent) and (is_asked or request.body == sent)


# --- what is refused ---


@pytest.mark.parametrize("name", sorted(STEERING_FIELDS | CONTAINERS))
def test_a_field_that_steers_the_engine_is_refused(name: str) -> None:
    """The error names it and the key."""
    for suffix in (b"", b"[]", b"[a]"):
        with pytest.raises(MalformedRequest, match="trust_engine_fields") as caught:
            check(form(MODEL, named(name.encode() + suffix)))
        assert caught.value.param == name


@pytest.mark.parametrize(
    "head",
    [
        b'Content-Disposition: form-data; name="x; filename="; name=priority; b"',
        b'Content-Disposition: form-data; name="x"\n; name="priority"',
        b'Content-Disposition: form-data; name="x"; filename="a\\\\"; filename="; name=priority; b"',
        b'Content-Disposition: form-data; name="x"; filename="a; name=priority; b"',
        b'Content-Disposition: form-data; name="x"; name="priority"',
        b'Content-Disposition: form-data; filename="a"; name="priority"',
        b'Content-Disposition: form-data; name="x"\r\nContent-Disposition: form-data; name="priority"',
        b'Content-Disposition: form-data; name="x"\r\n ; name="priority"',
        b'Content-Disposition: form-data; name="x"\rContent-Disposition: form-data; name="priority"',
        b"Content-Disposition: form-data; name*=utf-8''priorit%79",
        b'Content-Disposition: form-data; name="priorit\\y"',
        b'Content-Disposition: form-data; name="priorit%79"',
        b'Content-Disposition: form-data; NAME="priority"',
        b'Content-Disposition: form-data; name="x"; filename*0="a"',
        b'Content-Disposition : form-data; name="x"',
        b'Content-Disposition: attachment; name="x"',
        b"Content-Disposition: form-data",
        b'\r\nContent-Disposition: form-data; name="x"',
        MODEL + b"\r\nContent-Type: multipart/mixed; boundary=c",
        MODEL + b"\r\nContent-Transfer-Encoding: base64",
        MODEL + b"\r\nX-Mine: 1",
        b"Content-Type: text/plain",
        named(b"x", b'; filename="%b"' % (b"a" * MAX_HEAD_BYTES)),
        b"",
    ],
)
def test_an_unusual_head_of_a_part_is_refused(head: bytes) -> None:
    """Parsers read it in different ways. The error says which part, and repeats little of it."""
    with pytest.raises(MalformedRequest, match="Part 2") as caught:
        check(form(MODEL, head))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data; boundary=b; charset=punycode",
        b'multipart/form-data; boundary="urlencoded"; boundary=b',
        b"multipart/form-data; boundary=b; boundary=c",
        b"multipart/form-data; boundary*=utf-8''b",
        b'multipart/form-data; boundary="b\\c"',
        b'multipart/form-data; boundary="b',
        b"multipart/form-data; boundary=",
        b"multipart/form-data; boundary=" + b"b" * 71,
        b"multipart/form-data",
        b"multipart/mixed; boundary=b",
        b"text/plain, multipart/form-data; boundary=b",
        URLENCODED,
        URLENCODED + b"; charset=utf-8",
        b"Application/X-WWW-Form-URLencoded",
    ],
)
def test_other_content_types_of_forms_are_refused(content_type: bytes) -> None:
    """With an error that shows the given one; the body is not read."""
    assert declares_form(content_type)
    with pytest.raises(MalformedRequest, match="content type"):
        check(form(MODEL), content_type)


def test_a_boundary_with_the_name_of_another_format_makes_no_difference() -> None:
    with pytest.raises(MalformedRequest, match="`priority`"):
        check(form(named(b"priority")).replace(b"--b", b"--urlencoded"), b"multipart/form-data; boundary=urlencoded")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"preamble\r\n" + form(MODEL),
        b"\r\n" + form(MODEL),
        form(MODEL) + b"epilogue",
        form(MODEL) + b"\r\n",
        form(MODEL).replace(b"\r\n", b"\n"),
        form(MODEL).removesuffix(b"--\r\n"),
        form(MODEL).replace(b"value", b"--b"),
        form(MODEL).replace(b"value", b"\n--b\n%b\n\nv" % named(b"priority")),
        form(MODEL).replace(b"--b\r\n", b"--b \r\n"),
        form(MODEL).replace(b"value\r\n", b""),
        b"--b\r\n" + MODEL + b"\r\n--b--\r\n",
    ],
)
def test_a_form_with_unusual_delimiters_is_refused(body: bytes) -> None:
    """Also a boundary inside of a value."""
    with pytest.raises(MalformedRequest):
        check(body)


def test_a_form_has_a_bounded_number_of_parts() -> None:
    """As in engines."""
    check(form(*[MODEL] * MAX_PARTS))
    with pytest.raises(MalformedRequest, match=f"more than {MAX_PARTS} parts"):
        check(form(*[MODEL] * (MAX_PARTS + 1)))


@pytest.mark.anyio
@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.EMBEDDINGS])
async def test_endpoints_of_json_take_no_forms(endpoint: Endpoint) -> None:
    """An engine might read the form where the router reads JSON."""
    with pytest.raises(MalformedRequest, match="application/json"):
        await Forms().read(endpoint, form(MODEL), MULTIPART)


# --- what clients send ---

CLIENTS = {
    "requests": [MODEL, named(b"file", b'; filename="\xc3\xa9 a.wav"\r\nContent-Type: audio/wav')],
    "browsers, curl, fetch": [MODEL, named(b"file", b'; filename="\xc3\xa9 %22q%22.wav"\r\nContent-Type: audio/wav')],
    "aiohttp": [
        b"Content-Type: text/plain; charset=utf-8\r\n" + MODEL,
        b"Content-Type: audio/wav\r\n" + named(b"file", b"; filename=\"a b.wav\"; filename*=utf-8''a%20b.wav"),
    ],
    ".NET": [
        b"Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name=model",
        b"Content-Disposition: form-data; name=file; filename=a.wav; filename*=utf-8''a.wav",
        named(b"file", b"; filename=\"=?utf-8?B?w6kud2F2?=\"; filename*=utf-8''%C3%A9.wav"),
    ],
    "OkHttp": [
        MODEL + b"\r\nContent-Transfer-Encoding: binary\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 5"
    ],
    "Apache": [MODEL + b"\r\nContent-Type: text/plain; charset=ISO-8859-1\r\nContent-Transfer-Encoding: 8bit"],
    "Go": [MODEL, named(b"file", b'; filename="a; b.wav"\r\nContent-Type: application/octet-stream')],
    "an empty file": [MODEL, named(b"file", b'; filename=""\r\nContent-Type: application/octet-stream')],
    "lists": [named(b"timestamp_granularities[]"), named(b"timestamp_granularities[]")],
}


@pytest.mark.parametrize("client", CLIENTS)
def test_forms_of_common_clients_are_accepted(client: str) -> None:
    """Recorded with requests 2.34, curl 7.88, Node 20 and aiohttp 3.14; the others as they are documented."""
    check(form(*CLIENTS[client]))


@pytest.mark.parametrize("name", ["a.wav", 'é "q".wav', "日本; 1.wav", "a=b.wav"])
def test_forms_of_httpx_and_the_openai_client_are_accepted(name: str) -> None:
    """The files may have any bytes."""
    files = {"file": (name, bytes(range(256)) * 9 + b"\r\n\r\n--", "audio/wav")}
    request = httpx.Request("POST", "http://a", data={"model": "m", "x[]": ["a", "b"]}, files=files)
    check(request.read(), request.headers["content-type"].encode())


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data;boundary=b",
        b'multipart/form-data; boundary="b"',
        b"Multipart/Form-Data; boundary=b",
        b"multipart/form-data;charset=UTF-8;boundary=b",
        b"multipart/form-data; boundary=b; charset=UTF-8",
    ],
)
def test_content_types_of_common_clients_are_accepted(content_type: bytes) -> None:
    """.NET quotes the boundary; Spring and Apache name UTF-8."""
    check(form(MODEL), content_type)
    check(form(MODEL).removesuffix(b"\r\n"), content_type)


@pytest.mark.parametrize(
    "boundary", [b"-" * 24 + b"94b35dd5f47889c8", b"----WebKitFormBoundaryAb1", b"a.b_c+d-", b"-" * 9]
)
def test_boundaries_of_common_clients_are_accepted(boundary: bytes) -> None:
    """Also of hyphens alone."""
    check(form(MODEL).replace(b"--b", b"--" + boundary), b"multipart/form-data; boundary=" + boundary)


@pytest.mark.parametrize("content_type", [b"application/json", b"audio/wav", b"", b"application/json; charset=utf-8"])
def test_other_content_types_are_no_forms(content_type: bytes) -> None:
    """JSON and files."""
    assert not declares_form(content_type)


# --- no parser finds more ---

HEADS = list(
    dict.fromkeys(
        [head for heads in CLIENTS.values() for head in heads]
        + [
            named(b"priority-"),
            named(b"x", b'; filename="a; name: priority"'),
            named(b"x", b'; filename="=name=priority"'),
        ]
    )
)
SPLICES = [
    *(b"\r\n", b"\n", b"\r", b'"', b"\\", b";", b"=", b" ", b"\t", b":", b"\x00", b"\x85", b"*", b"--", b"\r\n\r\n"),
    *(b"--b", b"--b--", b"\r\n--b\r\n", b"\r\n--b--", b"\r\n--b \r\n", b"\n--b\n", b"priority", b"name=priority"),
    *(
        b"; name=priority; ",
        b'"; name=priority; b',
        b'"; name="priority',
        b"name*=priority",
        b"\r\n" + named(b"priority"),
    ),
    b"\r\n--b\r\n" + named(b"priority") + b"\r\n\r\n",
]
SEPARATORS = re.compile(rb'\r\n|["\\;=:]|--b|priority')
CONTENT_TYPES = [
    MULTIPART,
    b'multipart/form-data; boundary="b"',
    MULTIPART + b"; charset=utf-8",
    MULTIPART + b"; charset=punycode",
    b"multipart/form-data; boundary=b; boundary=c",
    b'multipart/form-data; boundary="b\\"',
    URLENCODED,
]


async def starlette_names(body: bytes, content_type: bytes) -> set[str]:
    """The names of fields and files that Starlette reads, as vLLM and SGLang do; none if it refuses the form."""

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    request = Request({"type": "http", "method": "POST", "headers": [(b"content-type", content_type)]}, receive)
    try:
        async with request.form() as read:
            return {name for name, _ in read.multi_items()}
    except Exception:
        return set()


def test_starlette_reads_the_forms_of_these_tests() -> None:
    """Else the next test would prove nothing."""
    body = form(MODEL, named(b"priority", b'; filename="a"'))
    assert asyncio.run(starlette_names(body, MULTIPART)) == {"model", "priority"}
    assert asyncio.run(starlette_names(form(named(b"priority-")), MULTIPART)) == {"priority-"}


def accepted(body: bytes, content_type: bytes) -> bool:
    try:
        check(body, content_type)
    except MalformedRequest:
        return False
    return True


async def steers(body: bytes, content_type: bytes) -> bool:
    """Whether Starlette finds a field that steers the engine."""
    names = await starlette_names(body, content_type)
    return bool({name.partition("[")[0] for name in names} & (STEERING_FIELDS | CONTAINERS))


@pytest.mark.anyio
@pytest.mark.parametrize("head", HEADS)
async def test_starlette_finds_no_steering_field_in_an_accepted_form_with_an_insertion(head: bytes) -> None:
    """Any of these pieces, anywhere in it."""
    whole, content_types = (
        form(head).replace(b"value", b"9-"),
        [kind for kind in CONTENT_TYPES if accepted(form(), kind)],
    )
    bodies = {whole[:at] + piece + whole[at:] for at in range(len(whole)) for piece in (b"", *SPLICES)}
    for content_type in content_types:
        for body in bodies:
            if accepted(body, content_type):
                assert not await steers(body, content_type), body


@given(
    st.lists(st.sampled_from(HEADS), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 255), st.sampled_from(SPLICES)), max_size=4),
    st.sampled_from(CONTENT_TYPES),
)
def test_starlette_finds_no_steering_field_in_an_accepted_form_with_many_insertions(
    heads: list[bytes], splices: list[tuple[int, bytes]], content_type: bytes
) -> None:
    """Next to what separates its parts."""
    body = form(*heads)
    for place, piece in splices:
        places = [at for found in SEPARATORS.finditer(body) for at in found.span()]
        at = places[place % len(places)]
        body = body[:at] + piece + body[at:]
    if accepted(body, content_type):
        assert not asyncio.run(steers(body, content_type))


@given(st.binary())
def test_any_bytes_are_accepted_or_refused(body: bytes) -> None:
    """No other exception leaves the check."""
    accepted(body, MULTIPART)
    accepted(b"--b\r\n%b--b--" % body, MULTIPART)
    accepted(form(MODEL + b"\r\n" + body), MULTIPART)
    accepted(b"", body)


# --- how much work a form makes ---


class Watched(bytes):
    """A body that notes how many bytes each search may read."""

    def __new__(cls, content: bytes) -> Watched:
        body = super().__new__(cls, content)
        body.spans = []
        return body

    spans: list[int]

    def find(self, *args: object) -> int:
        _, start, end = args
        assert isinstance(start, int) and isinstance(end, int)
        self.spans.append(min(end, len(self)) - start)
        return super().find(*args)  # type: ignore[arg-type]

    def _whole(self, *_: object) -> bytes:
        raise AssertionError("the whole body was read at once")

    lower = split = replace = count = translate = __iter__ = _whole  # type: ignore[assignment]


HOSTILE = {
    "separators": (b"&" * 4 * MIB, URLENCODED),
    "escapes": (b"%41" + b"&a" * 2 * MIB, URLENCODED),
    "headers of one part": (b"--b\r\n" + (MODEL + b"\r\n") * 90_000 + b"\r\n\r\n--b--", MULTIPART),
    "a long name": (b"--b\r\nContent-Disposition: form-data; name=" + b"a" * 4 * MIB + b"!\r\n--b--", MULTIPART),
    "a long value": (form(MODEL).replace(b"value", b"-" * 4 * MIB), MULTIPART),
    "many parts": (form(*[MODEL] * 70_000), MULTIPART),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_large_form_is_searched_once_and_in_slices(case: str) -> None:
    """No step reads more than a slice; all steps together read the body once, and each head and model."""
    content, content_type = HOSTILE[case]
    body, steps = Watched(content), 0
    try:
        for _ in form_check(body, content_type):
            steps += 1
    except MalformedRequest:
        pass
    assert max(body.spans, default=0) <= SLICE_BYTES + len(b"--b")
    assert steps <= len(body) // SLICE_BYTES + 1 + 2 * MAX_PARTS
    assert (len(body.spans) == 0) == (content_type == URLENCODED)


@pytest.mark.anyio
async def test_the_event_loop_runs_between_the_steps_of_a_large_form() -> None:
    """Other requests go on."""
    body = form(named(b"file")).replace(b"value", b"-" * 8 * SLICE_BYTES)
    checked = asyncio.ensure_future(Forms().read(Endpoint.OTHER, body, MULTIPART))
    turns = 0
    while not checked.done():
        turns += 1
        await asyncio.sleep(0)
    await checked
    assert turns >= 8
