"""What do LMCache servers hold?

Plays the coordinator that `lmcache server --coordinator-url ... --coordinator-event-reporting` reports to: servers
register, send heartbeats, and post what they store and delete. Each tier of each server is a holder, and each pool that
servers share is one. Batches are numbered within an incarnation of a server, but nobody can ask for them again: what is
missing stays missing until the server restarts, and what it held before it first reported stays unknown. This file asks
the servers nothing, never steers them as LMCache's own coordinator does, and knows neither clock nor socket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import msgspec
import structlog

from router.feeds.kv_zmq import KvSink
from router.publisher.lmcache_chunks import ChunkTable, Entry
from router.types import KvEvent, Tier

SILENT_FOR_S = 30.0
"""A server that is not heard of for this long is gone. It sends a heartbeat every five seconds."""

_DISKS = frozenset({"fs", "fs_native", "raw_block", "dax", "gds"})
"""Backends on the server's own machine. All others are elsewhere."""

log = structlog.get_logger()


class TierSink(KvSink, Protocol):
    """Who is told. `restarted` is also how a holder is first heard of; `apply` and `stream_state` follow it."""

    def gone(self, holder: str) -> None:
        """The holder is no longer there, with all that it had."""


# --- what servers send (lmcache 0.5: v1/mp_coordinator/schemas.py, api.py) ---


class Batch(msgspec.Struct, frozen=True):
    """What happened to some objects in one tier of one server, in order within `(instance_id, incarnation)`."""

    instance_id: Annotated[str, msgspec.Meta(pattern="^[^/]+$")]
    incarnation: int
    seq: Annotated[int, msgspec.Meta(ge=1)]
    event_type: str
    tier: str
    backend: str
    entries: list[Entry] = []
    shared: bool = False


class Report(msgspec.Struct, frozen=True):
    """Body of `POST /events`."""

    batches: list[Batch] = []


class Registration(msgspec.Struct, frozen=True):
    """Body of `POST /instances`."""

    ip: str
    http_port: int
    instance_id: Annotated[str, msgspec.Meta(pattern="^[^/]*$")] = ""


# --- all servers ---


@dataclass(slots=True)
class _Server:
    """One server. Its stream of batches goes on without a registration; heartbeats do not."""

    last_seen_s: float
    registration: Registration | None = None
    incarnation: int = -1
    last_seq: int = 0
    complete: bool = True


class UnknownServer(Exception):
    """The server must register (again)."""


@dataclass(slots=True)
class Coordinator:
    """What LMCache servers take for their coordinator: decoded JSON in, answers out, events to `sink`.

    `model` as the servers spell it: what the engines were given to load, often a path. Raises `msgspec.ValidationError`
    with the path of what is wrong. Holders are `<server>` for its memory, `<server>/<backend>` for other tiers of it,
    and `shared/<backend>`."""

    model: str
    sink: TierSink
    group: int = 0
    """The group of objects that needs every chunk of a prefix, where servers keep attention groups apart."""
    _servers: dict[str, _Server] = field(default_factory=dict)
    _shelves: dict[str, ChunkTable] = field(default_factory=dict)
    _passed_over: set[str] = field(default_factory=set)
    """Other models that servers spoke of."""

    def host_of(self, holder: str) -> str:
        """Where the holder's server runs; "" for shared holders and servers that have not registered."""
        server = self._servers.get(holder.partition("/")[0])
        return server.registration.ip if server and server.registration else ""

    def register(self, body: Any, now_s: float) -> dict[str, Any]:
        """`POST /instances`."""
        registration = msgspec.convert(body, Registration)
        name = registration.instance_id.strip() or f"mp-{registration.ip}:{registration.http_port}"
        server = self._servers.setdefault(name, _Server(now_s))
        again = server.registration is not None
        server.registration, server.last_seen_s = registration, now_s
        return {"instance_id": name, "re_registered": again}

    def heartbeat(self, name: str, now_s: float) -> dict[str, Any]:
        """`PUT /instances/{name}/heartbeat`. Raises `UnknownServer`."""
        server = self._servers.get(name)
        if server is None or server.registration is None:
            raise UnknownServer(name)
        server.last_seen_s = now_s
        return {"instance_id": name}

    def deregister(self, name: str) -> None:
        """`DELETE /instances/{name}`: it takes its tiers with it, whether it said goodbye or not."""
        if self._servers.pop(name, None):
            log.info("LMCache server gone", server=name)
            for holder in self._holders(name):
                del self._shelves[holder]
                self.sink.gone(holder)

    def instances(self) -> dict[str, Any]:
        """`GET /instances`."""
        known = ((name, server.registration) for name, server in self._servers.items())
        rows = [{**msgspec.to_builtins(row), "instance_id": name} for name, row in known if row]
        return {"instances": rows}

    def expire(self, now_s: float) -> None:
        """Servers that were not heard of for `SILENT_FOR_S` are gone."""
        for name in [name for name, server in self._servers.items() if now_s - server.last_seen_s > SILENT_FOR_S]:
            self.deregister(name)

    def events(self, body: Any, now_s: float) -> dict[str, int]:
        """`POST /events`."""
        counts = {"applied": 0, "duplicates": 0, "stale": 0}
        for batch in msgspec.convert(body, Report).batches:
            server = self._servers.setdefault(batch.instance_id, _Server(now_s))
            server.last_seen_s = now_s
            verdict = self._admit(server, batch)
            counts[verdict] += 1
            if verdict == "applied":
                self._apply(server, batch)
        return counts

    def _admit(self, server: _Server, batch: Batch) -> str:
        if batch.incarnation < server.incarnation:
            return "stale"
        if batch.incarnation > server.incarnation:
            self._restart(server, batch)
        elif batch.seq <= server.last_seq:
            return "duplicates"
        if batch.seq > server.last_seq + 1 and server.complete:
            log.warning("LMCache events lost", server=batch.instance_id, first=server.last_seq + 1, until=batch.seq - 1)
            server.complete = False
            for holder in self._holders(batch.instance_id):
                self._mark(holder, complete=False)
        server.last_seq = batch.seq
        return "applied"

    def _restart(self, server: _Server, batch: Batch) -> None:
        """Its memory is empty; what it wrote elsewhere is still there."""
        server.incarnation, server.last_seq, server.complete = batch.incarnation, 0, True
        memory = self._shelves.get(batch.instance_id)
        if memory is not None:
            self._open(batch.instance_id, Tier.CPU, complete=True)

    def _apply(self, server: _Server, batch: Batch) -> None:
        if batch.event_type == "access":
            self._touch(batch)
        elif batch.backend and batch.tier in ("l1", "l2"):
            holder = _holder(batch)
            if holder not in self._shelves:
                self._open(holder, _tier(batch), complete=server.complete)
            elif not server.complete:
                self._mark(holder, complete=False)
            told = tuple(self._changes(self._shelves[holder], batch))
            if told:
                self.sink.apply(holder, told)

    def _changes(self, shelf: ChunkTable, batch: Batch) -> Iterator[KvEvent]:
        for entry in batch.entries:
            if not self._ours(entry):
                continue
            event = shelf.store(entry) if batch.event_type == "store" else None
            if batch.event_type == "delete":
                event = shelf.delete(entry.key)
            if event is not None:
                yield event

    def _ours(self, entry: Entry) -> bool:
        model = entry.key.model_name
        if model != self.model and model not in self._passed_over:
            self._passed_over.add(model)
            log.info("LMCache chunks of a model that is not published", model=model, published=self.model)
        return model == self.model and entry.key.object_group_id == self.group

    def _touch(self, batch: Batch) -> None:
        for holder in self._holders(batch.instance_id):
            for entry in batch.entries:
                self._shelves[holder].touch(entry.key)

    def _open(self, holder: str, tier: Tier, *, complete: bool) -> None:
        shelf = self._shelves[holder] = ChunkTable(tier)
        shelf.complete = complete
        self.sink.restarted(holder)
        self.sink.stream_state(holder, complete=complete)

    def _mark(self, holder: str, *, complete: bool) -> None:
        shelf = self._shelves[holder]
        if shelf.complete is not complete:
            shelf.complete = complete
            self.sink.stream_state(holder, complete=complete)

    def _holders(self, name: str) -> list[str]:
        return [holder for holder in self._shelves if holder == name or holder.startswith(f"{name}/")]


def _holder(batch: Batch) -> str:
    if batch.shared:
        return f"shared/{batch.backend}"
    return batch.instance_id if batch.tier == "l1" else f"{batch.instance_id}/{batch.backend}"


def _tier(batch: Batch) -> Tier:
    if batch.tier == "l1" and batch.backend != "gds":
        return Tier.CPU
    return Tier.DISK if batch.backend in _DISKS and not batch.shared else Tier.REMOTE
