"""No message of a gateway, or of something that speaks like one, holds the event loop or the memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc
import pytest

from router.frontends.extproc.messages import ProcessingRequest, bytes_besides_body
from router.frontends.extproc.metadata import MAX_ADDRESSES, POD_HEADER, addresses_in
from router.frontends.http.form_fields import FormFields, Forms
from router.types import Endpoint
from tests.extproc.conftest import Pick, chat, http_headers

FEW_BYTES = 320 * 1024


def test_addresses_of_a_hint_that_are_too_many_are_not_read() -> None:
    message = ProcessingRequest()
    fields = message.metadata_context.filter_metadata.add(key=b"envoy.lb.subset_hint").value.fields
    fields.add(key=POD_HEADER + b"-subset").value.string_value = b",".join(b"%d" % one for one in range(9000))
    found = addresses_in(message)
    assert found is not None and len(found) == MAX_ADDRESSES


def test_a_body_does_not_count_wherever_its_message_ends() -> None:
    for size in (0, 1, 127, 128, 20_000, 3_000_000):
        for kind in ("request_body", "response_body"):
            message = ProcessingRequest(**{kind: {"body": b"x" * size, "end_of_stream": True}})
            assert bytes_besides_body(message.SerializeToString()) < 16 + (size == 0) * 16
            message.attributes.add(key=b"a" * 1000)
            assert 1000 < bytes_besides_body(message.SerializeToString()) < 1032


@pytest.mark.parametrize(
    "data", [b"", b"\x22", b"\x22\xff\xff\xff\xff\xff\x0a\xff", b"\x12\x00", b"\x22\x03\x0a\xff\xff\xff\xff"]
)
def test_what_is_no_body_counts_as_a_whole(data: bytes) -> None:
    assert bytes_besides_body(data) == len(data)


@pytest.mark.net
@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["headers", "attributes"])
async def test_messages_that_are_too_large_are_refused_before_they_are_decoded(picker: Pick, kind: str) -> None:
    message = ProcessingRequest(request_headers=http_headers({":path": "/v1/models"}))
    for number in range(100_000):
        if kind == "headers":
            message.request_headers.headers.headers.add(key=b"k%d" % number)
        else:
            message.attributes.add(key=b"k%d" % number)
    async with picker() as picking:
        stream = picking.stream()
        await stream.call.write(message.SerializeToString())
        with suppress(grpc.aio.AioRpcError):
            await stream.receive()
        assert await stream.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await picking.stream().ask(chat())).picked


@pytest.mark.net
@pytest.mark.anyio
async def test_headers_that_are_too_many_get_431(picker: Pick) -> None:
    async with picker() as picking:
        answer = await picking.stream().ask(headers={f"x-{number}": "" for number in range(1000)})
        assert answer.status == 431


@pytest.mark.anyio
async def test_a_form_of_many_parts_is_read_in_turns() -> None:
    """The loop runs between two of them."""
    head = b'--b\r\ncontent-disposition: form-data; name="f"\r\ncontent-type: ' + b"a" * 256
    body, turns = (head + b"\r\n\r\nv\r\n") * 1000 + b"--b--", 0
    reading = Forms().read(Endpoint.OTHER, body, b"multipart/form-data; boundary=b")
    task = asyncio.ensure_future(reading)
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert task.result() == FormFields()
    assert turns > 100
