"""Reads the size of a picture from the start of its file: PNG, JPEG, WebP or GIF.

Nothing is decoded, and a fixed number of steps bounds hostile files. Other formats are unknown here.
"""

from __future__ import annotations

import struct
from struct import unpack_from

import msgspec

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
