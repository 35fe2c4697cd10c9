"""Identifies pictures as vLLM does: by a digest of the file's bytes and of the model's path.

As `multimodal/hasher.py` and `multimodal/processing/inputs.py` in vLLM 0.32, with its default options. Each value comes
behind a tag and its length, so that no two values have the same bytes. The size of a picture is read from the start of
its file: PNG, JPEG, WebP or GIF. Nothing is decoded, and a fixed number of steps bounds hostile files.
"""

from __future__ import annotations

import struct
from binascii import Error as NotBase64
from binascii import a2b_base64
from collections.abc import Iterator
from struct import unpack_from

import msgspec
from blake3 import blake3

SLICE_CHARACTERS = 256 * 1024
"""Base64 that is decoded at once: 0.7 ms, in which no other thread runs. The first slice must have the header."""
MAX_SECTIONS = 1024
"""Sections of a file in front of the size: more are not searched."""
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_RGB = 2
_JPEG = b"\xff\xd8\xff"
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of the frame header, which has the size."""
_JPEG_BARE = frozenset(range(0xD0, 0xD8)) | {0x01}
"""Markers without a length."""
_WEBP_ALPHA = 0x10


class PictureHeader(msgspec.Struct, frozen=True, gc=False):
    """Size in pixels. `is_rgb`: its pixels are red, green and blue as stored; others are converted."""

    width: int
    height: int
    is_rgb: bool


def read_header(start: bytes) -> PictureHeader | None:
    """The header of a file, from its first bytes; None for another format, or if they are too few."""
    try:
        if start.startswith(_PNG):
            header = _png(start)
        elif start.startswith(_JPEG):
            header = _jpeg(start)
        elif start.startswith(b"RIFF") and start[8:12] == b"WEBP":
            header = _webp(start)
        elif start[:6] in (b"GIF87a", b"GIF89a"):
            header = _gif(start)
        else:
            return None
    except (struct.error, IndexError):
        return None
    return header if header and header.width and header.height else None


def _png(start: bytes) -> PictureHeader | None:
    kind, width, height, _, colours = unpack_from(">4sIIBB", start, 12)
    return PictureHeader(width, height, colours == _PNG_RGB) if kind == b"IHDR" else None


def _jpeg(start: bytes) -> PictureHeader | None:
    at = 2
    for _ in range(MAX_SECTIONS):
        while start[at] == start[at + 1] == 0xFF:  # padding
            at += 1
        if start[at] != 0xFF:
            return None
        marker, at = start[at + 1], at + 2
        if marker in _JPEG_FRAMES:
            height, width, components = unpack_from(">3xHHB", start, at)
            return PictureHeader(width, height, components == 3)
        if marker not in _JPEG_BARE:
            at += unpack_from(">H", start, at)[0]
    return None


def _webp(start: bytes) -> PictureHeader | None:
    kind = start[12:16]
    if kind == b"VP8X":
        flags, wide, width, high, height = unpack_from("<B3xHBHB", start, 20)
        return PictureHeader((width << 16 | wide) + 1, (height << 16 | high) + 1, not flags & _WEBP_ALPHA)
    if kind == b"VP8L" and start[20] == 0x2F:
        (bits,) = unpack_from("<I", start, 21)
        return PictureHeader((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, not bits >> 28 & 1)
    if kind == b"VP8 " and start[23:26] == b"\x9d\x01\x2a":
        width, height = unpack_from("<HH", start, 26)
        return PictureHeader(width & 0x3FFF, height & 0x3FFF, True)
    return None


def _gif(start: bytes) -> PictureHeader | None:
    """Its first picture may be larger than the screen that the file declares."""
    width, height, flags = unpack_from("<HHB", start, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    for _ in range(MAX_SECTIONS):
        if start[at] == 0x2C:
            left, top, wide, high = unpack_from("<HHHH", start, at + 1)
            return PictureHeader(max(width, left + wide), max(height, top + high), False)
        if start[at] != 0x21:
            return None
        at += 2
        for _ in range(MAX_SECTIONS):
            at, length = at + 1 + start[at], start[at]
            if not length:
                break
    return None


# --- identifiers ---


def _length(count: int) -> bytes:
    return count.to_bytes(8, "little")


def _framed(content: bytes) -> bytes:
    return _length(len(content)) + content


def _leaf(content: bytes) -> bytes:
    return b"\x03" + _framed(content)


_WHITE = b"\x01" + _length(3) + _leaf(_length(255)) * 3
_CONVERTED = (
    *(b"\x02", _length(2), _framed(b"io_config"), b"\x02", _length(2)),
    *(_framed(b"image_mode"), _leaf(b"RGB"), _framed(b"rgba_background_color"), _WHITE, _framed(b"data")),
)
_FIELD = _framed(b"image") + b"\x03" + _framed(b"image")
"""In front of the file, or of how it was converted."""
_AS_IS, _TO_RGB = _FIELD + b"\x03", _FIELD + b"".join(_CONVERTED) + b"\x03"


def identify(encoded: str, model: str) -> tuple[str, PictureHeader] | None:
    """(identifier, header) of a picture as base64, for the engine's `--model`. None for a picture that the engine
    refuses, or whose format is not known here."""
    try:
        parts = _decoded(encoded)
        start = next(parts, b"")
        header = read_header(start)
        if header is None:
            return None
        digest = blake3(_AS_IS if header.is_rgb else _TO_RGB)
        digest.update(_length(len(encoded) // 4 * 3 - encoded.count("=", -2)))
        digest.update(start)
        for part in parts:
            digest.update(part)
    except (NotBase64, ValueError):  # a character that is not ASCII
        return None
    digest.update(_framed(b"model_id") + _leaf(model.encode("utf-8", "surrogatepass")))
    return digest.hexdigest(), header


def _decoded(encoded: str) -> Iterator[bytes]:
    """The bytes, in slices. Raises `binascii.Error` for padding in the middle, as for other invalid characters."""
    if len(encoded) % 4 or "=" in encoded[:-2]:
        raise NotBase64("wrong padding")
    for at in range(0, len(encoded), SLICE_CHARACTERS):
        yield a2b_base64(encoded[at : at + SLICE_CHARACTERS], strict_mode=True)
