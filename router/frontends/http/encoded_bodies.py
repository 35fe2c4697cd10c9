"""Unpacks compressed request bodies (RFC 9110 8.4): one gzip member, or one zstd frame with a window of at most 8 MiB
(RFC 9659)."""

from __future__ import annotations

import sys
import zlib

from router.errors import MalformedRequest
from router.request.inbound import HeaderList

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_ENCODINGS = frozenset({b"", b"identity", b"gzip", b"x-gzip", b"zstd"})
UNPACKED_INLINE_BYTES = 256 * 1024
"""Unpacked in a millisecond."""
_WINDOW = {int(zstd.DecompressionParameter.window_log_max): 23}


def is_accepted(headers: HeaderList) -> bool:
    """Whether a body with these headers can be unpacked: it is encoded once at most."""
    return b",".join([value for name, value in headers if name == b"content-encoding"]).lower() in _ENCODINGS


def unpack(body: bytes, encoding: bytes, max_bytes: int) -> bytes:
    """The body; of one with more than `max_bytes`, as many and one more. Raises `MalformedRequest`."""
    decoder = zstd.ZstdDecompressor(options=_WINDOW) if encoding == b"zstd" else zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        plain = decoder.decompress(body, max_bytes + 1)
    except (zlib.error, zstd.ZstdError) as error:
        raise MalformedRequest(f"The request body is not valid {encoding.decode()}: {error}") from error
    if len(plain) <= max_bytes and (not decoder.eof or decoder.unused_data):
        raise MalformedRequest(f"The request body is not one whole {encoding.decode()} stream.")
    return plain
