"""Sizes of pictures from the first bytes of their files, against Pillow, which engines use."""

from __future__ import annotations

from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from router.prompt.pictures.vllm_identifier import PictureHeader, read_header

FORMATS = {
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
}
PICTURES = [(kind, mode) for kind, modes in FORMATS.items() for mode in modes]


def written(kind: str, mode: str, size: tuple[int, int], **options: object) -> bytes:
    file = BytesIO()
    picture = Image.new(mode, size)
    if mode == "RGBA":
        picture.putpixel((0, 0), (1, 2, 3, 4))
    picture.save(file, kind, **options)
    return file.getvalue()


def by_pillow(file: bytes) -> PictureHeader:
    opened = Image.open(BytesIO(file))
    opened.load()
    return PictureHeader(*opened.size, opened.mode == "RGB")


@given(picture=st.sampled_from(PICTURES), width=st.integers(1, 700), height=st.integers(1, 700))
def test_sizes_and_modes_are_those_of_pillow(picture: tuple[str, str], width: int, height: int) -> None:
    file = written(*picture, (width, height))
    assert read_header(file[:512]) == by_pillow(file)


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {"progressive": True, "exif": b"Exif\0\0" + bytes(500), "icc_profile": bytes(70_000)}),
        ("JPEG", "RGB", {"comment": b"\xff\xc0" * 100, "quality": 100, "subsampling": 0}),
        ("WEBP", "RGB", {"lossless": True}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("WEBP", "RGB", {"lossless": True, "icc_profile": bytes(100)}),
        ("WEBP", "RGBA", {"exif": b"Exif\0\0" + bytes(10)}),
        ("WEBP", "RGB", {"exif": b"Exif\0\0" + bytes(10)}),
        ("WEBP", "RGB", {"save_all": True, "append_images": [Image.new("RGB", (37, 51), "red")]}),
        ("GIF", "P", {"comment": b"x" * 3000, "save_all": True, "append_images": [Image.new("P", (37, 51), 1)]}),
        ("PNG", "RGB", {"transparency": (0, 0, 0)}),
    ],
)
def test_options_of_the_writer_make_no_difference(kind: str, mode: str, options: dict[str, object]) -> None:
    file = written(kind, mode, (37, 51), **options)
    assert read_header(file) == by_pillow(file)


@given(picture=st.sampled_from(PICTURES), cut=st.integers(0, 2000), noise=st.binary(max_size=64), at=st.integers(0, 64))
def test_broken_files_have_a_header_or_none(picture: tuple[str, str], cut: int, noise: bytes, at: int) -> None:
    """They never raise. What is behind the header makes no difference."""
    file = written(*picture, (9, 5))
    broken = file[:at] + noise + file[at + len(noise) :]
    found = read_header(broken[:cut])
    assert found is None or (found.width > 0 and found.height > 0)


@pytest.mark.parametrize("file", [b"", b"\xff\xd8\xff", b"BM" + bytes(60), b"\xff\xd8" + b"\xff" * 100_000])
def test_other_formats_are_unknown(file: bytes) -> None:
    assert read_header(file) is None


def test_a_file_of_many_sections_is_given_up_early() -> None:
    frame = b"\xff\xc0\x00\x11\x08\x00\x05\x00\x09\x03"
    section = b"\xff\xe0\x00\x02"
    assert read_header(b"\xff\xd8" + section * 100 + frame) == PictureHeader(9, 5, True)
    assert read_header(b"\xff\xd8" + section * 10_000 + frame) is None
