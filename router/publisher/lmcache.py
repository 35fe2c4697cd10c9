"""Receives the events of LMCache servers, in the role of their coordinator.

`lmcache server --coordinator-url ... --coordinator-event-reporting` registers here, sends heartbeats and posts what it
stores and deletes. Each tier of each server is a holder, and so is each pool that servers share. Batches are numbered
per incarnation (start) of a server and cannot be requested again: after a gap, the holders stay incomplete until the
server restarts. Blocks stored before the first report stay unknown. Unlike LMCache's coordinator, this one never sends
requests to servers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import msgspec
import structlog
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from router.addresses import join_address
from router.feeds.kv_zmq import KvSink
from router.publisher.lmcache_chunks import ChunkTable, Entry
from router.stores.logged_once import LoggedOnce
from router.types import KvEvent, Tier

SERVER_TIMEOUT_S = 30.0
"""A server without messages for this time is removed. Servers send a heartbeat every five seconds."""

_DISKS = frozenset({"fs", "fs_native", "raw_block", "dax", "gds"})
"""Backends on the server's own machine; all others are remote."""

log = structlog.get_logger()


class TierSink(KvSink, Protocol):
    """Receives the events of holders. `restarted` adds a holder and is called before `apply` and `stream_state`."""

    def gone(self, holder: str) -> None:
        """The holder and its blocks are gone."""


# --- messages of servers (lmcache 0.5: v1/mp_coordinator/schemas.py, api.py) ---


class Batch(msgspec.Struct, frozen=True):
    """Changes of objects in one tier of one server, ordered within `(instance_id, incarnation)`."""

    instance_id: Annotated[str, msgspec.Meta(pattern="^[^/]+$")]
    incarnation: int
    seq: Annotated[int, msgspec.Meta(ge=1)]
    event_type: str
    tier: str
    backend: str
    entries: list[Entry] = []
    shared: bool = False


class Report(msgspec.Struct, frozen=True):
    batches: list[Batch] = []


class Registration(msgspec.Struct, frozen=True):
    ip: str
    http_port: int
    instance_id: Annotated[str, msgspec.Meta(pattern="^[^/]*$")] = ""


# --- the coordinator ---


@dataclass(slots=True)
class _Server:
    """One server. Without a registration, batches are accepted and heartbeats are refused."""

    last_seen_s: float
    registration: Registration | None = None
    incarnation: int = -1
    last_seq: int = 0
    complete: bool = True


class UnknownServer(Exception):
    """The server must register (again)."""


@dataclass(slots=True)
class Coordinator:
    """State of all servers. Takes decoded JSON bodies, returns responses and passes events to `sink`; raises
    `msgspec.ValidationError`.

    `model` as the servers spell it: the name or path that the engines loaded. Holders are `<server>` for its memory,
    `<server>/<backend>` for its other tiers, and `shared/<backend>`."""

    model: str
    sink: TierSink
    group: int = 0
    """The object group whose attention needs every chunk of a prefix, if servers separate attention groups."""
    _servers: dict[str, _Server] = field(default_factory=dict)
    _chunks: dict[str, ChunkTable] = field(default_factory=dict)
    _ignored: LoggedOnce = field(default_factory=LoggedOnce)

    def host_of(self, holder: str) -> str:
        """Host of the holder's server; "" for shared holders and unregistered servers."""
        server = self._servers.get(holder.partition("/")[0])
        return server.registration.ip if server and server.registration else ""

    def register(self, body: Any, now_s: float) -> dict[str, Any]:
        registration = msgspec.convert(body, Registration)
        name = registration.instance_id.strip() or f"mp-{join_address(registration.ip, registration.http_port)}"
        server = self._servers.setdefault(name, _Server(now_s))
        was_registered = server.registration is not None
        server.registration, server.last_seen_s = registration, now_s
        return {"instance_id": name, "re_registered": was_registered}

    def heartbeat(self, name: str, now_s: float) -> dict[str, Any]:
        """Handle `PUT /instances/{name}/heartbeat`. Raises `UnknownServer`."""
        server = self._servers.get(name)
        if server is None or server.registration is None:
            raise UnknownServer(name)
        server.last_seen_s = now_s
        return {"instance_id": name}

    def deregister(self, name: str) -> None:
        """Handle `DELETE /instances/{name}`: remove the server and the holders of its tiers."""
        if self._servers.pop(name, None):
            log.info("LMCache server removed", server=name)
            for holder in self._holders(name):
                del self._chunks[holder]
                self.sink.gone(holder)

    def instances(self) -> dict[str, Any]:
        known = ((name, server.registration) for name, server in self._servers.items())
        rows = [{**msgspec.to_builtins(row), "instance_id": name} for name, row in known if row]
        return {"instances": rows}

    def expire(self, now_s: float) -> None:
        for name in [name for name, server in self._servers.items() if now_s - server.last_seen_s > SERVER_TIMEOUT_S]:
            self.deregister(name)

    def events(self, body: Any, now_s: float) -> dict[str, int]:
        counts = {"applied": 0, "duplicates": 0, "stale": 0}
        for batch in msgspec.convert(body, Report).batches:
            server = self._servers.setdefault(batch.instance_id, _Server(now_s))
            server.last_seen_s = now_s
            outcome = self._check_order(server, batch)
            counts[outcome] += 1
            if outcome == "applied":
                self._apply(server, batch)
        return counts

    def _check_order(self, server: _Server, batch: Batch) -> str:
        """ "applied" for the next batch, else "stale" or "duplicates"."""
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
                self.sink.stream_state(holder, complete=False)
        server.last_seq = batch.seq
        return "applied"

    def _restart(self, server: _Server, batch: Batch) -> None:
        """Start a new incarnation: the server's memory is empty, its other tiers keep their chunks."""
        server.incarnation, server.last_seq, server.complete = batch.incarnation, 0, True
        if batch.instance_id in self._chunks:
            self._add_holder(batch.instance_id, Tier.CPU, complete=True)

    def _apply(self, server: _Server, batch: Batch) -> None:
        if batch.event_type == "access":
            for holder in self._holders(batch.instance_id):
                for entry in batch.entries:
                    self._chunks[holder].touch(entry.key)
        elif batch.backend and batch.tier in ("l1", "l2"):
            holder = _holder(batch)
            if holder not in self._chunks:
                self._add_holder(holder, _tier(batch), complete=server.complete)
            elif not server.complete:
                self.sink.stream_state(holder, complete=False)
            events = tuple(self._events(self._chunks[holder], batch))
            if events:
                self.sink.apply(holder, events)

    def _events(self, chunks: ChunkTable, batch: Batch) -> Iterator[KvEvent]:
        for entry in filter(self._is_published, batch.entries):
            if batch.event_type == "store":
                event = chunks.store(entry)
            else:
                event = chunks.delete(entry.key) if batch.event_type == "delete" else None
            if event is not None:
                yield event

    def _is_published(self, entry: Entry) -> bool:
        model = entry.key.model_name
        if model != self.model:
            self._ignored.warn("ignoring LMCache chunks of another model", model=model, published=self.model)
        return model == self.model and entry.key.object_group_id == self.group

    def _add_holder(self, holder: str, tier: Tier, *, complete: bool) -> None:
        self._chunks[holder] = ChunkTable(tier)
        self.sink.restarted(holder)
        self.sink.stream_state(holder, complete=complete)

    def _holders(self, name: str) -> list[str]:
        return [holder for holder in self._chunks if holder == name or holder.startswith(f"{name}/")]


def _holder(batch: Batch) -> str:
    if batch.shared:
        return f"shared/{batch.backend}"
    return batch.instance_id if batch.tier == "l1" else f"{batch.instance_id}/{batch.backend}"


def _tier(batch: Batch) -> Tier:
    if batch.tier == "l1" and batch.backend != "gds":
        return Tier.CPU
    return Tier.DISK if batch.backend in _DISKS and not batch.shared else Tier.REMOTE


# --- HTTP ---


def lmcache_routes(coordinator: Coordinator, clock: Callable[[], float] = time.monotonic) -> APIRouter:
    """The paths that servers call. Like LMCache's own, without authentication: keep them inside the cluster."""
    router = APIRouter()

    @router.post("/instances")
    async def register(request: Request) -> Response:
        return await _respond(request, lambda body: coordinator.register(body, clock()))

    @router.get("/instances")
    async def instances() -> dict[str, Any]:
        return coordinator.instances()

    @router.put("/instances/{name}/heartbeat")
    async def heartbeat(name: str) -> Response:
        try:
            return JSONResponse(coordinator.heartbeat(name, clock()))
        except UnknownServer:
            return JSONResponse({"error": f"unknown instance {name}; re-register"}, 404)

    @router.delete("/instances/{name}")
    async def deregister(name: str) -> Response:
        coordinator.deregister(name)
        return Response(status_code=204)

    @router.post("/events")
    async def events(request: Request) -> Response:
        return await _respond(request, lambda body: coordinator.events(body, clock()))

    return router


async def _respond(request: Request, handle: Callable[[Any], dict[str, Any]]) -> Response:
    try:
        return JSONResponse(handle(msgspec.json.decode(await request.body())))
    except msgspec.DecodeError as error:
        return JSONResponse({"detail": str(error)}, 422)


async def expire_servers(coordinator: Coordinator) -> None:
    """Remove servers that have stopped without deregistering. Runs until cancelled."""
    while True:
        await asyncio.sleep(SERVER_TIMEOUT_S / 10)
        coordinator.expire(time.monotonic())
