"""Standardised KV events, which any cache tier may send: parses and publishes them.

The format is the JSON of RFC #1527 ("KV Events API Standardization", Mooncake's conductor). An event belongs to a
stream: a backend, and within it a tenant, rank, medium, adapter and salt. Event ids count per stream, and `cleared`
empties one stream, so the stream is the holder. Invalid events raise only `MalformedEvent`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from router.publisher.publisher import StoreSink
from router.types import MAX_NAME_CHARACTERS, BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier

_TIERS = {"gpu": Tier.GPU, "cpu": Tier.CPU, "disk": Tier.DISK}
"""The media named in the RFC; engines may send others, which count as remote."""


MAX_STREAMS = 4096
"""The bound over all backends. Each stream is a holder, with a task and metrics of its own."""


class MalformedEvent(ValueError):
    """An invalid event. `field` is the invalid field; the message starts with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardEvent:
    """One event and its stream. `model` is "" if the sender omits it."""

    holder: str
    event: KvEvent
    event_id: int
    """Consecutive per holder."""
    model: str
    backend: str


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable text")
    return text


_Text = Annotated[str, AfterValidator(_printable), Field(max_length=MAX_NAME_CHARACTERS)]
U32 = Annotated[int, Field(ge=0, lt=1 << 32)]
U64 = Annotated[int, Field(ge=0, lt=1 << 64)]


class _Fields(BaseModel):
    """The fields of an event as sent; null is like a missing field."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    event_type: Literal["stored", "removed", "cleared"]
    event_id: U64
    backend_id: Annotated[_Text, Field(min_length=1)]
    model_name: _Text | None = None
    tenant_id: _Text | None = None
    medium: _Text | None = None
    dp_rank: U32 | None = None
    lora_name: _Text | None = None
    additional_salt: _Text | None = None
    block_size: U32 | None = None
    seq_hashes: list[U64] | None = None
    base_block_idx: U32 | None = None
    parent_hash: U64 | None = None
    token_ids: list[U32] | None = None


def parse_standard_event(fields: Any) -> StandardEvent:
    """Parse a decoded JSON object. Raises `MalformedEvent`."""
    if not isinstance(fields, dict):
        raise MalformedEvent("event", "must be a JSON object")
    try:
        given = _Fields.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise MalformedEvent(str(first["loc"][0]), first["msg"].removeprefix("Value error, ")) from error
    return StandardEvent(
        holder=_stream(given),
        event=_event(given),
        event_id=given.event_id,
        model=given.model_name or "",
        backend=given.backend_id,
    )


def _stream(fields: _Fields) -> str:
    """The holder's id: `worker-0/cpu`, with non-default dimensions in between as `name=value`."""
    dimensions = {
        "tenant": "" if fields.tenant_id == "default" else fields.tenant_id,
        "dp_rank": "" if fields.dp_rank is None else str(fields.dp_rank),
        "lora": fields.lora_name,
        "salt": fields.additional_salt,
    }
    named = [f"{name}={value}" for name, value in dimensions.items() if value]
    return "/".join([fields.backend_id, *named, _medium(fields)])


def _medium(fields: _Fields) -> str:
    return (fields.medium or "gpu").lower()


def _event(fields: _Fields) -> KvEvent:
    if fields.event_type == "cleared":
        return BlocksCleared()
    hashes, tier = tuple(fields.seq_hashes or ()), _TIERS.get(_medium(fields), Tier.REMOTE)
    if not hashes:
        raise MalformedEvent("seq_hashes", "must contain at least one hash")
    if fields.event_type == "removed":
        return BlocksRemoved(block_hashes=hashes, tier=tier)
    tokens, block_size = tuple(fields.token_ids or ()), fields.block_size or 0
    if tokens and len(tokens) != block_size * len(hashes):
        reason = f"{len(tokens)} tokens do not match {len(hashes)} blocks of block_size {block_size}"
        raise MalformedEvent("token_ids", reason)
    if tokens and fields.parent_hash is None and fields.base_block_idx != 0:
        raise MalformedEvent("parent_hash", "is required unless base_block_idx is 0")
    return BlocksStored(
        block_hashes=hashes,
        parent_hash=fields.parent_hash,
        tokens=tokens,
        block_size_tokens=block_size if tokens else 0,
        tier=tier,
        adapter=fields.lora_name or "",
        salt=fields.additional_salt or "",
    )


class StandardIntake:
    """Publishes standardised events of the configured backends. Events may be repeated or lost on the way."""

    def __init__(self) -> None:
        self._sinks: dict[str, StoreSink] = {}
        self._last_id: dict[str, int] = {}

    def add(self, backend: str, sink: StoreSink) -> None:
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
        if last is None and len(self._last_id) >= MAX_STREAMS:
            raise MalformedEvent("backend_id", f"more than {MAX_STREAMS} streams (tenants, ranks, media, adapters)")
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
