"""Computes block hashes from tokens.

The router does not use the engines' hashes: they differ by algorithm, seed and version. Its own are XXH3-64, chained
over little-endian u32 tokens and seeded by the generation:

    h[-1] = seed = XXH3-64(canonical encoding of the generation)
    h[i]  = XXH3-64(tokens of block i as u32 LE, seed = h[i-1])

Prompts and KV events use the same `hash_blocks`, so equal tokens have equal hashes. Where a picture begins, its
identifier replaces the token, on both sides: all its tokens are the same placeholder.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from operator import attrgetter
from struct import iter_unpack
from typing import Any

import msgspec
import xxhash

from router.types import BlockHash, Generation, PromptPrefix

TOKEN_BYTES = 4
_TOKEN_TYPE = "I"
HASH_BYTES = 8
_HASH_TYPE = "Q"
_FIELDS = attrgetter("model", "revision", "tokenizer", "kv_dtype", "block_size_tokens", "adapter", "salt")
"""What a generation is hashed with, in this order."""


def token_array(tokens: Iterable[int] = ()) -> array[int]:
    """Tokens as a flat u32 array, which is hashed without copying."""
    return array(_TOKEN_TYPE, tokens)


def hash_array(blocks: Iterable[BlockHash] | bytes = ()) -> array[int]:
    """Block hashes as a flat u64 array: a fifth of the memory of a list of ints, and no objects for the garbage
    collector (it would pause for 30 ms with 2,000 prompts as lists)."""
    return array(_HASH_TYPE, blocks)


def salt_seed(salt: str) -> int:
    """64 bits that keep what is cached for one salt apart from what is cached for another; 0 without one."""
    return xxhash.xxh3_64_intdigest(salt.encode(errors="surrogatepass")) if salt else 0


def generation_seed(generation: Generation) -> BlockHash:
    """The chain's root. Each field is length-prefixed, so two generations never have the same encoding."""
    encoded = [str(field).encode("utf-8", "surrogatepass") for field in _FIELDS(generation)]
    return xxhash.xxh3_64_intdigest(b"".join(len(e).to_bytes(4, "little") + e for e in encoded))


def hash_blocks(tokens: array[int], block_size_tokens: int, parent: BlockHash) -> array[int]:
    """Chain hashes of the full blocks in `tokens`, continuing from `parent` (a seed or an earlier hash).

    A trailing partial block is ignored. Costs about 100 ns per block of 16 tokens.
    """
    digest = xxhash.xxh3_64_intdigest
    full = len(tokens) // block_size_tokens * block_size_tokens
    blocks = iter_unpack(f"{block_size_tokens * TOKEN_BYTES}s", memoryview(_little_endian(tokens))[:full])
    return hash_array([parent := digest(block, parent) for (block,) in blocks])


def hash_ahead(hashes: Sequence[BlockHash], tokens: array[int], block_tokens: int, ahead_tokens: int) -> array[int]:
    """The hashes of blocks that are found again only with the same tokens behind them, of those that have enough."""
    digest, data = xxhash.xxh3_64_intdigest, memoryview(_little_endian(tokens)).cast("B")
    ahead_bytes = TOKEN_BYTES * ahead_tokens
    starts = range(TOKEN_BYTES * block_tokens, len(data) - ahead_bytes + 1, TOKEN_BYTES * block_tokens)
    return hash_array([digest(data[at : at + ahead_bytes], known) for known, at in zip(hashes, starts, strict=False)])


def hashes_ahead(prefix: PromptPrefix, hashes: Sequence[BlockHash], ahead_tokens: int) -> Sequence[BlockHash]:
    """Those of a prompt, which has these hashes without the tokens behind each block."""
    if not ahead_tokens:
        return hashes
    return hash_ahead(hashes, token_array(prefix.tokens), prefix.block_size_tokens, ahead_tokens)


def hash_rest(known: array[int], rest: array[int], block_size_tokens: int, seed: BlockHash) -> array[int]:
    """Hashes of all full blocks: extends `known`, the first ones, with those of the tokens behind them."""
    known.extend(hash_blocks(rest, block_size_tokens, known[-1] if known else seed))
    return known


def picture_token(identifier: Any, placeholder: int) -> int:
    """What is hashed in place of the first token of a picture: the others are equal for all pictures."""
    return xxhash.xxh32_intdigest(msgspec.msgpack.encode(identifier), placeholder)


def _little_endian(tokens: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return tokens
    swapped = array(_TOKEN_TYPE, tokens)
    swapped.byteswap()
    return swapped
