"""Transfers KV between mock engines: a decode leg loads what a prefill leg computed.

Over HTTP: the decode engine sends `POST /_kv/take` (or `/_kv/lookup`) to its peer, which delays the response by the
transfer time. No KV is sent, only its description.
"""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from itertools import takewhile

import msgspec
import xxhash

from loadtest.engine_model.block_pool import PodBlockTable, chain_seed
from loadtest.mock_engine.faults import FaultBoard, FaultKind
from loadtest.mock_engine.handoff_dialects import (
    NO_HANDOFF_FIELDS,
    DecodeLeg,
    HandoffFields,
    HandoffLeg,
    LoadedKv,
    PeerAddress,
    PeerLookup,
    PrefillLeg,
    StoreLookup,
    dialect_of,
)
from loadtest.mock_engine.http_exchange import HttpExchange
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_requests import EngineError, GenerationRequest, decode_body
from loadtest.mock_engine.pinned_kv import HandoffCounters, PinnedKv, PinTable
from loadtest.mock_engine.step_loop import StepLoop, TokenStream
from router.addresses import join_address
from router.config.schema import Limits
from router.errors import UpstreamBroken, UpstreamError
from router.frontends.http.headers import request_message
from router.frontends.http.relay import read_all
from router.frontends.http.upstream import UpstreamPool
from router.types import BlockHash

CONNECT_TIMEOUT_S = 5.0


class _TakeBody(msgspec.Struct):
    """Request for the KV of the prompt with this digest. Its first `cached_tokens` need no transfer."""

    key: str
    digest: int
    engine_id: str
    wait: bool
    cached_tokens: int


class _LookupBody(msgspec.Struct):
    """Request for the leading blocks of these. The first `cached_blocks` need no transfer."""

    hashes: list[BlockHash]
    cached_blocks: int


class HandoffService:
    """Handoffs of one engine. `listen_address` returns its host and port for peers once it listens."""

    def __init__(
        self,
        config: MockEngineConfig,
        steps: StepLoop,
        faults: FaultBoard,
        listen_address: Callable[[], tuple[str, int]],
    ) -> None:
        self._config = config.handoff
        self._scale_s_per_ms = config.time_scale / 1000
        self.slowdown = 1.0
        """Factor on the time of each transfer that begins from now on."""
        self._block_size_tokens = config.block_size_tokens
        self._steps = steps
        self._faults = faults
        self._listen_address = listen_address
        self.dialect = dialect_of(config.handoff)
        self._limits = Limits(
            connect_timeout_s=CONNECT_TIMEOUT_S,
            first_byte_timeout_s=config.handoff.wait_s,
            idle_timeout_s=config.handoff.wait_s,
        )
        self._new_epoch()

    def _new_epoch(self) -> None:
        self._engine_id = uuid.uuid4().hex
        self.counters = HandoffCounters()
        self.pins = PinTable(self._config.lease_s, self.counters)
        self._offloaded: set[BlockHash] = set()
        """For `p2p` without answers: the blocks of prompts, which alone are offloaded."""

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(*self._listen_address(), self._engine_id)

    def restart(self) -> None:
        """Start a new epoch: no KV is held, and the old engine id is invalid."""
        self.pins.clear()
        self._new_epoch()

    def leg(self, request: GenerationRequest, engine_request_id: str) -> HandoffLeg:
        forbidden = self.dialect.forbidden_fields.intersection(request.handoff)
        if forbidden:
            raise EngineError(f"Extra inputs are not permitted: {', '.join(sorted(forbidden))}")
        return self.dialect.leg(request, engine_request_id)

    def offers(self, leg: HandoffLeg) -> bool:
        """Whether the KV of the answer is held for the next turn."""
        return self._config.bidirectional and isinstance(leg, DecodeLeg)

    # --- decode side ---

    async def release(self, offered: DecodeLeg) -> None:
        """Let the engine release the KV that it has offered, which only engines with the switch do."""
        if self._config.bidirectional:
            with suppress(UpstreamError, ValueError):
                await self._post(offered.url, b"/_kv/take", _TakeBody(offered.key, 0, "", False, 0))

    async def load(self, request: GenerationRequest, leg: HandoffLeg) -> LoadedKv:
        """Load KV from an engine or the store. Raises `EngineError` if that fails, unless the dialect recomputes."""
        table = PodBlockTable(request.prompt, request.adapter, request.salt)
        cached_blocks = len(self._steps.pod.cache.match(table))
        counters = self.counters
        counters.receiving += 1
        try:
            async with asyncio.timeout(self._config.wait_s):
                if isinstance(leg, DecodeLeg):
                    return await self._load_pinned(request, leg, cached_blocks * self._block_size_tokens)
                if isinstance(leg, PeerLookup):
                    asked = _LookupBody(table.hashes, cached_blocks)
                    return await self._post(leg.url, b"/_kv/lookup", asked)
                if isinstance(leg, StoreLookup):
                    return await self._load_from_store(table, cached_blocks)
                return LoadedKv()
        except (UpstreamError, ValueError, TimeoutError) as error:
            self.counters.failed += 1
            if self.dialect.recomputes:
                return LoadedKv()
            raise _internal_error() from error
        finally:
            counters.receiving -= 1

    async def _load_pinned(self, request: GenerationRequest, leg: DecodeLeg, cached_tokens: int) -> LoadedKv:
        if self._faults.take(FaultKind.LOAD_FAILS) is not None:
            raise UpstreamBroken("fault: load_fails")
        body = _TakeBody(leg.key, _digest(request), leg.engine_id, self.dialect.waits_for_prefill, cached_tokens)
        return await self._post(leg.url, b"/_kv/take", body)

    async def _load_from_store(self, table: PodBlockTable, cached_blocks: int) -> LoadedKv:
        held = stored_blocks(self._config.store, table.hashes)
        if held > cached_blocks:
            await asyncio.sleep(self._transfer_s((held - cached_blocks) * self._block_size_tokens))
        return LoadedKv(held * self._block_size_tokens)

    async def _post(self, url: str, path: bytes, body: msgspec.Struct) -> LoadedKv:
        """The peer's response. Each request has its own connection, so that none outlives an epoch of the peer. Raises
        `UpstreamError`, and `ValueError` for an invalid URL or response."""
        pool = UpstreamPool(url, url, self._limits)
        message = request_message("POST", path, pool.host_header, [], msgspec.json.encode(body))
        try:
            reply = await pool.exchange_once(lambda: message)
            content = await read_all(reply)
        finally:
            pool.close()
        if reply.status != HTTPStatus.OK:
            raise UpstreamBroken(f"{url}: status {reply.status}")
        return msgspec.json.decode(content, type=LoadedKv)

    # --- prefill side ---

    async def finish(self, request: GenerationRequest, leg: HandoffLeg, stream: TokenStream) -> HandoffFields:
        """Finish a computed request and return its response fields. Holds the KV of a prefill leg."""
        if isinstance(leg, StoreLookup):
            self._config.store.update(self._kept_hashes(request))
        elif self._config.dialect == "p2p" and not self._config.keeps_answers:
            self._offloaded.update(self._kept_hashes(request))
        if self.offers(leg):
            return self.dialect.fields(request, self._pin(request, request.id, stream, offer=True), self.address)
        if not isinstance(leg, PrefillLeg):
            return NO_HANDOFF_FIELDS
        if not self.dialect.holds_kv(request.output.finish_reason):
            self._steps.cancel(stream)
            return self.dialect.fields_without_kv
        pinned = self._pin(request, leg.key, stream)
        fields = self.dialect.fields(request, pinned, self.address)
        if leg.awaits_delivery:
            await self._await_delivery(pinned)
        return fields

    def _pin(self, request: GenerationRequest, key: str, stream: TokenStream, *, offer: bool = False) -> PinnedKv:
        cache, table = self._steps.pod.cache, self._steps.pod.detach(stream.id)
        pinned = PinnedKv(
            key=key,
            digest=_digest(request),
            tokens=table.computed_tokens,
            blocks=tuple(table.blocks),
            cached_tokens=stream.cached_tokens,
            release=partial(cache.release, table),
        )
        self.pins.add(pinned, self._config.offer_ttl_s if offer else None)
        return pinned

    async def _await_delivery(self, pinned: PinnedKv) -> None:
        try:
            if not await pinned.delivered:
                raise _internal_error("no decode leg took the KV")
        except asyncio.CancelledError:
            self.pins.drop(pinned)
            raise

    def _kept_hashes(self, request: GenerationRequest) -> list[BlockHash]:
        """The blocks that peers find: of an answer, all but its last token is computed."""
        answer = request.output.tokens[:-1] if self._config.keeps_answers else ()
        table = PodBlockTable(request.prompt + array("I", answer), request.adapter, request.salt)
        table.hash_up_to(len(table.tokens) // self._block_size_tokens, self._block_size_tokens)
        return table.hashes

    # --- endpoints for peers and routers ---

    async def handle_take(self, exchange: HttpExchange) -> None:
        """`POST /_kv/take`: the KV held under a key, after its transfer time; 404 if there is none."""
        body = decode_body(await exchange.body(), _TakeBody)
        pins = self.pins
        if body.engine_id not in ("", self._engine_id):
            raise EngineError(f"engine_id {body.engine_id} is of another epoch", status=HTTPStatus.NOT_FOUND)
        with exchange.cancelled_on_disconnect():
            pinned = await pins.take(body.key, wait=body.wait)
        if pinned is None:
            raise EngineError(f"no KV is held under key {body.key}", status=HTTPStatus.NOT_FOUND)
        try:
            if pinned.digest != body.digest:
                raise EngineError(f"the KV under key {body.key} is of another prompt", status=HTTPStatus.NOT_FOUND)
            await exchange.pause(self._transfer_s(max(0, pinned.tokens - body.cached_tokens)))
        finally:
            pins.free(pinned)
        await exchange.respond(HTTPStatus.OK, msgspec.json.encode(LoadedKv(pinned.tokens, pinned.cached_tokens)))

    async def handle_lookup(self, exchange: HttpExchange) -> None:
        """`POST /_kv/lookup`: the number of leading blocks cached here, after their transfer time."""
        body = decode_body(await exchange.body(), _LookupBody)
        held = self._steps.pod.cache.leading_blocks(body.hashes)
        if not self._config.keeps_answers:
            held = min(held, stored_blocks(self._offloaded, body.hashes))
        if held > body.cached_blocks:
            await exchange.pause(self._transfer_s((held - body.cached_blocks) * self._block_size_tokens))
        await exchange.respond(HTTPStatus.OK, msgspec.json.encode(LoadedKv(held * self._block_size_tokens)))

    async def handle_query(self, exchange: HttpExchange) -> None:
        """`GET /query`: Mooncake's bootstrap address by data-parallel rank; there is one rank."""
        address = self.address
        worker = {"0": {"0": f"tcp://{join_address(address.host, address.port)}"}}
        rank = {"engine_id": address.engine_id, "worker_addr": worker}
        await exchange.respond(HTTPStatus.OK, msgspec.json.encode({"0": rank}))

    def _transfer_s(self, tokens: int) -> float:
        kv_bytes = tokens * self._config.kv_bytes_per_token
        return self._config.link.transfer_ms(kv_bytes) * self._scale_s_per_ms * self.slowdown


def stored_blocks(store: Container[BlockHash], hashes: Iterable[BlockHash]) -> int:
    return len(list(takewhile(store.__contains__, hashes)))


def _digest(request: GenerationRequest) -> int:
    """Identifies the prompt that KV belongs to."""
    return xxhash.xxh3_64_intdigest(request.prompt.tobytes(), chain_seed(request.adapter, ""))


def _internal_error(message: str = "Internal server error") -> EngineError:
    return EngineError(message, status=HTTPStatus.INTERNAL_SERVER_ERROR)
