"""The stages of a prompt between `Fingerprinter.open` and `Fingerprinter.finish`: opened, rendered, pending."""

from __future__ import annotations

from array import array

import msgspec

from router.prompt.apis.conversion import Conversion
from router.prompt.incremental.prefix_cache import Boundary, CachedPrefix, PrefixCache
from router.prompt.media import MediaText
from router.prompt.pictures.picture_reader import PictureIdentities
from router.prompt.segments import Lookup, SegmentCache
from router.types import BlockHash, Generation, InferenceRequest


class PendingEntry(msgspec.Struct, frozen=True, gc=False):
    """The prefix to store when its tokens are known."""

    cache: PrefixCache
    digest: int
    prefix: CachedPrefix
    """The prefix without tokens and hashes."""
    pieces: int
    """Number of pieces behind the cached prefix, up to the last cut."""
    replaced: int = 0
    """The digest of the prefix that it continues, which is then dropped."""

    def store(self, tokens: array[int], hashes: array[int], seed: BlockHash, block_tokens: int) -> None:
        """Store the prefix with these tokens, which end at the last cut."""
        kept = hashes[: len(tokens) // block_tokens].tobytes()
        found = msgspec.structs.replace(self.prefix, tokens=tokens.tobytes(), seed=seed, hashes=kept)
        self.cache.store(self.digest, found, self.replaced)


class FoundPrefix(msgspec.Struct, frozen=True, gc=False):
    """A chat and its longest cached prefix. `seen`: a boundary of the chat was seen before."""

    messages: list[msgspec.Raw]
    boundaries: list[Boundary]
    prefix: CachedPrefix
    seen: bool
    cache: PrefixCache
    """The cache that the prefix is from. `clear` replaces it; later stores into it are lost."""
    key: str = ""
    """The field of the messages, if the chat has more than roles and texts."""

    @property
    def new_bytes(self) -> int:
        return sum(map(len, self.messages[self.prefix.messages :]))


class OpenedPrompt(msgspec.Struct, frozen=True, gc=False):
    request: InferenceRequest
    generation: Generation
    seed: BlockHash
    segments: SegmentCache
    found: FoundPrefix | None
    conversion: type[Conversion] | None = None
    identities: PictureIdentities | None = None


class PendingPrompt(msgspec.Struct, gc=False):
    """A prompt between `render` and `finish`: text, or the client's tokens."""

    generation: Generation
    seed: BlockHash
    prompt: Lookup | array[int]
    prefix: CachedPrefix | None = None
    """The cached prefix, if the prompt is read incrementally: the text is the one behind it."""
    framed: bool = False
    media: MediaText | None = None
    """With pictures: what is known of them."""
    exact_pieces: int = 0
    """Number of pieces in front of the first picture whose tokens are unknown."""
    entry: PendingEntry | None = None
    conversion: type[Conversion] | None = None
    """How the body of an incremental prompt was converted to a chat."""

    @property
    def cold(self) -> tuple[str, ...]:
        return self.prompt.cold if isinstance(self.prompt, Lookup) else ()

    @property
    def cold_characters(self) -> int:
        return sum(map(len, self.cold))
