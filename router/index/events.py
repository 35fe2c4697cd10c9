"""Decodes KV event messages: bytes to values.

Engines differ by type and release: batches and events are arrays or maps, hashes are unsigned, signed or raw digests,
media have many spellings. These differences are handled here only. This file keeps no state between messages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from router.guards import Bound, OutOfBounds, checked
from router.hashing import picture_token
from router.types import AttentionKind, BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, LayerType, Tier

U64 = (1 << 64) - 1

PIECE_BLOCKS = 256
"""Blocks that the index applies in about half a millisecond."""
EVENT_COST = 4
"""An event takes as long as this number of blocks."""
MESSAGE = Bound("KV event message", 2 * 1024 * 1024, 16)
EVENTS = Bound("events of a KV message", MESSAGE.max_bytes, 50_000)
"""SGLang sends one for each page, which may be a token: those of a chunk of prefill."""
EVENT = Bound("KV event", 400 * 1024, 64)
"""vLLM sends one for all blocks of a step: those of 64 thousand tokens take 370 kB."""
MAX_GROUP = 1023
BLOCKS = Bound("blocks of a KV event", EVENT.max_bytes, 8192)
EXTRA_KEYS = Bound("extra keys of a KV event", EVENT.max_bytes, 2 * BLOCKS.max_items)

MAX_AHEAD = 8
"""Tokens behind a block that are read of those which its hash includes. Each number of them takes a lookup."""

T = TypeVar("T")
_Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_BATCH = msgspec.msgpack.Decoder(list[msgspec.Raw] | dict[str, msgspec.Raw])
_EVENTS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_EVENT = msgspec.msgpack.Decoder(dict[str, msgspec.Raw] | list[msgspec.Raw])
_Plain: TypeAlias = bool | int | float | str | None
_PLAIN = msgspec.msgpack.Decoder(_Plain)
_KEYS = msgspec.msgpack.Decoder(list[_Plain | list[_Plain]] | None)
_DECODERS: Mapping[str, msgspec.msgpack.Decoder[Any]] = {
    "block_hashes": msgspec.msgpack.Decoder(list[int | bytes]),
    "parent_block_hash": msgspec.msgpack.Decoder(int | bytes | None),
    "token_ids": msgspec.msgpack.Decoder(Annotated[list[int | list[int]], msgspec.Meta(max_length=1 << 17)] | None),
    "extra_keys": msgspec.msgpack.Decoder(list[msgspec.Raw] | None),
    "lookahead_token_ids": msgspec.msgpack.Decoder(list[tuple[_Token, ...]] | None),
}
"""Decoders of fields that are not plain. Without types, a field could be a map whose keys all have one hash."""

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
_SMALL_MAP = 0x80
"""A map of msgpack with at most 15 keys, in its first byte: SGLang's metadata behind an array, from 0.5.19 to maps."""
_IN_MAPS = ("cache_salt", "locality", "lookahead_token_ids")
"""Fields that only maps have."""

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

_KINDS: Mapping[str | None, AttentionKind] = {
    None: AttentionKind.FULL,
    "full_attention": AttentionKind.FULL,
    "mla_attention": AttentionKind.FULL,
    "sink_full_attention": AttentionKind.FULL,
    "sliding_window": AttentionKind.WINDOW,
    "sliding_window_mla": AttentionKind.WINDOW,
    "mamba": AttentionKind.STATE,
}
"""How groups of layers keep blocks. Others take no part in matching; that of chunked attention never shortens a hit by
more than a chunk, whose size is not announced."""


class UndecodableBatch(Exception):
    """The message is not a KV event batch."""


def parse_frames(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """(sequence, payload) of a live or replayed message; None for the end of a replay. Raises `UndecodableBatch`.

    Replays have a leading empty frame, and since vLLM 0.26 a topic; the last two frames are the same in every format.
    """
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise UndecodableBatch(f"{len(frames)} frames without an 8-byte sequence number")
    sequence = int.from_bytes(frames[-2], "big", signed=True)
    return None if sequence < 0 else (sequence, frames[-1])


def decode_events(payload: bytes) -> Iterator[KvEvent | None]:
    """The cache changes of one scheduler step, each decoded when it is asked for: None for one that cannot be indexed,
    of an unknown type or kind of attention. Raises `OutOfBounds` for more than is read of a pod, and `UndecodableBatch`
    for anything else."""
    try:
        batch = MESSAGE.msgpack(payload, _BATCH)
        raw_events = batch["events"] if isinstance(batch, dict) else batch[1]
        for raw in EVENTS.msgpack(memoryview(raw_events), _EVENTS):
            yield _event(_fields(EVENT.msgpack(memoryview(raw), _EVENT)))
    except OutOfBounds:
        raise
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise UndecodableBatch(f"not a KV event batch: {error}") from error


def split_events(events: Iterable[KvEvent | None]) -> Iterator[tuple[KvEvent, ...]]:
    """The events in batches of at most about `PIECE_BLOCKS` blocks, as which events count, too. A long event is split,
    because applying it at once would block requests for too long. An event of None costs time, too."""
    batch: list[KvEvent] = []
    cost = 0
    for event in events:
        for piece in _pieces(event) if event else (None,):
            if piece is not None:
                batch.append(piece)
            cost += EVENT_COST + (len(piece.block_hashes) if isinstance(piece, BlocksStored | BlocksRemoved) else 0)
            if cost >= PIECE_BLOCKS:
                yield tuple(batch)
                batch, cost = [], 0
    if batch:
        yield tuple(batch)


def _pieces(event: KvEvent) -> Iterator[KvEvent]:
    """The event, or its parts."""
    if isinstance(event, BlocksCleared) or len(event.block_hashes) <= PIECE_BLOCKS:
        yield event
        return
    for first in range(0, len(event.block_hashes), PIECE_BLOCKS):
        part = slice(first, first + PIECE_BLOCKS)
        hashes = event.block_hashes[part]
        if isinstance(event, BlocksRemoved):
            yield replace(event, block_hashes=hashes)
            continue
        tokens = event.tokens[first * event.block_size_tokens : (first + len(hashes)) * event.block_size_tokens]
        parent, behind = event.block_hashes[first - 1] if first else event.parent_hash, event.lookahead_tokens[part]
        yield replace(event, block_hashes=hashes, tokens=tokens, parent_hash=parent, lookahead_tokens=behind)


def _fields(raw: dict[str, msgspec.Raw] | list[msgspec.Raw]) -> Mapping[str, Any]:
    """The fields of a known type that are read; of another one its type only."""
    if isinstance(raw, list):
        kind, last = _PLAIN.decode(raw[0]), raw[-1]
        metadata = _EVENT.decode(last) if memoryview(last)[0] & 0xF0 == _SMALL_MAP else {}
        raw = dict(zip(_FIELDS.get(kind, ()), raw[1:-1] if metadata else raw[1:], strict=False)) | dict(metadata)
    else:
        kind = _PLAIN.decode(raw["type"]) if "type" in raw else None
    names = (*_FIELDS[kind], *_IN_MAPS) if kind in _FIELDS else ()
    return {"type": kind, **{name: _DECODERS.get(name, _PLAIN).decode(raw[name]) for name in names if name in raw}}


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
    extra_keys = [_keys(of_block) for of_block in fields.get("extra_keys") or ()]
    EXTRA_KEYS.check_items(sum(map(len, extra_keys)))
    kind = _KINDS.get(fields.get("kv_cache_spec_kind"))
    if kind is not AttentionKind.FULL:
        if not kind or not hashes or block_size <= 0:
            return None
        # A group that keeps some only: the event of full attention with the same hashes says which blocks they are.
        layers = LayerType(kind, block_size, _optional(fields, "kv_cache_spec_sliding_window", int) or 0)
        return BlocksStored(
            block_hashes=hashes, parent_hash=_parent(fields), tier=_tier(fields), group=_group(fields), layers=layers
        )
    behind = tuple([tokens[:MAX_AHEAD] for tokens in fields.get("lookahead_token_ids") or ()])
    if len(tokens) != block_size * len(hashes) or (behind and [*map(len, behind)] != [len(behind[0])] * len(hashes)):
        return None
    adapter = _adapter(fields)
    salt = _optional(fields, "cache_salt", str) or _salt(extra_keys, adapter)
    if extra_keys and any(extra_keys):
        _fold_media(tokens, extra_keys, block_size, (adapter, salt, ["cache_salt", salt]))
    return BlocksStored(
        block_hashes=hashes,
        parent_hash=_parent(fields),
        tokens=tokens,
        lookahead_tokens=behind if any(behind) else (),
        block_size_tokens=block_size,
        tier=_tier(fields),
        group=_group(fields),
        adapter=adapter,
        salt=salt,
    )


def _parent(fields: Mapping[str, Any]) -> int | None:
    parent = fields.get("parent_block_hash")
    return None if parent is None else _hash(parent)


def _optional(fields: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    value = fields.get(name)
    if value is None or isinstance(value, kind):
        return value
    raise TypeError(f"{name}: expected {kind.__name__}, got {value!r:.40}")


def _hashes(fields: Mapping[str, Any]) -> tuple[int, ...]:
    BLOCKS.check_items(len(fields["block_hashes"]))
    return tuple(_hash(value) for value in fields["block_hashes"])


def _hash(value: int | bytes) -> int:
    """A 64-bit hash from vLLM's unsigned int, SGLang's signed int or a raw digest."""
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value & U64


def _tokens(ids: list[Any]) -> array[int]:
    """32-bit token ids. EAGLE's bigram keys are pairs whose first element is the token."""
    return array("I", [pair[0] for pair in ids] if ids and isinstance(ids[0], list) else ids)


def _keys(of_block: msgspec.Raw) -> list[Any]:
    """The extra keys of a block. Of other types they are one key, which no prompt has."""
    try:
        return _KEYS.decode(of_block) or []
    except msgspec.ValidationError:
        return [bytes(of_block)]


def _group(fields: Mapping[str, Any]) -> int:
    return round(checked("group_idx", _optional(fields, "group_idx", int) or 0, 0, MAX_GROUP))


def _adapter(fields: Mapping[str, Any]) -> str:
    """The adapter's name; older engines send a number, which still separates its blocks from the base model's."""
    number = fields.get("lora_id")
    return _optional(fields, "lora_name", str) or (f"lora_id {number}" if number else "")


def _tier(fields: Mapping[str, Any]) -> Tier:
    if fields.get("locality") == "REMOTE":
        return Tier.REMOTE
    return _TIERS.get((_optional(fields, "medium", str) or "GPU").upper(), Tier.REMOTE)


def _salt(extra_keys: Any, adapter: str) -> str:
    """The cache salt, which vLLM adds to the first block only; tagged since 0.31."""
    for key in (extra_keys[0] or ()) if extra_keys else ():
        if isinstance(key, str) and key != adapter:
            return key
        if isinstance(key, list) and len(key) == 2 and key[0] == "cache_salt":
            return str(key[1])
    return ""


def _fold_media(tokens: array[int], extra_keys: Sequence[Any], block_size: int, known: Sequence[Any]) -> None:
    """Fold the extra keys of each block, which identify its pictures, into its tokens: these are equal for all pictures
    of one size, and their blocks are not. A key changes the token where its picture begins. Further blocks of the
    picture follow that one and differ by their parent. A key without a place changes the first token of the block.

    `known`: keys that are not folded, because the generation has them."""
    for start, keys in zip(range(0, len(tokens), block_size or 1), extra_keys, strict=False):
        for key in keys or ():
            if key not in known:
                identifier, offset = key if isinstance(key, list) and len(key) == 2 else (key, 0)
                if not isinstance(offset, int) or offset >= block_size:
                    identifier, offset = key, 0
                if offset >= 0:
                    tokens[start + offset] = picture_token(identifier, tokens[start + offset])
