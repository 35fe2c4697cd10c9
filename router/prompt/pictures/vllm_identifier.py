"""Computes vLLM's identifier of a picture: a digest of its file's bytes and of the model's path.

As `multimodal/hasher.py` and `multimodal/processing/inputs.py` in vLLM 0.32, with its default options. Each value comes
behind a tag and its length, so that no two values have the same bytes.
"""

from __future__ import annotations

from binascii import Error as NotBase64
from binascii import a2b_base64
from collections.abc import Iterator

from blake3 import blake3

from router.prompt.pictures.header import PictureHeader, read_header

SLICE_CHARACTERS = 256 * 1024
"""Base64 that is decoded at once: 0.7 ms, in which no other thread runs. The first slice must have the header."""


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
