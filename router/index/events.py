"""What does this KV event message say?

Bytes to values. Engines differ by kind and release: batches and events as arrays or maps, hashes unsigned, signed or
raw digests, media in many spellings. All of it is told apart here and nowhere else (protocols.md section 1). This
file never remembers anything between two messages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from router.types import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier

U64 = (1 << 64) - 1

PIECE_BLOCKS = 256
"""Taken into the index in half a millisecond."""

T = TypeVar("T")

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""Field order of the array encoding (vLLM up to 0.23)."""

_TIERS: Mapping[str, Tier] = {
    "GPU": Tier.GPU,
    "CPU": Tier.CPU,
    "CPU_PINNED": Tier.CPU,
    "DRAM": Tier.CPU,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "SSD": Tier.DISK,
    "EXTERNAL": Tier.REMOTE,
    "REMOTE": Tier.REMOTE,
}

_DENSE_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of attention that need every block of a prefix. The others keep windows or states."""


class UndecodableBatch(Exception):
    """The message is not a KV event batch."""


@dataclass(frozen=True, slots=True)
class KvBatch:
    """One message: what one scheduler step changed."""

    dp_rank: int | None
    events: tuple[KvEvent, ...]
    skipped: int = 0
    """Events that cannot be indexed: of unknown type, or of attention groups whose blocks are no prefix."""


def parse_frames(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """(sequence, payload) of a live or replayed message; None for the end of a replay.

    Replays have a leading empty frame, and since vLLM 0.26 a topic: the last two frames are right in every shape.
    """
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise UndecodableBatch(f"{len(frames)} frames without a sequence number")
    sequence = int.from_bytes(frames[-2], "big", signed=True)
    return None if sequence < 0 else (sequence, frames[-1])


def decode_batch(payload: bytes) -> KvBatch:
    """A payload as values. Raises `UndecodableBatch`, never anything else."""
    try:
        batch = msgspec.msgpack.decode(payload)
        raw_events, dp_rank = _batch_parts(batch)
        if dp_rank is not None and not isinstance(dp_rank, int):
            raise TypeError(f"rank {dp_rank!r:.40}")
        decoded = [_event(_fields(raw)) for raw in raw_events]
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UndecodableBatch(f"not a KV event batch: {error}") from error
    events = tuple(event for event in decoded if event is not None)
    return KvBatch(dp_rank, events, skipped=len(decoded) - len(events))


def in_pieces(events: Iterable[KvEvent]) -> Iterator[tuple[KvEvent, ...]]:
    """The same events, as many at once as name some `PIECE_BLOCKS` blocks. A long prompt's one event becomes several:
    to take it in takes longer than requests may wait."""
    some: list[KvEvent] = []
    blocks = 0
    for event in events:
        for piece in _pieces(event):
            some.append(piece)
            blocks += 0 if isinstance(piece, BlocksCleared) else len(piece.block_hashes)
            if blocks >= PIECE_BLOCKS:
                yield tuple(some)
                some, blocks = [], 0
    if some:
        yield tuple(some)


def _pieces(event: KvEvent) -> Iterator[KvEvent]:
    if isinstance(event, BlocksCleared) or len(event.block_hashes) <= PIECE_BLOCKS:
        yield event
        return
    for first in range(0, len(event.block_hashes), PIECE_BLOCKS):
        yield _piece(event, first)


def _piece(event: BlocksStored | BlocksRemoved, first: int) -> KvEvent:
    """The blocks from `first` on."""
    hashes = event.block_hashes[first : first + PIECE_BLOCKS]
    if isinstance(event, BlocksRemoved):
        return replace(event, block_hashes=hashes)
    size = event.block_size_tokens
    tokens = event.tokens[first * size : (first + len(hashes)) * size]
    parent = event.block_hashes[first - 1] if first else event.parent_hash
    return replace(event, block_hashes=hashes, tokens=tokens, parent_hash=parent)


def _batch_parts(batch: Any) -> tuple[list[Any], Any]:
    if isinstance(batch, dict):
        return batch["events"], batch.get("data_parallel_rank")
    return batch[1], batch[2] if len(batch) > 2 else None


def _fields(raw: Any) -> Mapping[str, Any]:
    if isinstance(raw, dict):
        return raw
    kind = raw[0]
    return {"type": kind, **dict(zip(_FIELDS.get(kind, ()), raw[1:], strict=False))}


def _event(fields: Mapping[str, Any]) -> KvEvent | None:
    kind = fields.get("type")
    if kind == "BlockStored":
        return _stored(fields)
    if kind == "BlockRemoved":
        return BlocksRemoved(block_hashes=_hashes(fields), tier=_tier(fields), group=_group(fields))
    return BlocksCleared() if kind == "AllBlocksCleared" else None


def _stored(fields: Mapping[str, Any]) -> BlocksStored | None:
    hashes = _hashes(fields)
    tokens = _tokens(fields.get("token_ids") or [])
    block_size = _optional(fields, "block_size", int) or 0
    if fields.get("kv_cache_spec_kind") not in _DENSE_KINDS or len(tokens) != block_size * len(hashes):
        return None
    parent = fields.get("parent_block_hash")
    adapter = _adapter(fields)
    return BlocksStored(
        block_hashes=hashes,
        parent_hash=None if parent is None else _hash(parent),
        tokens=tokens,
        block_size_tokens=block_size,
        tier=_tier(fields),
        group=_group(fields),
        adapter=adapter,
        salt=_optional(fields, "cache_salt", str) or _salt(fields.get("extra_keys"), adapter),
    )


def _optional(fields: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    value = fields.get(name)
    if value is None or isinstance(value, kind):
        return value
    raise TypeError(f"{name} is no {kind.__name__}: {value!r:.40}")


def _hashes(fields: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(_hash(value) for value in fields["block_hashes"])


def _hash(value: int | bytes) -> int:
    """vLLM's unsigned int, SGLang's signed int or a raw digest, in one 64-bit space."""
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value & U64


def _tokens(ids: list[Any]) -> Sequence[int]:
    """32-bit ids, as hashing reads them. EAGLE's bigram keys come as pairs, of which the first is the token."""
    return array("I", [pair[0] for pair in ids] if ids and isinstance(ids[0], list) else ids)


def _group(fields: Mapping[str, Any]) -> int:
    return _optional(fields, "group_idx", int) or 0


def _adapter(fields: Mapping[str, Any]) -> str:
    """Older engines name an adapter by a number of their own: enough to tell its blocks from the base model's."""
    number = fields.get("lora_id")
    return _optional(fields, "lora_name", str) or (f"lora_id {number}" if number else "")


def _tier(fields: Mapping[str, Any]) -> Tier:
    if fields.get("locality") == "REMOTE":
        return Tier.REMOTE
    return _TIERS.get((_optional(fields, "medium", str) or "GPU").upper(), Tier.REMOTE)


def _salt(extra_keys: Any, adapter: str) -> str:
    """The cache salt, which vLLM mixes into the first block only; bare, or tagged since 0.31."""
    for key in (extra_keys[0] or ()) if extra_keys else ():
        if isinstance(key, str) and key != adapter:
            return key
        if isinstance(key, list) and len(key) == 2 and key[0] == "cache_salt":
            return str(key[1])
    return ""
