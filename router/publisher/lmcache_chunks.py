"""The chunks that one tier of an LMCache server holds.

A chunk is one object per rank of the model, and is held only with all of them. It comes with its tokens and its offset
in the prompt, but without its parent. The parent is the stored chunk for which

    digest = BLAKE3(parent digest | tokens as u32 BE)

A chunk is announced by its hash only if its parent is unknown, if the server uses another hash function, or if it has
no tokens (a server that does not copy KV itself does not receive them). This is sufficient if the server hashes like
the engine, in chunks of one engine block: the engine's events then resolve the hash.
"""

from __future__ import annotations

import struct
from typing import Annotated, NamedTuple

import msgspec
import xxhash
from blake3 import blake3

from router.types import BlocksRemoved, BlocksStored, KvEvent, Tier


class Key(msgspec.Struct, frozen=True):
    """Name of one object: one rank's part of a chunk. `kv_rank`: number of ranks in the highest byte, rank in the
    next."""

    chunk_hash_hex: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2}){8,}$")]
    model_name: str
    kv_rank: Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
    object_group_id: int = 0
    cache_salt: str = ""


class Entry(msgspec.Struct, frozen=True):
    """One object in a batch. `token_offset` is the chunk's first token in the prompt, or -1."""

    key: Key
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]] = []
    token_offset: int = -1


class _Chunk(NamedTuple):
    """A chunk as stored by `ranks` ranks of the model."""

    digest: str
    salt: str
    ranks: int


class ChunkTable:
    """The chunks of one holder. Methods return an event when a chunk becomes complete or stops being complete."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._present: dict[_Chunk, int] = {}
        """A bit for each rank whose object is stored."""
        self._tokens: dict[_Chunk, Entry] = {}
        """For incomplete chunks, the entry with the tokens."""
        self._ending: dict[tuple[str, int], dict[str, None]] = {}
        """Digests of chunks by salt and end offset in the prompt, most recently used last."""
        self._end: dict[_Chunk, int] = {}
        """End offset of each chunk with a known parent."""

    def store(self, entry: Entry) -> KvEvent | None:
        chunk, rank_bit = _chunk(entry.key)
        before = self._present.get(chunk, 0)
        now = self._present[chunk] = before | rank_bit
        if before.bit_count() == chunk.ranks:
            return None
        if entry.token_ids:
            self._tokens[chunk] = entry
        return self._stored(chunk) if now.bit_count() == chunk.ranks else None

    def delete(self, key: Key) -> KvEvent | None:
        chunk, rank_bit = _chunk(key)
        before = self._present.pop(chunk, 0)
        if now := before & ~rank_bit:
            self._present[chunk] = now
        else:
            self._drop(chunk)
        if before.bit_count() < chunk.ranks or now == before:
            return None
        return BlocksRemoved(block_hashes=(_engine_hash(chunk.digest, chunk.salt),), tier=self._tier)

    def touch(self, key: Key) -> None:
        """Mark the chunk as used: the next stored chunk probably continues it."""
        chunk, _ = _chunk(key)
        if end := self._end.get(chunk):
            digests = self._ending[chunk.salt, end]
            digests[chunk.digest] = digests.pop(chunk.digest)

    def _stored(self, chunk: _Chunk) -> BlocksStored:
        entry = self._tokens.pop(chunk, None)
        parent = self._parent(chunk, entry) if entry else None
        hashes = (_engine_hash(chunk.digest, chunk.salt),)
        if entry is None or parent is None:
            return BlocksStored(block_hashes=hashes, tier=self._tier, salt=chunk.salt)
        end = self._end[chunk] = entry.token_offset + len(entry.token_ids)
        self._ending.setdefault((chunk.salt, end), {})[chunk.digest] = None
        return BlocksStored(
            block_hashes=hashes,
            parent_hash=_engine_hash(parent, chunk.salt) if parent else None,
            tokens=tuple(entry.token_ids),
            block_size_tokens=len(entry.token_ids),
            tier=self._tier,
            salt=chunk.salt,
        )

    def _drop(self, chunk: _Chunk) -> None:
        self._tokens.pop(chunk, None)
        key = chunk.salt, self._end.pop(chunk, -1)
        if digests := self._ending.get(key):
            digests.pop(chunk.digest, None)
            if not digests:
                del self._ending[key]

    def _parent(self, chunk: _Chunk, entry: Entry) -> str | None:
        """Digest of the parent chunk, "" for the first chunk of a prompt, None if unknown. Tries the most recently used
        candidates first, about two microseconds each."""
        if entry.token_offset == 0:
            return ""
        tokens = struct.pack(f">{len(entry.token_ids)}I", *entry.token_ids)
        for digest in reversed(self._ending.get((chunk.salt, entry.token_offset), {})):
            if blake3(bytes.fromhex(digest) + tokens).hexdigest() == chunk.digest:
                return digest
        return None


def _chunk(key: Key) -> tuple[_Chunk, int]:
    return _Chunk(key.chunk_hash_hex, key.cache_salt, key.kv_rank >> 24), 1 << (key.kv_rank >> 16 & 0xFF)


def _engine_hash(digest: str, salt: str) -> int:
    """64-bit hash for the index. LMCache does not hash the salt; it is added here to separate tenants."""
    return int(digest[-16:], 16) ^ (xxhash.xxh3_64_intdigest(salt.encode()) if salt else 0)
