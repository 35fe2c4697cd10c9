"""Which chunks are on one LMCache server's shelf?

A chunk is one object for each rank of the model, and held only if all are there. It comes with its tokens and its place
in the prompt, but without what precedes it: that is the stored chunk whose hash gives this one's,

    digest = BLAKE3(digest before | tokens as u32 BE)

A chunk without tokens (servers that do not copy KV themselves do not see any), of another hash or of lost ancestry is
told by its hash alone. That is as good where the server hashes as the engine does, in chunks of one engine block: then
the engine has said what it stands for. This file knows nothing of servers and their numbering.
"""

from __future__ import annotations

import struct
from typing import Annotated, NamedTuple

import msgspec
import xxhash
from blake3 import blake3

from router.types import BlocksRemoved, BlocksStored, KvEvent, Tier


class Key(msgspec.Struct, frozen=True):
    """Names one object: one rank's share of one chunk. `kv_rank` has the number of ranks in its highest byte, and
    which of them this is in the next."""

    chunk_hash_hex: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2}){8,}$")]
    model_name: str
    kv_rank: Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
    object_group_id: int = 0
    cache_salt: str = ""


class Entry(msgspec.Struct, frozen=True):
    """One object in a batch. `token_offset` is where in the prompt the chunk's tokens begin; -1 for unknown."""

    key: Key
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]] = []
    token_offset: int = -1


class _Chunk(NamedTuple):
    """A chunk as one model layout stores it."""

    digest: str
    salt: str
    ranks: int


class ChunkTable:
    """The chunks of one holder. What becomes whole, or stops being so, comes out as an event."""

    def __init__(self, tier: Tier) -> None:
        self.complete = True
        self._tier = tier
        self._present: dict[_Chunk, int] = {}
        """A bit for each rank whose share is there."""
        self._tokens: dict[_Chunk, Entry] = {}
        """Of chunks that are not whole yet, the entry that brought the tokens."""
        self._ending: dict[tuple[str, int], dict[str, None]] = {}
        """Digests by salt and by where their tokens end, the latest used last."""
        self._end: dict[_Chunk, int] = {}

    def store(self, entry: Entry) -> KvEvent | None:
        """One more share."""
        chunk, rank_bit = _chunk(entry.key)
        before = self._present.get(chunk, 0)
        now = self._present[chunk] = before | rank_bit
        if before.bit_count() == chunk.ranks:
            return None
        if entry.token_ids:
            self._tokens[chunk] = entry
        return self._stored(chunk) if now.bit_count() == chunk.ranks else None

    def delete(self, key: Key) -> KvEvent | None:
        """One share less."""
        chunk, rank_bit = _chunk(key)
        before = self._present.pop(chunk, 0)
        if now := before & ~rank_bit:
            self._present[chunk] = now
        else:
            self._forget(chunk)
        if before.bit_count() < chunk.ranks or now == before:
            return None
        return BlocksRemoved(block_hashes=(_engine_hash(chunk.digest, chunk.salt),), tier=self._tier)

    def touch(self, key: Key) -> None:
        """The chunk was used: what is stored next may well continue it."""
        chunk, _ = _chunk(key)
        if end := self._end.get(chunk):
            digests = self._ending[chunk.salt, end]
            digests[chunk.digest] = digests.pop(chunk.digest)

    def _stored(self, chunk: _Chunk) -> BlocksStored:
        entry = self._tokens.pop(chunk, None)
        parent = self._parent(chunk, entry) if entry else None
        named = (_engine_hash(chunk.digest, chunk.salt),)
        if entry is None or parent is None:
            return BlocksStored(
                block_hashes=named, parent_hash=None, tokens=(), block_size_tokens=0, tier=self._tier, salt=chunk.salt
            )
        end = self._end[chunk] = entry.token_offset + len(entry.token_ids)
        self._ending.setdefault((chunk.salt, end), {})[chunk.digest] = None
        return BlocksStored(
            block_hashes=named,
            parent_hash=_engine_hash(parent, chunk.salt) if parent else None,
            tokens=tuple(entry.token_ids),
            block_size_tokens=len(entry.token_ids),
            tier=self._tier,
            salt=chunk.salt,
        )

    def _forget(self, chunk: _Chunk) -> None:
        self._tokens.pop(chunk, None)
        place = chunk.salt, self._end.pop(chunk, -1)
        if digests := self._ending.get(place):
            digests.pop(chunk.digest, None)
            if not digests:
                del self._ending[place]

    def _parent(self, chunk: _Chunk, entry: Entry) -> str | None:
        """Digest of the chunk before, "" for the first one of a prompt, None if it is not to be found. About two
        microseconds a candidate, the latest used first."""
        if entry.token_offset == 0:
            return ""
        tokens = struct.pack(f">{len(entry.token_ids)}I", *entry.token_ids)
        for digest in reversed(self._ending.get((chunk.salt, entry.token_offset), {})):
            if blake3(bytes.fromhex(digest) + tokens).hexdigest() == chunk.digest:
                return digest
        return None


def _chunk(key: Key) -> tuple[_Chunk, int]:
    """A key's chunk, and the bit of its rank."""
    return _Chunk(key.chunk_hash_hex, key.cache_salt, key.kv_rank >> 24), 1 << (key.kv_rank >> 16 & 0xFF)


def _engine_hash(digest: str, salt: str) -> int:
    """64 bits for the index. LMCache hashes no salt: here it tells tenants apart."""
    return int(digest[-16:], 16) ^ (xxhash.xxh3_64_intdigest(salt.encode()) if salt else 0)
