"""Standardised KV events, which any cache tier may send: parses and publishes them.

The format is the JSON of RFC #1527 ("KV Events API Standardization", Mooncake's conductor). An event belongs to a
stream: a backend, and within it a tenant, rank, medium, adapter and salt. Event ids count per stream, and `cleared`
empties one stream, so the stream is the holder. Invalid events raise only `MalformedEvent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.publisher.publisher import StoreSink
from router.types import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier

U32 = (1 << 32) - 1
U64 = (1 << 64) - 1

_TIERS: Mapping[str, Tier] = {"gpu": Tier.GPU, "cpu": Tier.CPU, "disk": Tier.DISK}
"""The media named in the RFC; engines may send others."""

_DEFAULT_TENANT = "default"


class MalformedEvent(ValueError):
    """An invalid event. `field` is the invalid field; the message starts with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardEvent:
    """One event and its stream. `model` is "" and `dp_rank` None if the sender omits them."""

    holder: str
    event: KvEvent
    event_id: int
    """Consecutive per holder."""
    model: str
    backend: str
    tenant: str
    dp_rank: int | None


def parse_standard_event(fields: Any) -> StandardEvent:
    """Parse a decoded JSON object. Raises `MalformedEvent`."""
    if not isinstance(fields, Mapping):
        raise MalformedEvent("event", f"must be an object, not {_shown(fields)}")
    return StandardEvent(
        holder=_stream(fields),
        event=_event(fields),
        event_id=_required_integer(fields, "event_id", U64),
        model=_text(fields, "model_name"),
        backend=_text(fields, "backend_id"),
        tenant=_tenant(fields),
        dp_rank=_integer(fields, "dp_rank", U32),
    )


def _stream(fields: Mapping[str, Any]) -> str:
    """The holder's id: `worker-0/cpu`, with non-default dimensions in between as `name=value`."""
    backend = _text(fields, "backend_id")
    if not backend:
        raise MalformedEvent("backend_id", "is required")
    rank = _integer(fields, "dp_rank", U32)
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
    tokens = _integers(fields, "token_ids", U32)
    block_size = _integer(fields, "block_size", U32) or 0
    parent = _integer(fields, "parent_hash", U64)
    if tokens:
        if len(tokens) != block_size * len(hashes):
            reason = f"{len(tokens)} tokens do not match {len(hashes)} blocks of block_size {block_size}"
            raise MalformedEvent("token_ids", reason)
        if parent is None and _integer(fields, "base_block_idx", U32) != 0:
            raise MalformedEvent("parent_hash", "is required unless base_block_idx is 0")
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
    hashes = _integers(fields, "seq_hashes", U64)
    if not hashes:
        raise MalformedEvent("seq_hashes", "must contain at least one hash")
    return hashes


def _integers(fields: Mapping[str, Any], name: str, maximum: int) -> tuple[int, ...]:
    listed = fields.get(name)
    if listed is None:
        return ()
    if not isinstance(listed, list | tuple):
        raise MalformedEvent(name, f"must be a list, not {_shown(listed)}")
    return tuple(_checked_integer(name, value, maximum) for value in listed)


def _required_integer(fields: Mapping[str, Any], name: str, maximum: int) -> int:
    value = _integer(fields, name, maximum)
    if value is None:
        raise MalformedEvent(name, "is required")
    return value


def _integer(fields: Mapping[str, Any], name: str, maximum: int) -> int | None:
    value = fields.get(name)
    return None if value is None else _checked_integer(name, value, maximum)


def _checked_integer(name: str, value: Any, maximum: int) -> int:
    if type(value) is int and 0 <= value <= maximum:
        return value
    raise MalformedEvent(name, f"must be an integer from 0 to {maximum}, not {_shown(value)}")


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
    """An unknown medium counts as remote."""
    return _TIERS.get(_medium(fields), Tier.REMOTE)


def _shown(value: Any) -> str:
    """A value for an error message, shortened, as an event may be large; lists and objects by type only."""
    if isinstance(value, str):
        return repr(value[:40])
    short = value is None or isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 80)
    return repr(value) if short else type(value).__name__


class StandardIntake:
    """Publishes standardised events of the configured backends. Events may be repeated or lost on the way."""

    def __init__(self) -> None:
        self._sinks: dict[str, StoreSink] = {}
        self._last_id: dict[str, int] = {}

    def add(self, backend: str, sink: StoreSink) -> None:
        """Publish this backend's events to `sink`."""
        self._sinks[backend] = sink

    def apply(self, event: StandardEvent) -> bool:
        """Publish one event. False for a repeated one. Raises `MalformedEvent` for an unknown backend."""
        sink = self._sinks.get(event.backend)
        if sink is None:
            known = ", ".join(sorted(self._sinks)) or "none"
            raise MalformedEvent("backend_id", f"{event.backend!r} is not configured in publish.stores; known: {known}")
        if event.model and event.model != sink.model:
            raise MalformedEvent("model_name", f"{event.model!r} differs from this backend's model, {sink.model!r}")
        last = self._last_id.get(event.holder)
        if last is not None and event.event_id <= last:
            return False
        self._last_id[event.holder] = event.event_id
        if last is None:
            sink.stream_state(event.holder, complete=True)
        elif event.event_id > last + 1:
            sink.stream_state(event.holder, complete=False)
        if isinstance(event.event, BlocksCleared):
            sink.restarted(event.holder)
            sink.stream_state(event.holder, complete=True)
        else:
            sink.apply(event.holder, (event.event,))
        return True
