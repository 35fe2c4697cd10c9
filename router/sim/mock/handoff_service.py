"""How does a decode leg get the KV that a prefill leg has computed?

Over HTTP between the engines: the decode side asks `POST /_kv/take` (or `/_kv/probe`) of its peer, which holds the
answer back for as long as the transfer takes. No KV is sent, only what the receiver must know of it. This file never
words a dialect.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import TypeVar

import httpx
import msgspec
import xxhash

from router.sim.block_pool import PodBlockTable, chain_seed
from router.sim.mock.faults import DECODE_FAULTS, FaultBoard
from router.sim.mock.handoff_counters import HandoffCounters
from router.sim.mock.handoff_dialects import (
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
from router.sim.mock.http_exchange import ClientGone, HttpExchange
from router.sim.mock.mock_config import MockEngineConfig
from router.sim.mock.mock_requests import EngineError, GenerationRequest
from router.sim.mock.pinned_kv import PinnedKv, PinTable
from router.sim.mock.step_loop import StepLoop, TokenStream
from router.types import BlockHash

CONNECT_TIMEOUT_S = 5.0

_Body = TypeVar("_Body", bound=msgspec.Struct)


class _TakeBody(msgspec.Struct):
    """`cached_tokens` need no transfer."""

    key: str
    engine_id: str
    wait: bool
    cached_tokens: int


class _TakeAnswer(msgspec.Struct):
    digest: int
    tokens: int
    cached_tokens: int


class _ProbeBody(msgspec.Struct):
    """`cached_blocks` need no transfer."""

    hashes: list[BlockHash]
    cached_blocks: int


class _ProbeAnswer(msgspec.Struct):
    blocks: int


class HandoffService:
    """One engine's part in handoffs. `address` is where peers reach it, known once it listens."""

    def __init__(
        self, config: MockEngineConfig, steps: StepLoop, faults: FaultBoard, address: Callable[[], tuple[str, int]]
    ) -> None:
        self._config = config.handoff
        self._scale_s_per_ms = config.time_scale / 1000
        self._block_size_tokens = config.block_size_tokens
        self._steps = steps
        self._faults = faults
        self._address = address
        self._wire = dialect_of(config.handoff)
        self._client: httpx.AsyncClient | None = None
        self._engine_id = uuid.uuid4().hex
        self.counters = HandoffCounters()
        self.pins = PinTable(self._config.lease_s, self.counters)

    @property
    def here(self) -> PeerAddress:
        """Where peers reach this engine in this life."""
        return PeerAddress(*self._address(), self._engine_id)

    def restart(self) -> None:
        """A new life: nothing is kept, and nobody who knew the old one finds it."""
        self.pins.forget()
        self.counters = HandoffCounters()
        self.pins = PinTable(self._config.lease_s, self.counters)
        self._engine_id = uuid.uuid4().hex

    async def close(self) -> None:
        """Give the connections back."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def leg(self, ask: GenerationRequest, request_id: str) -> HandoffLeg:
        """Which part of a handoff is this request? Raises `EngineError` for what the engine would refuse."""
        wrong = self._wire.forbids.intersection(ask.handoff)
        if wrong:
            raise EngineError(HTTPStatus.BAD_REQUEST, f"Extra inputs are not permitted: {', '.join(sorted(wrong))}")
        return self._wire.leg(ask, request_id)

    def shown_cached_tokens(self, ask: GenerationRequest, reply: TokenStream, loaded: LoadedKv) -> int:
        """What usage says."""
        return self._wire.shown_cached_tokens(ask, reply.cached_tokens, loaded)

    # --- the decode side --------------------------------------------------------------------------------------

    async def receive(self, ask: GenerationRequest, leg: HandoffLeg) -> LoadedKv:
        """Wait for KV from elsewhere. `EngineError` where the engine fails without it."""
        table = PodBlockTable(ask.prompt, ask.adapter, ask.salt)
        cached_blocks = len(self._steps.pod.cache.match(table))
        counters = self.counters
        counters.receiving += 1
        try:
            async with asyncio.timeout(self._config.wait_s):
                if isinstance(leg, DecodeLeg):
                    return await self._take(ask, leg, cached_blocks * self._block_size_tokens)
                if isinstance(leg, PeerLookup):
                    return await self._probe(leg, table, cached_blocks)
                if isinstance(leg, StoreLookup):
                    return await self._read_store(table, cached_blocks)
                return LoadedKv()
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            return self._failed(error)
        finally:
            counters.receiving -= 1

    async def _take(self, ask: GenerationRequest, leg: DecodeLeg, cached_tokens: int) -> LoadedKv:
        if self._faults.strike(DECODE_FAULTS) is not None:
            raise httpx.TransportError("this engine was told to lose the KV of a decode leg")
        body = _TakeBody(leg.key, leg.engine_id, self._wire.waits, cached_tokens)
        answer = await self._post(f"{leg.url}/_kv/take", body)
        if answer.status_code == HTTPStatus.NOT_FOUND and self._wire.reads_blindly:
            return LoadedKv(len(ask.prompt), garbled=True)
        found = msgspec.json.decode(answer.raise_for_status().content, type=_TakeAnswer)
        return LoadedKv(found.tokens, found.digest != _digest(ask), found.cached_tokens)

    async def _probe(self, leg: PeerLookup, table: PodBlockTable, cached_blocks: int) -> LoadedKv:
        body = _ProbeBody(table.hashes, cached_blocks)
        answer = (await self._post(f"{leg.url}/_kv/probe", body)).raise_for_status()
        return LoadedKv(msgspec.json.decode(answer.content, type=_ProbeAnswer).blocks * self._block_size_tokens)

    async def _read_store(self, table: PodBlockTable, cached_blocks: int) -> LoadedKv:
        held = self._config.store.leading_blocks(table.hashes)
        if held > cached_blocks:
            await asyncio.sleep(self._transfer_s((held - cached_blocks) * self._block_size_tokens))
        return LoadedKv(held * self._block_size_tokens)

    def _failed(self, error: Exception) -> LoadedKv:
        self.counters.failed += 1
        if self._wire.recomputes:
            return LoadedKv()
        raise EngineError(HTTPStatus.INTERNAL_SERVER_ERROR, "Internal server error") from error

    async def _post(self, url: str, body: msgspec.Struct) -> httpx.Response:
        """Each on a connection of its own, so that none outlives the peer's life in which it was made."""
        if self._client is None:
            self._client = httpx.AsyncClient(
                verify=False,
                trust_env=False,
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
                limits=httpx.Limits(max_keepalive_connections=0),
            )
        return await self._client.post(url, content=msgspec.json.encode(body))

    # --- the prefill side -------------------------------------------------------------------------------------

    async def settle(
        self, exchange: HttpExchange, ask: GenerationRequest, leg: HandoffLeg, reply: TokenStream, *, keeps: bool
    ) -> HandoffFields:
        """A request is computed. If it was a prefill leg, its pinned blocks wait for others, unless it `keeps` none.

        What its answer says of that.
        """
        if isinstance(leg, StoreLookup):
            self._store(ask)
        if not isinstance(leg, PrefillLeg):
            return HandoffFields()
        if not keeps or not self._wire.offers(ask.answer.finish_reason):
            self._steps.cancel(reply)
            return self._wire.told(ask, None, self.here)
        kept = self._keep(ask, leg, reply)
        told = self._wire.told(ask, kept, self.here)
        if leg.awaits_delivery:
            await self._deliver(exchange, kept)
        return told

    def _keep(self, ask: GenerationRequest, leg: PrefillLeg, reply: TokenStream) -> PinnedKv:
        cache, table = self._steps.pod.cache, self._steps.pod.detach(reply.id)
        kept = PinnedKv(
            key=leg.key,
            digest=_digest(ask, garbled=table.garbled),
            tokens=table.computed_tokens,
            blocks=tuple(table.blocks),
            cached_tokens=reply.cached_tokens,
            release=partial(cache.release, table),
        )
        self.pins.keep(kept)
        return kept

    async def _deliver(self, exchange: HttpExchange, kept: PinnedKv) -> None:
        try:
            delivered = await exchange.unless_gone(_outcome(kept))
        except ClientGone:
            self.pins.drop(kept)
            raise
        if not delivered:
            raise EngineError(HTTPStatus.INTERNAL_SERVER_ERROR, "no decode leg came for this KV")

    def _store(self, ask: GenerationRequest) -> None:
        table = PodBlockTable(ask.prompt, ask.adapter, ask.salt)
        table.hash_up_to(len(ask.prompt) // self._block_size_tokens, self._block_size_tokens)
        self._config.store.put(table.hashes)

    # --- what peers and routers ask -----------------------------------------------------------------------------

    async def answer_take(self, exchange: HttpExchange) -> None:
        """`POST /_kv/take`: what is kept under a key, once, after its transfer; 404 where there is nothing."""
        asked = _read(await exchange.body(), _TakeBody)
        pins = self.pins
        if asked.engine_id not in ("", self._engine_id):
            raise EngineError(HTTPStatus.NOT_FOUND, "that was another life of this engine")
        kept = await exchange.unless_gone(pins.take(asked.key, wait=asked.wait))
        if kept is None:
            raise EngineError(HTTPStatus.NOT_FOUND, "nothing is kept under this key")
        try:
            await exchange.pause(self._transfer_s(max(0, kept.tokens - asked.cached_tokens)))
        finally:
            pins.free(kept)
        answer = _TakeAnswer(kept.digest, kept.tokens, kept.cached_tokens)
        await exchange.answer(HTTPStatus.OK, msgspec.json.encode(answer))

    async def answer_probe(self, exchange: HttpExchange) -> None:
        """`POST /_kv/probe`: how many of these blocks are cached here, after the time of their transfer."""
        asked = _read(await exchange.body(), _ProbeBody)
        held = self._steps.pod.cache.leading_blocks(asked.hashes)
        if held > asked.cached_blocks:
            await exchange.pause(self._transfer_s((held - asked.cached_blocks) * self._block_size_tokens))
        await exchange.answer(HTTPStatus.OK, msgspec.json.encode(_ProbeAnswer(held)))

    async def answer_query(self, exchange: HttpExchange) -> None:
        """`GET /query`: by data-parallel rank, who Mooncake's decode legs must ask for; there is one rank."""
        here = self.here
        worker = {"0": {"0": f"tcp://{here.host}:{here.port}"}}
        await exchange.answer(
            HTTPStatus.OK, msgspec.json.encode({"0": {"engine_id": here.engine_id, "worker_addr": worker}})
        )

    def _transfer_s(self, tokens: int) -> float:
        return self._config.link.transfer_ms(tokens * self._config.kv_bytes_per_token) * self._scale_s_per_ms


def _digest(ask: GenerationRequest, *, garbled: bool = False) -> int:
    """Of what decides a prompt's KV; of nothing that any prompt has where the KV is wrong already."""
    return 0 if garbled else xxhash.xxh3_64_intdigest(ask.prompt.tobytes(), chain_seed(ask.adapter, ""))


def _read(body: bytes, shape: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(HTTPStatus.BAD_REQUEST, str(error)) from error


async def _outcome(kept: PinnedKv) -> bool:
    return await kept.delivered
