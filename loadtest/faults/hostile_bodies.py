"""Request bodies up to `limits.max_body_bytes` that cost as much as possible: many items, long texts, unusual texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import msgspec

from loadtest.bench.bodies import MODEL

MIB = 1024 * 1024
MAX_BYTES = 32 * MIB - 1024
CHAT, COMPLETIONS, EMBEDDINGS, OTHER, FORM = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/audio/transcriptions",
)
BOUNDARY = b"b"
CONTENT_TYPES = {FORM: b"multipart/form-data; boundary=" + BOUNDARY}
"""The types of the bodies that are not JSON, by path."""
_SPACES = b" " * MAX_BYTES
_SEED = b'"seed":%b' % (b"1" * 4_000)
_MESSAGE = b'{"role":"user","content":"x"}'


def _chat(messages: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"%b","messages":[%b]%b}' % (MODEL.encode(), messages, more)


def _says(text: str, more: bytes = b"") -> bytes:
    return _chat(b'{"role":"user","content":%b}' % msgspec.json.encode(text), more)


def _repeated(item: bytes, size_bytes: int = MAX_BYTES) -> bytes:
    """As many of an item as fit."""
    return b",".join([item] * (size_bytes // (len(item) + 1) - 100))


def _named(field: bytes, value: bytes) -> bytes:
    return b'{"model":"%b","%b":%b}' % (MODEL.encode(), field, value)


def _random(alphabet: str, characters: int) -> str:
    return "".join(random.Random(1).choices(alphabet, k=characters))


def _words(alphabet: str, length: int, characters: int) -> str:
    return " ".join(_random(alphabet, characters)[start : start + length] for start in range(0, characters, length))


def _image() -> bytes:
    url = b"data:image/png;base64," + b"iVBORw0KGgo" * ((MAX_BYTES - 1024) // 11)
    return _chat(b'{"role":"user","content":[{"type":"image_url","image_url":{"url":"%b"}}]}' % url)


def _fields() -> bytes:
    fields = b",".join(b'"a%d":1' % number for number in range(MAX_BYTES // 13))
    return b'{"model":"%b",%b}' % (MODEL.encode(), fields)


def _numbered(fields: int) -> bytes:
    return b",".join(b'"%x":1' % number for number in range(fields))


def _calls(arguments: bytes) -> bytes:
    call = b'{"type":"function","function":{"name":"f","arguments":"%b"}}' % arguments
    return _chat(b'{"role":"assistant","content":"","tool_calls":[%b]}' % call)


def _tools(size_bytes: int) -> bytes:
    inner = _repeated(b'"a":{"type":"string"}', size_bytes)
    tool = b'{"type":"function","function":{"name":"f","parameters":{%b}}}' % inner
    return _chat(_MESSAGE, b',"tools":[%b]' % tool)


def _user(text: bytes) -> bytes:
    return _chat(_MESSAGE, b',"user":"%b"' % text)


def _form(*contents: bytes) -> bytes:
    head = b'--%b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' % BOUNDARY
    return b"".join(b"%b%b\r\n" % (head, content) for content in contents) + b"--%b--\r\n" % BOUNDARY


HOSTILE_BODIES: Mapping[str, tuple[str, Callable[[], bytes]]] = {
    "spaces-10": (CHAT, lambda: _says("a" + " " * 10 * MIB + "b")),
    "spaces-32": (CHAT, lambda: _says("a" + " " * (MAX_BYTES - 200) + "b")),
    "spaces-raw": (COMPLETIONS, lambda: _named(b"prompt", b'"%b"' % (b" " * (MAX_BYTES - 200)))),
    "escapes": (CHAT, lambda: _chat(b'{"role":"user","content":"%b"}' % (b"\\n" * (MAX_BYTES // 2 - 200)))),
    "letters-2": (CHAT, lambda: _says(_random("abcdefghijklmnopqrstuvwxyz", 2 * MIB - 1024))),
    "inline": (CHAT, lambda: _says(_random("abcdefghijklmnopqrstuvwxyz", 32_000))),
    "inline-words": (CHAT, lambda: _says(_words("etaoinshr", 1_020, 48_000))),
    "inline-spaces": (CHAT, lambda: _says(_words(" \t\n\r", 1_020, 48_000))),
    "han": (CHAT, lambda: _says("".join(map(chr, range(0x4E00, 0x9000))) * 600)),
    "specials": (CHAT, lambda: _says("<｜User｜>" * (MAX_BYTES // 16))),
    "heads": (CHAT, lambda: _says("<｜" * (MAX_BYTES // 5))),
    "messages": (CHAT, lambda: _chat(_repeated(_MESSAGE))),
    "messages-ok": (CHAT, lambda: _chat(b",".join([_MESSAGE] * 16_384))),
    "empty": (CHAT, lambda: _chat(_repeated(b"{}"))),
    "parts-ok": (CHAT, lambda: _chat(b'{"role":"user","content":[%b]}' % _repeated(b'"a"', 500_000))),
    "parts": (CHAT, lambda: _chat(b'{"role":"user","content":[%b]}' % _repeated(b'{"type":"text","text":"a"}'))),
    "tools": (CHAT, lambda: _tools(MAX_BYTES - 1024)),
    "tools-1": (CHAT, lambda: _tools(MIB)),
    "nested": (CHAT, lambda: _chat(_MESSAGE, b',"x":%b' % (b"[" * (MAX_BYTES - 1024)))),
    "image": (CHAT, _image),
    "ids": (COMPLETIONS, lambda: _named(b"prompt", b"[%b]" % _repeated(b"1"))),
    "ids-1M": (COMPLETIONS, lambda: _named(b"prompt", b"[%b]" % b",".join([b"100000"] * 1_000_000))),
    "prompts": (COMPLETIONS, lambda: _named(b"prompt", b"[%b]" % b",".join([b'"a"'] * 100_000))),
    "inputs": (EMBEDDINGS, lambda: _named(b"input", b"[%b]" % _repeated(b'"text"'))),
    "fields": (OTHER, _fields),
    "fields-ok": (OTHER, lambda: b'{"model":"%b",%b}' % (MODEL.encode(), _numbered(120_000))),
    "fields-steer": (OTHER, lambda: b'{"model":"%b","rid":1,%b}' % (MODEL.encode(), _numbered(120_000))),
    "padded": (CHAT, lambda: _SPACES[:140_000] + _tools(MAX_BYTES - 150_000)),
    "padded-xargs": (OTHER, lambda: _SPACES[:140_000] + _named(b"vllm_xargs", b"[%b]" % _repeated(b"{}", 31 * MIB))),
    "xargs": (OTHER, lambda: _named(b"vllm_xargs", b"[%b]" % _repeated(b"{}", 240_000))),
    "between": (OTHER, lambda: _named(b"input", _SPACES[: MAX_BYTES // 2] + b"1")),
    "between-chat": (CHAT, lambda: _chat(_MESSAGE, b',"x":%b1' % _SPACES[:MIB])),
    "behind": (CHAT, lambda: _chat(_MESSAGE) + _SPACES[: MAX_BYTES - 200]),
    "floats": (CHAT, lambda: _chat(_MESSAGE, b',"tools":[{"a":[%b]}]' % _repeated(b"1.0123456789e-300", 260_000))),
    "integers": (CHAT, lambda: _chat(_MESSAGE, b',"tools":[{"a":[%b]}]' % _repeated(b"1" * 4_000, MIB))),
    "seeds": (COMPLETIONS, lambda: b'{"model":"%b","prompt":"a",%b}' % (MODEL.encode(), _repeated(_SEED))),
    "escapes-ok": (CHAT, lambda: _says("", b',"tools":[{"a":"%b"}]' % (b"\\u65e5" * 3_000_000))),
    "arguments": (CHAT, lambda: _calls(b"[%b]" % _repeated(b"{}", 7 * MIB))),
    "arguments-ok": (CHAT, lambda: _calls(b"[%b]" % _repeated(b"{}", 250_000))),
    "text-field": (CHAT, lambda: _user(("a" * 20 + "日").encode() * (MAX_BYTES // 24))),
    "text-field-ok": (CHAT, lambda: _user(("a" * 20 + "日").encode() * (4 * MIB // 24))),
    "text-repeated": (CHAT, lambda: _chat(_MESSAGE, b",%b" % _repeated(b'"user":"%b"' % ("é" * MIB).encode()))),
    "steer-32": (CHAT, lambda: _says("a" * (MAX_BYTES - 200), b',"priority":1')),
    "form": (FORM, lambda: _form(b"x" * (MAX_BYTES - 200))),
    "form-lines": (FORM, lambda: _form(b"\r\n--" * (MAX_BYTES // 4 - 200))),
    "form-parts": (FORM, lambda: _form(*[b"x"] * 1_000)),
    "form-too-many": (FORM, lambda: _form(*[b""] * 300_000)),
}
"""Path and body by name."""
