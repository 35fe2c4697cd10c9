"""The stages of a prompt between `Fingerprinter.open` and `Fingerprinter.finish`: opened, rendered, pending."""

from __future__ import annotations

from array import array
from typing import TypeAlias

import msgspec

from router.prompt.apis.conversion import Conversion
from router.prompt.incremental.reader import FoundPrefix, IncrementalPrompt, PendingEntry
from router.prompt.media import MediaText
from router.prompt.pictures.picture_reader import PictureIdentities
from router.prompt.segments import Lookup, SegmentCache
from router.types import BlockHash, Generation, InferenceRequest


class OpenedPrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt between `open` and `render`."""

    request: InferenceRequest
    generation: Generation
    seed: BlockHash
    segments: SegmentCache
    found: FoundPrefix | None
    conversion: type[Conversion] | None = None
    identities: PictureIdentities | None = None


class RenderedPrompt(msgspec.Struct, frozen=True, gc=False):
    """A whole prompt between `render` and `look_up`: its text with its pieces, or the client's tokens."""

    generation: Generation
    seed: BlockHash
    prompt: str | array[int]
    pieces: list[str] = []
    framed: bool = False
    media: MediaText | None = None
    """With pictures: what is known of them."""
    exact_pieces: int = 0
    """Number of pieces in front of the first picture whose tokens are unknown."""
    entry: PendingEntry | None = None
    """The prefix to store."""


class PendingPrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt between `look_up` and `finish`: text that was looked up, or the client's tokens."""

    generation: Generation
    seed: BlockHash
    prompt: Lookup | array[int]
    framed: bool = False
    media: MediaText | None = None
    exact_pieces: int = 0
    entry: PendingEntry | None = None
    """As in `RenderedPrompt`."""

    @property
    def text(self) -> str | None:
        """The text to encode, without special tokens; None for a prompt of tokens."""
        return self.prompt.text if isinstance(self.prompt, Lookup) else None

    @property
    def cold(self) -> tuple[str, ...]:
        """The text that must still be encoded."""
        return self.prompt.cold if isinstance(self.prompt, Lookup) else ()

    @property
    def cold_characters(self) -> int:
        """How much that is."""
        return sum(map(len, self.cold))


AnyPendingPrompt: TypeAlias = PendingPrompt | IncrementalPrompt
