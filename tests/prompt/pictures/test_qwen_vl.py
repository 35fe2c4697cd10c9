"""Tokens of pictures in the Qwen-VL family."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.pictures.picture_reader import PictureSizes, read_sizes

QWEN2 = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056}
QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [(28, 28, 4), (112, 84, 12), (448, 448, 256), (640, 480, 391), (1280, 720, 1196), (2, 2, 4), (201, 1, None)],
)
def test_numbers_are_those_of_qwen2_vl(width: int, height: int, tokens: int | None) -> None:
    """Recorded from vLLM 0.32."""
    sizes = read_sizes(QWEN2)
    assert sizes is not None
    assert sizes.tokens(width, height) == sizes.tokens(height, width) == tokens


def test_sizes_are_read_as_transformers_reads_them() -> None:
    """`min_pixels` and `max_pixels` override `size`, which has defaults."""
    assert read_sizes(QWEN3) == PictureSizes(32, 65536, 16777216)
    assert read_sizes(QWEN3 | {"max_pixels": 70_000}) == PictureSizes(32, 65536, 70_000)
    assert read_sizes({"image_processor_type": "Qwen2VLImageProcessorFast"}) == PictureSizes(28, 3136, 1003520)


@pytest.mark.parametrize(
    "changes",
    [
        {"image_processor_type": "LlavaImageProcessor"},
        {"image_processor_type": None},
        {"do_resize": False},
        {"patch_size": 0},
        {"patch_size": 1.5},
        {"max_pixels": "many"},
        {"size": {"height": 3, "shortest_edge": -1}},
    ],
)
def test_other_processors_are_unknown(changes: dict[str, Any]) -> None:
    assert read_sizes(QWEN2 | changes) is None


@given(width=st.integers(1, 1 << 32), height=st.integers(1, 1 << 32))
def test_no_size_in_a_header_makes_more_tokens_than_the_model_allows(width: int, height: int) -> None:
    sizes = read_sizes(QWEN2)
    assert sizes is not None
    tokens = sizes.tokens(width, height)
    assert tokens is None or 1 <= tokens <= 12845056 // 28**2
