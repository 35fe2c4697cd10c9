"""Fuzzes any sequence of requests of one tenant, while a good one sends its own.

An input is a list of connections between `MARK`. The first byte of each says how its bytes are sent and the answer read
(`WAYS`). All run at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import msgspec

from tests.fuzz.town import EVIL, REPEATED, Town, expanded, play

MARK = b"\xff\xfd"
MAX_CONNECTIONS = 8
ANSWER_S = 1.5
"""The tenant waits for no longer."""
CHATS = 4


async def _whole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> None:
    writer.write(sent)
    await reader.read()


async def _in_pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> None:
    for start in range(0, len(sent), 1 + len(sent) // 8):
        writer.write(sent[start : start + 1 + len(sent) // 8])
        await asyncio.sleep(0.001)
    await reader.read()


async def _at_once(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> None:
    writer.write(sent)


async def _after_the_first_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> None:
    writer.write(sent)
    await reader.read(1)


async def _after_sending(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> None:
    writer.write(sent)
    writer.write_eof()
    await reader.read()


WAYS: Mapping[int, Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]] = dict(
    enumerate((_whole, _in_pieces, _at_once, _after_the_first_bytes, _after_sending), ord("0"))
)


async def _connection(town: Town, part: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", town.port)
    try:
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await WAYS.get(part[0], _whole)(reader, writer, expanded(part[1:]))
    finally:
        writer.transport.abort()


async def _beside_good_chats(town: Town, parts: list[bytes]) -> None:
    evil = [asyncio.create_task(_connection(town, part)) for part in parts if part]
    for number in range(CHATS):
        status, pod = await town.good(f"chat {number}")
        assert status == 200, f"a good chat got {status} from {pod or 'no pod'}"
    await asyncio.gather(*evil)


def tenants(data: bytes) -> None:
    """What one tenant sends on a few connections."""
    parts = data.split(MARK)[:MAX_CONNECTIONS]
    play(lambda town: _beside_good_chats(town, parts))


def _sent(body: object, path: str = "/v1/chat/completions", way: str = "0", method: str = "POST") -> bytes:
    encoded = body if isinstance(body, bytes) else msgspec.json.encode(body)
    length = "?" if REPEATED in encoded else str(len(encoded))
    head = f"{way}{method} {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\nauthorization: Bearer {EVIL}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n".encode() + encoded


def _chat(content: object = "Hello", **fields: object) -> dict[str, object]:
    return {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


def _chain(depth: int) -> object:
    return {"a": _chain(depth - 1)} if depth else {}


def _tool(**parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


_HEAD = b'{"model":"demo","max_tokens":2,"messages":[{"role":"user",'
_TOOL = b',{"type":"function","function":{"name":"f","parameters":{"a":{"type":"string"}}}}'
_FORM = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\ndemo\r\n' * 30 + b"--x--\r\n"
TENANTS = (
    _sent(_chat()),
    MARK.join(_sent(_chat(stream=True), way=way) for way in "01234"),
    _sent(_chat(tools=[_tool(a=_chain(200))] * 3)),
    _sent(_chat(tools=[_tool(**{f"p{number}": {} for number in range(300)})])),
    _sent(_chat("\u0301" * 2000)),
    _sent(_chat("a" * 6000)),
    _sent(_chat([{"type": "text", "text": "a"}] * 100)),
    _sent(_chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}])),
    _sent({"model": "demo", "messages": [{"role": "assistant", "content": "", "tool_calls": []}] * 60}),
    _sent({"model": "demo", "prompt": [1] * 1000, "max_tokens": 10**9}, "/v1/completions"),
    _sent({"model": "demo", "input": "a", "max_output_tokens": 1, "background": True}, "/v1/responses"),
    MARK.join(_sent(b"", f"/v1/responses/resp_{number}", method="GET") for number in range(4)),
    _sent({"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, "/v1/messages", "3"),
    _sent({"model": "demo", "input": ["a"] * 200}, "/v1/embeddings"),
    _sent({"model": "demo", "prompt": "a"}, "/tokenize"),
    _sent(b"[" * 4000),
    _sent(_FORM, "/v1/audio/transcriptions").replace(b"application/json", b"multipart/form-data; boundary=x"),
    _sent(_chat(truncate_prompt_tokens=1, n=10**6)),
    *(
        _sent(_HEAD + front + REPEATED + piece + REPEATED + end)
        for front, piece, end in (
            (b'"content":"', b"a" * 100, b'"}]}'),
            (b'"content":"', "\u0301\u0323".encode() * 50, b'"}]}'),
            (b'"content":"', "\U0001f469\u200d".encode() * 20, b'"}]}'),
            (b'"content":"', b" \\n\\t" * 20, b'"}]}'),
            (b'"content":"', b"1" * 100, b'"}]}'),
            (b'"content":"', b"<think></think>" * 10, b'"}]}'),
            (b'"content":[{"type":"text","text":"a"}', b',{"type":"text","text":"a"}' * 5, b"]}]}"),
            (b'"content":"a"', b'},{"role":"user","content":"a"' * 3, b"}]}"),
            (
                b'"content":"a"',
                b'},{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f"}}]' * 2,
                b"}]}",
            ),
            (b'"content":"a"}],"tools":[{"type":"function","function":{"name":"f"}}', _TOOL * 4, b"]}"),
            (
                b'"content":"a"}],"tools":[{"function":{"name":"f","parameters":{"required":["a"',
                b',"a"' * 30,
                b"]}}}]}",
            ),
            (b'"content":"a"}],"tools":[{"type":"function","function":{"name":"f","parameters":[', b"[],", b"[]]}}]}"),
            (b'"content":"a"}],"stop":["a"', b',"a"' * 30, b"]}"),
            (b'"content":"a"}],"logit_bias":{"1":1', b',"1":1' * 30, b"}}"),
            (b'"content":"a"}],"metadata":{"kv_transfer_params":', b'{"kv_transfer_params":', b"1"),
        )
    ),
    _sent(_chat()).replace(b"connection: close\r\n", b"x-request-deadline-ms: 1\r\n") * 4,
    MARK.join(
        [b"0" + REPEATED + _sent(_chat()).replace(b"connection: close\r\n", b"")[1:] + REPEATED] * MAX_CONNECTIONS
    ),
    MARK.join([b"3" + REPEATED + b"GET /v1/models HTTP/1.1\r\nhost: h\r\n\r\n" + REPEATED] * MAX_CONNECTIONS),
)
TENANT_WORDS = (
    *(MARK + b"%c" % way + b"POST /v1/chat/completions HTTP/1.1\r\n" for way in WAYS),
    *(
        b"authorization: Bearer %b\r\n" % EVIL.encode(),
        b"content-length: ",
        b"transfer-encoding: chunked\r\n",
        b"\r\n\r\n",
    ),
    *(
        b'"messages":[',
        b'"role":"',
        b'"content":"',
        b'"tools":[',
        b'"parameters":{',
        b'"stream":true',
        b'"max_tokens":',
    ),
    *(
        b'"tool_calls":[',
        b'"arguments":"{',
        b'"image_url":{"url":"data:image/png;base64,',
        b'"truncate_prompt_tokens":',
    ),
    *(b"x-request-deadline-ms: ", b"x-session-id: ", b"expect: 100-continue\r\n", b"upgrade: websocket\r\n"),
)
