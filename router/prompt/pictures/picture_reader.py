"""Reads the pictures of a chat: what identifies each for the engine, its number of tokens, and the hashes of a prompt.

Only pictures that are in the body as base64 are read; nothing is fetched. Their files are not decoded. What was read is
cached by a seeded digest of the base64, because chats repeat their pictures on every turn. Tokens are counted for the
Qwen-VL family (Qwen2-VL, Qwen2.5-VL, Qwen3-VL): the picture is scaled so that both sides are multiples of a factor and
the area is within limits; each square of that factor is one token. As `smart_resize` in
`transformers/models/qwen2_vl/image_processing_qwen2_vl.py` (5.19).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil, floor, sqrt
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import xxhash

from router.hashing import hash_rest, picture_token, token_array
from router.prompt.pictures.vllm_identifier import PictureHeader
from router.types import BlockHash

Identify: TypeAlias = Callable[[str, str], tuple[str, PictureHeader] | None]
"""(base64 of a file, weights of the model) to (the engine's identifier, header); None if it is unknown."""
CACHED_PICTURES = 4096
MAX_PICTURES = 1024
MAX_PICTURE_TOKENS = 1 << 20
"""Maximum tokens of all pictures of a prompt: no context is longer."""
MAX_UUID_CHARACTERS = 1024
_TYPES = ("image_url", "input_image", None)
PLACEHOLDER = "<|image_pad|>"
"""Its token stands once for a picture in the text, and is repeated in the prompt."""
MAX_ASPECT_RATIO = 200
"""The engine refuses longer pictures."""
_PROCESSORS = tuple("Qwen2VLImageProcessor" + ending for ending in ("", "Fast", "Pil"))

_Positive = Annotated[int, msgspec.Meta(gt=0, lt=1 << 40)]


class PictureIdentities(NamedTuple):
    """How the pods of a model identify pictures, and the weights that they name."""

    identify: Identify
    weights: str


class Picture(NamedTuple):
    identifier: str
    token_count: int

    @property
    def key(self) -> int:
        return key_of(self.identifier)


class _CachedPicture(msgspec.Struct):
    """What was found for one picture. None until it was read, False if it is unknown."""

    found: tuple[str, int] | bool | None = None
    """Identifier and number of tokens."""


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


class PictureReader:
    """Reads pictures for one model, in any thread. `sizes`: the number of tokens of each; `placeholder`: the token that
    is repeated for a picture. `trusts_uuids`: a picture's `uuid`, which the client chooses, is its identifier, as in
    the engine; otherwise pods do not receive it (`uuids.py`)."""

    def __init__(
        self,
        sizes: PictureSizes,
        placeholder: int,
        *,
        trusts_uuids: bool = False,
        seed: int = 0,
    ) -> None:
        self._sizes = sizes
        self._seed = seed
        self._trusts_uuids = trusts_uuids
        self.placeholder = placeholder
        self._cached = lru_cache(CACHED_PICTURES)(lambda _digest, _identities: _CachedPicture())

    def leading(self, parts: Iterable[Mapping[str, Any]], identities: PictureIdentities) -> tuple[Picture, ...]:
        """The pictures among content parts with media, up to the first one that is unknown."""
        pictures: list[Picture] = []
        tokens = 0
        for part in parts:
            picture = self._read(part, identities) if len(pictures) < MAX_PICTURES else None
            if picture is None or (tokens := tokens + picture.token_count) > MAX_PICTURE_TOKENS:
                break
            pictures.append(picture)
        return tuple(pictures)

    def _read(self, part: Mapping[str, Any], identities: PictureIdentities) -> Picture | None:
        encoded, uuid = _encoded(part), part.get("uuid") if self._trusts_uuids else None
        if not encoded or (uuid is not None and not _is_identifier(uuid)):
            return None
        digest = xxhash.xxh3_128_intdigest(encoded.encode("utf-8", "surrogatepass"), self._seed)
        entry = self._cached(digest, identities)
        if entry.found is None:
            entry.found = self._identified(encoded, identities) or False
        if not isinstance(entry.found, tuple):
            return None
        identifier, count = entry.found
        return Picture(identifier if uuid is None else str(uuid), count)

    def _identified(self, encoded: str, identities: PictureIdentities) -> tuple[str, int] | None:
        found = identities.identify(encoded, identities.weights)
        if found is None:
            return None
        identifier, header = found
        count = self._sizes.tokens(header.width, header.height)
        return None if count is None else (identifier, count)


def _is_identifier(uuid: Any) -> bool:
    return isinstance(uuid, str) and 0 < len(uuid) <= MAX_UUID_CHARACTERS


def key_of(text: str) -> int:
    """64-bit hash of what identifies a picture."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def url_of(part: Mapping[str, Any]) -> str:
    """The URL of a part with a picture, sound or video; empty if it has none."""
    for name in ("image_url", "audio_url", "video_url"):
        given = part.get(name)
        url = given.get("url") if isinstance(given, dict) else given
        if isinstance(url, str):
            return url
    return ""


def _encoded(part: Mapping[str, Any]) -> str:
    """The base64 in a picture's URL; empty if it is elsewhere."""
    if part.get("type") not in _TYPES or "image_url" not in part:
        return ""
    url = url_of(part)
    head, comma, encoded = url[5:].partition(",") if url[:5].lower() == "data:" else ("", "", "")
    return encoded if comma and head.endswith(";base64") else ""


# --- the prompt ---


def expanded(
    tokens: array[int], exact_tokens: int, placeholder: int, pictures: Sequence[Picture]
) -> tuple[array[int], int, list[tuple[int, Picture]]]:
    """(tokens, how many of them are exact, the pictures by where they begin). `tokens` have one placeholder for each
    picture; those behind the first `exact_tokens` are left as they are."""
    found, placed, start = token_array(), list[tuple[int, Picture]](), 0
    for picture in pictures:
        try:
            at = tokens.index(placeholder, start, exact_tokens)
        except ValueError:
            break
        found += tokens[start:at]
        placed.append((len(found), picture))
        found += token_array((placeholder,)) * picture.token_count
        start = at + 1
    more = len(found) - start
    found += tokens[start:]
    return found, exact_tokens + more, placed


def hash_pictures(
    text_hashes: array[int],
    tokens: array[int],
    placed: Sequence[tuple[int, Picture]],
    block_size_tokens: int,
    seed: BlockHash,
) -> array[int]:
    """Hashes of the full blocks in `tokens`, with pictures at these places. `text_hashes`: those of the tokens with one
    placeholder for each picture, which are equal in front of the first one."""
    known = min(placed[0][0] // block_size_tokens, len(text_hashes))
    hashed = tokens[known * block_size_tokens :]
    for at, picture in placed:
        inside = at - known * block_size_tokens
        hashed[inside] = picture_token(picture.identifier, hashed[inside])
    return hash_rest(text_hashes[:known], hashed, block_size_tokens, seed)
