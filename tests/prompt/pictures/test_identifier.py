"""Identifiers of pictures, against those of vLLM's own hasher."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.pictures import vllm_identifier
from router.prompt.pictures.vllm_identifier import identify

MODEL = "Qwen/Qwen2-VL-2B-Instruct"
RGB = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFklEQVR4nGPkEpFjYGBgYmBgYGBgYGBgAAAC5gBAXKUgWwAAAABJRU5ErkJggg=="
RGBA = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAYAAABytg0kAAAAFElEQVR4nGPkEpHTYGBgYGBigAIABhIAaPBXO8oAAAAASUVORK5CYII="


@pytest.mark.parametrize(
    ("encoded", "identifier"),
    [
        (RGB, "b802c3e92f26c565b90c3093f7b24706af50d444c3d7ce5a1a9b0d3ea88bde06"),
        (RGBA, "283b4264f7a6331c566d3e2a2b76dc9e89cd5dba088d6e2e29e7c60e5c275983"),
    ],
)
@pytest.mark.parametrize("slice_characters", [4, 64, 1 << 20])
def test_identifiers_are_those_of_vllm(
    encoded: str, identifier: str, slice_characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded from vLLM 0.32. They do not depend on the size of the slices, if the first one has the header."""
    monkeypatch.setattr(vllm_identifier, "SLICE_CHARACTERS", slice_characters)
    found = identify(encoded, MODEL)
    assert (found and found[0]) == (identifier if slice_characters > 4 else None)
    if found:
        assert (found[1].width, found[1].height, found[1].is_rgb) == (2, 2, encoded == RGB)


def test_identifiers_depend_on_the_model_and_on_every_byte() -> None:
    found = [identify(encoded, model) for encoded, model in ((RGB, MODEL), (RGB, "./x"), (RGBA, MODEL))]
    assert len({one[0] for one in found if one}) == 3


@pytest.mark.parametrize("encoded", ["", "AAAA", RGB[:-1], RGB[:60] + "\n" + RGB[61:], RGB[:60] + "=" + RGB[61:]])
def test_what_the_engine_refuses_has_no_identifier(encoded: str) -> None:
    assert identify(encoded, MODEL) is None


@given(at=st.integers(0, len(RGB)), noise=st.text(max_size=4))
def test_any_text_has_an_identifier_or_none(at: int, noise: str) -> None:
    found = identify(RGB[:at] + noise + RGB[at:], MODEL)
    assert found is None or len(found[0]) == 64
