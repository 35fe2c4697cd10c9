"""Counts the tokens of a picture in the Qwen-VL family (Qwen2-VL, Qwen2.5-VL, Qwen3-VL).

The picture is scaled so that both sides are multiples of a factor and the area is within limits; each square of that
factor is one token. As `smart_resize` in `transformers/models/qwen2_vl/image_processing_qwen2_vl.py` (5.19).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, sqrt
from typing import Annotated, Any

import msgspec

PLACEHOLDER = "<|image_pad|>"
"""Its token stands once for a picture in the text, and is repeated in the prompt."""
MAX_ASPECT_RATIO = 200
"""The engine refuses longer pictures."""
_PROCESSORS = tuple("Qwen2VLImageProcessor" + ending for ending in ("", "Fast", "Pil"))

_Positive = Annotated[int, msgspec.Meta(gt=0, lt=1 << 40)]


class PictureSizes(msgspec.Struct, frozen=True):
    """How a model scales pictures: side of a token's square, and limits of the area, in pixels."""

    factor: int
    min_pixels: int
    max_pixels: int

    def tokens(self, width: int, height: int) -> int | None:
        """Number of tokens; None for a picture that the engine refuses."""
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            return None
        factor = self.factor
        columns, rows = round(width / factor), round(height / factor)
        area = columns * rows * factor * factor
        if area > self.max_pixels:
            scale = sqrt(height * width / self.max_pixels)
            columns, rows = max(1, floor(width / scale / factor)), max(1, floor(height / scale / factor))
        elif area < self.min_pixels:
            scale = sqrt(self.min_pixels / (height * width))
            columns, rows = ceil(width * scale / factor), ceil(height * scale / factor)
        return columns * rows


class _Size(msgspec.Struct):
    shortest_edge: _Positive = 56 * 56
    longest_edge: _Positive = 28 * 28 * 1280


class _Processor(msgspec.Struct):
    image_processor_type: str
    patch_size: _Positive = 14
    merge_size: _Positive = 2
    size: _Size | None = None
    min_pixels: _Positive | None = None
    max_pixels: _Positive | None = None
    do_resize: bool = True


def read_sizes(processor: Mapping[str, Any]) -> PictureSizes | None:
    """The sizes in a `preprocessor_config.json`; None for another family, or settings that are not known here."""
    try:
        given = msgspec.convert(processor, _Processor)
    except msgspec.ValidationError:
        return None
    if given.image_processor_type not in _PROCESSORS or not given.do_resize:
        return None
    size = given.size or _Size()
    return PictureSizes(
        factor=given.patch_size * given.merge_size,
        min_pixels=given.min_pixels or size.shortest_edge,
        max_pixels=given.max_pixels or size.longest_edge,
    )
