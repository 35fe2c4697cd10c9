"""Reads the pictures of a chat: what identifies each for the engine, and its number of tokens.

Only pictures that are in the body as base64 are read; nothing is fetched. Their files are not decoded. What was read is
cached by a seeded digest of the base64, because chats repeat their pictures on every turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import msgspec
import xxhash

from router.prompt.pictures.header import PictureHeader
from router.prompt.pictures.learnt import LearntPictures, Wanted
from router.prompt.pictures.qwen_vl import PLACEHOLDER, PictureSizes

Identify: TypeAlias = Callable[[str, str], tuple[str, PictureHeader] | None]
"""(base64 of a file, weights of the model) to (the engine's identifier, header); None if it is unknown."""
CACHED_PICTURES = 4096
MAX_PICTURES = 1024
MAX_PICTURE_TOKENS = 1 << 20
"""Maximum tokens of all pictures of a prompt: no context is longer."""
MAX_UUID_CHARACTERS = 1024
_TYPES = ("image_url", "input_image", None)


class PictureIdentities(NamedTuple):
    """How the pods of a model identify pictures, and the weights that they name."""

    identify: Identify
    weights: str


class Picture(NamedTuple):
    identifier: str
    token_count: int
    tokens: array[int] | None = None
    """None: only the placeholder, repeated."""

    @property
    def key(self) -> int:
        return key_of(self.identifier)


class _CachedPicture(msgspec.Struct):
    """What was found for one picture. None until it was read, False if it is unknown."""

    found: tuple[str, int] | bool | None = None
    """Identifier and number of tokens; 0 where that is learnt."""


class PictureReader:
    """Reads pictures for one model, in any thread. `sizes`: the number of tokens of each, or what was learnt of them;
    `placeholder`: the token that is repeated for a picture, or that stands for it in the text; `mark`: its text.
    `trusts_uuids`: a picture's `uuid`, which the client chooses, is its identifier, as in the engine; otherwise pods do
    not receive it (`uuids.py`)."""

    def __init__(
        self,
        sizes: PictureSizes | LearntPictures,
        placeholder: int,
        mark: str = PLACEHOLDER,
        *,
        trusts_uuids: bool = False,
        seed: int = 0,
    ) -> None:
        self._sizes = sizes if isinstance(sizes, PictureSizes) else None
        self.learnt = sizes if isinstance(sizes, LearntPictures) else None
        """What was learnt; None where the number of tokens is computed."""
        self._seed = seed
        self._trusts_uuids = trusts_uuids
        self.placeholder, self.mark = placeholder, mark
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
        tokens = None
        if self.learnt is not None:
            tokens = self.learnt.tokens(Wanted(identifier, identities.weights, encoded))
            if tokens is None:
                return None
            count = len(tokens)
        return Picture(identifier if uuid is None else str(uuid), count, tokens)

    def _identified(self, encoded: str, identities: PictureIdentities) -> tuple[str, int] | None:
        found = identities.identify(encoded, identities.weights)
        if found is None:
            return None
        identifier, header = found
        count = self._sizes.tokens(header.width, header.height) if self._sizes is not None else 0
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
