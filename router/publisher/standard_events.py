"""What does this standardised KV event say?

The JSON of RFC #1527 ("KV Events API Standardization", Mooncake's conductor), for cache tiers that have no source of
their own: any program may send these. One event is about one *stream*: a backend, and within it a tenant, rank, medium,
adapter and salt; `cleared` empties that and nothing else, and event ids count within it. The stream is therefore the
holder. Whatever is not as the RFC has it raises `MalformedEvent`, never anything else. This file remembers nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.types import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier

U32 = (1 << 32) - 1
U64 = (1 << 64) - 1

_TIERS: Mapping[str, Tier] = {"gpu": Tier.GPU, "cpu": Tier.CPU, "disk": Tier.DISK}
"""The media that the RFC names; engines may add others."""

_DEFAULT_TENANT = "default"


class MalformedEvent(ValueError):
    """Not a standardised event. `field` is what is wrong with it; the message begins with that."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardEvent:
    """One event and where it belongs. `model` is "" and `dp_rank` None where the sender does not say."""

    holder: str
    event: KvEvent
    event_id: int
    """One more than that of the holder's event before."""
    model: str
    backend: str
    tenant: str
    dp_rank: int | None


def parse_standard_event(fields: Any) -> StandardEvent:
    """A decoded JSON object as a value. Raises `MalformedEvent`."""
    if not isinstance(fields, Mapping):
        raise MalformedEvent("event", f"must be an object, not {_shown(fields)}")
    return StandardEvent(
        holder=_stream(fields),
        event=_event(fields),
        event_id=_required_whole(fields, "event_id", U64),
        model=_text(fields, "model_name"),
        backend=_text(fields, "backend_id"),
        tenant=_tenant(fields),
        dp_rank=_whole(fields, "dp_rank", U32),
    )


def _stream(fields: Mapping[str, Any]) -> str:
    """`worker-0/cpu`; what differs from the default stands in between as `name=value`."""
    backend = _text(fields, "backend_id")
    if not backend:
        raise MalformedEvent("backend_id", "is needed")
    rank = _whole(fields, "dp_rank", U32)
    tenant = _tenant(fields)
    dimensions = {
        "tenant": "" if tenant == _DEFAULT_TENANT else tenant,
        "dp_rank": "" if rank is None else str(rank),
        "lora": _text(fields, "lora_name"),
        "salt": _text(fields, "additional_salt"),
    }
    named = [f"{name}={value}" for name, value in dimensions.items() if value]
    return "/".join([backend, *named, _medium(fields)])


def _event(fields: Mapping[str, Any]) -> KvEvent:
    kind = fields.get("event_type")
    if kind == "stored":
        return _stored(fields)
    if kind == "removed":
        return BlocksRemoved(block_hashes=_hashes(fields), tier=_tier(fields))
    if kind == "cleared":
        return BlocksCleared()
    raise MalformedEvent("event_type", f"must be stored, removed or cleared, not {_shown(kind)}")


def _stored(fields: Mapping[str, Any]) -> BlocksStored:
    hashes = _hashes(fields)
    tokens = _numbers(fields, "token_ids", U32)
    block_size = _whole(fields, "block_size", U32) or 0
    parent = _whole(fields, "parent_hash", U64)
    if tokens:
        if len(tokens) != block_size * len(hashes):
            wrong = f"{len(tokens)} tokens are not {len(hashes)} blocks of block_size {block_size}"
            raise MalformedEvent("token_ids", wrong)
        if parent is None and _whole(fields, "base_block_idx", U32) != 0:
            raise MalformedEvent("parent_hash", "is needed, unless base_block_idx is 0")
    return BlocksStored(
        block_hashes=hashes,
        parent_hash=parent,
        tokens=tokens,
        block_size_tokens=block_size if tokens else 0,
        tier=_tier(fields),
        adapter=_text(fields, "lora_name"),
        salt=_text(fields, "additional_salt"),
    )


def _hashes(fields: Mapping[str, Any]) -> tuple[int, ...]:
    hashes = _numbers(fields, "seq_hashes", U64)
    if not hashes:
        raise MalformedEvent("seq_hashes", "must list at least one")
    return hashes


def _numbers(fields: Mapping[str, Any], name: str, most: int) -> tuple[int, ...]:
    listed = fields.get(name)
    if listed is None:
        return ()
    if not isinstance(listed, list | tuple):
        raise MalformedEvent(name, f"must be a list, not {_shown(listed)}")
    return tuple(_number(name, value, most) for value in listed)


def _required_whole(fields: Mapping[str, Any], name: str, most: int) -> int:
    value = _whole(fields, name, most)
    if value is None:
        raise MalformedEvent(name, "is needed")
    return value


def _whole(fields: Mapping[str, Any], name: str, most: int) -> int | None:
    value = fields.get(name)
    return None if value is None else _number(name, value, most)


def _number(name: str, value: Any, most: int) -> int:
    if type(value) is int and 0 <= value <= most:
        return value
    raise MalformedEvent(name, f"must be whole and from 0 to {most}, not {_shown(value)}")


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if isinstance(value, str) and value.isprintable():
        return value
    raise MalformedEvent(name, f"must be printable text, not {_shown(value)}")


def _tenant(fields: Mapping[str, Any]) -> str:
    return _text(fields, "tenant_id") or _DEFAULT_TENANT


def _medium(fields: Mapping[str, Any]) -> str:
    return (_text(fields, "medium") or "gpu").lower()


def _tier(fields: Mapping[str, Any]) -> Tier:
    """A medium that is not known here counts as the farthest."""
    return _TIERS.get(_medium(fields), Tier.REMOTE)


def _shown(value: Any) -> str:
    """Its beginning, as an event may be wrong by a megabyte; of what could be long in other ways, only the kind."""
    if isinstance(value, str):
        return repr(value[:40])
    short = value is None or isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 80)
    return repr(value) if short else type(value).__name__
