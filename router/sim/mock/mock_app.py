"""What does a mock engine answer to a request?

The ASGI application of one engine: vLLM's endpoints, `POST /_fault`, and the place where request faults strike. This
file never schedules and never shapes a body.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from itertools import count
from typing import Any, TypeAlias

import msgspec

from router.sim.mock import mock_responses as responses
from router.sim.mock.faults import PREFILL_FAULTS, REQUEST_FAULTS, Fault, FaultBoard, FaultKind
from router.sim.mock.handoff_dialects import HandoffFields, HandoffLeg, LoadedKv, PrefillLeg
from router.sim.mock.handoff_service import HandoffService
from router.sim.mock.http_exchange import EVENT_STREAM, JSON, ClientGone, HttpExchange
from router.sim.mock.mock_config import MockEngineConfig
from router.sim.mock.mock_metrics import CONTENT_TYPE, metrics_body
from router.sim.mock.mock_requests import EngineError, GenerationRequest, RequestParser
from router.sim.mock.step_loop import StepLoop, StreamLost, TokenStream
from router.sim.pod import SimRequest

_Handler: TypeAlias = Callable[[HttpExchange], Awaitable[None]]
_UNHEALTHY = frozenset({FaultKind.UNHEALTHY})


@dataclass(slots=True)
class _Call:
    """A generation inside the engine."""

    ask: GenerationRequest
    leg: HandoffLeg
    loaded: LoadedKv
    reply: TokenStream
    fault: Fault | None
    deadly: Fault | None = None
    """What kills the engine once this call is answered."""


class EngineApp:
    """One engine's endpoints. `event_sources` and `inject` belong to the engine around it."""

    def __init__(
        self,
        config: MockEngineConfig,
        steps: StepLoop,
        faults: FaultBoard,
        handoffs: HandoffService,
        event_sources: Callable[[], dict[str, Any]],
        inject: Callable[[Fault], None],
    ) -> None:
        self._config = config
        self._steps = steps
        self._faults = faults
        self._handoffs = handoffs
        self._event_sources = event_sources
        self._inject = inject
        self._asks = RequestParser(config)
        self._created_s = int(time.time())
        self._serial = count()
        self._routes: dict[tuple[str, str], _Handler] = {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completion,
            ("POST", "/v1/embeddings"): self._embedding,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/version"): self._version,
            ("GET", "/kv_event_sources"): self._kv_event_sources,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("POST", "/_kv/take"): handoffs.answer_take,
            ("POST", "/_kv/probe"): handoffs.answer_probe,
            ("GET", "/query"): handoffs.answer_query,
            ("POST", "/_fault"): self._arm_fault,
            ("DELETE", "/_fault"): self._clear_faults,
        }

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI entry, HTTP only."""
        exchange = HttpExchange(scope, receive, send)
        handler = self._routes.get((exchange.method, exchange.path))
        try:
            if handler is None:
                raise self._unrouted(exchange)
            await handler(exchange)
        except EngineError as refusal:
            await exchange.answer(refusal.status, responses.error_body(refusal))
        except ClientGone:
            pass  # there is nobody to say it to

    def _unrouted(self, exchange: HttpExchange) -> EngineError:
        if any(path == exchange.path for _, path in self._routes):
            return EngineError(HTTPStatus.METHOD_NOT_ALLOWED, "Method Not Allowed")
        return EngineError(HTTPStatus.NOT_FOUND, "Not Found")

    # --- generation -----------------------------------------------------------------------------------------

    async def _chat(self, exchange: HttpExchange) -> None:
        await self._generate(exchange, self._asks.chat)

    async def _completion(self, exchange: HttpExchange) -> None:
        await self._generate(exchange, self._asks.completion)

    async def _generate(self, exchange: HttpExchange, read: Callable[[bytes, str], GenerationRequest]) -> None:
        body = await exchange.body()
        fault = self._faults.strike(REQUEST_FAULTS)
        if await self._struck_down(exchange, fault):
            return
        ask = read(body, exchange.header(b"x-request-id") or uuid.uuid4().hex)
        request_id = f"{ask.id}-{next(self._serial):08x}"
        leg = self._handoffs.leg(ask, request_id)
        if isinstance(leg, PrefillLeg) and leg.cut is not None:
            ask = replace(ask, answer=ask.answer.first(leg.cut))
        if ask.stream:
            await exchange.begin(HTTPStatus.OK, EVENT_STREAM)
        try:
            await self._serve(exchange, ask, leg, request_id, fault)
        except EngineError as refusal:
            if not ask.stream:
                raise
            await exchange.write(responses.error_frames(refusal), more=False)
        except StreamLost:
            await exchange.cut()

    async def _serve(
        self, exchange: HttpExchange, ask: GenerationRequest, leg: HandoffLeg, request_id: str, fault: Fault | None
    ) -> None:
        loaded = LoadedKv()
        if leg is not None and not isinstance(leg, PrefillLeg):
            loaded = await exchange.unless_gone(self._handoffs.receive(ask, leg))
        call = _Call(ask, leg, loaded, self._submit(ask, leg, loaded, request_id), fault)
        with exchange.when_gone(lambda: self._steps.cancel(call.reply)):
            try:
                await (self._stream if ask.stream else self._unary)(exchange, call)
            finally:
                self._steps.cancel(call.reply)
        if call.deadly is not None:
            self._inject(Fault(kind=FaultKind.DIE, for_s=call.deadly.for_s))

    def _submit(self, ask: GenerationRequest, leg: HandoffLeg, loaded: LoadedKv, request_id: str) -> TokenStream:
        """A client may send an id twice; inside the engine each request has its own, as since vLLM 0.17."""
        return self._steps.submit(
            SimRequest(
                id=request_id,
                prompt=ask.prompt,
                output=ask.answer.tokens,
                adapter=ask.adapter,
                salt=ask.salt,
                loaded_tokens=loaded.tokens,
                garbled=loaded.garbled,
                pinned=isinstance(leg, PrefillLeg),
            )
        )

    async def _settle(self, exchange: HttpExchange, call: _Call) -> HandoffFields:
        """All is computed. What the answer says beyond the usual; `StreamLost` where the engine dies before it."""
        struck = self._faults.strike(PREFILL_FAULTS) if isinstance(call.leg, PrefillLeg) else None
        if struck is not None and struck.kind is FaultKind.DIE_BEFORE_ANSWER:
            self._inject(Fault(kind=FaultKind.DIE, for_s=struck.for_s))
            raise StreamLost
        if struck is not None and struck.kind is FaultKind.DIE_AFTER_ANSWER:
            call.deadly = struck
        keeps = struck is None or struck.kind is not FaultKind.NO_PARAMS
        return await self._handoffs.settle(exchange, call.ask, call.leg, call.reply, keeps=keeps)

    def _said(self, call: _Call) -> GenerationRequest:
        """The request with the answer that it gets, known with the first token."""
        return self._asks.garbled(call.ask) if call.reply.garbled else call.ask

    def _cached_tokens(self, call: _Call) -> int:
        return self._handoffs.shown_cached_tokens(call.ask, call.reply, call.loaded)

    async def _unary(self, exchange: HttpExchange, call: _Call) -> None:
        fault = call.fault
        await call.reply.wait_for(len(call.ask.answer.tokens))
        told = await self._settle(exchange, call)
        body = responses.unary_body(self._said(call), int(time.time()), self._cached_tokens(call), told)
        await _hold_back(exchange, fault)
        if fault is not None and fault.kind is FaultKind.CUT:
            await exchange.begin(HTTPStatus.OK, JSON, len(body))
            await exchange.write(body[: len(body) // 2])
            await exchange.cut()
        else:
            await exchange.answer(HTTPStatus.OK, body)

    async def _stream(self, exchange: HttpExchange, call: _Call) -> None:
        """Its headers are out, as vLLM sends them; whatever is ready is one write for each time something is."""
        reply, fault = call.reply, call.fault
        total = len(call.ask.answer.tokens)
        end = min(total, fault.after_chunks) if fault is not None and fault.kind is FaultKind.CUT else total
        await reply.wait_for(min(end, 1))
        frames = responses.StreamFrames(self._said(call), int(time.time()))
        sent = 0
        while sent < end:
            ready = min(end, await reply.wait_for(sent + 1))
            if fault is not None and fault.kind is FaultKind.SLOW:
                await exchange.pause(fault.pause_s)
                ready = sent + 1
            await exchange.write(b"".join(frames.tokens(sent, ready)))
            sent = ready
        if fault is not None and fault.kind is FaultKind.CUT:
            await exchange.cut()
        else:
            await self._settle(exchange, call)
            await exchange.write(frames.closing(self._cached_tokens(call)), more=False)

    async def _struck_down(self, exchange: HttpExchange, fault: Fault | None) -> bool:
        """Does this fault end the request before the engine sees it?"""
        if fault is None or fault.kind in (FaultKind.CUT, FaultKind.SLOW):
            return False
        if fault.kind is FaultKind.STATUS:
            raise EngineError(fault.status, "this engine was told to fail")
        if fault.kind is FaultKind.RAW:
            await exchange.say(fault.raw.encode("latin-1"), fault.piece_bytes)
        if fault.kind is FaultKind.RESET or (fault.kind is FaultKind.RAW and fault.then == "reset"):
            await exchange.reset()
        elif fault.kind is FaultKind.RAW and fault.then == "close":
            await exchange.cut()
        else:
            await exchange.gone()
        return True

    async def _embedding(self, exchange: HttpExchange) -> None:
        body = await exchange.body()
        fault = self._faults.strike(REQUEST_FAULTS)
        if await self._struck_down(exchange, fault):
            return
        ask = self._asks.embedding(body)
        await _hold_back(exchange, fault)
        await exchange.answer(HTTPStatus.OK, responses.embedding_body(ask, uuid.uuid4().hex, int(time.time())))

    # --- what an engine says of itself ------------------------------------------------------------------------

    async def _models(self, exchange: HttpExchange) -> None:
        await exchange.answer(HTTPStatus.OK, responses.models_body(self._config, self._created_s))

    async def _health(self, exchange: HttpExchange) -> None:
        sick = self._faults.strike(_UNHEALTHY) is not None
        await exchange.answer(HTTPStatus.SERVICE_UNAVAILABLE if sick else HTTPStatus.OK)

    async def _metrics(self, exchange: HttpExchange) -> None:
        steps, handoffs = self._steps, self._handoffs
        body = metrics_body(self._config, steps.pod, steps.ttft_s, handoffs.counters)
        await exchange.answer(HTTPStatus.OK, body, CONTENT_TYPE)

    async def _version(self, exchange: HttpExchange) -> None:
        await exchange.answer(HTTPStatus.OK, responses.encode({"version": self._config.release}))

    async def _kv_event_sources(self, exchange: HttpExchange) -> None:
        await exchange.answer(HTTPStatus.OK, responses.encode(self._event_sources()))

    async def _tokenize(self, exchange: HttpExchange) -> None:
        tokens = self._asks.tokens(await exchange.body())
        await exchange.answer(HTTPStatus.OK, responses.tokens_body(tokens, self._config.max_model_len))

    # --- what an operator does to it --------------------------------------------------------------------------

    async def _reset_prefix_cache(self, exchange: HttpExchange) -> None:
        """Always 200, like vLLM. A cache in use stays; what was cleared is announced with the next step."""
        self._steps.pod.cache.clear()
        await exchange.answer(HTTPStatus.OK)

    async def _arm_fault(self, exchange: HttpExchange) -> None:
        try:
            fault = msgspec.json.decode(await exchange.body(), type=Fault)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(HTTPStatus.BAD_REQUEST, str(error)) from error
        await exchange.answer(HTTPStatus.OK)
        self._inject(fault)

    async def _clear_faults(self, exchange: HttpExchange) -> None:
        self._faults.clear()
        await exchange.answer(HTTPStatus.OK)


async def _hold_back(exchange: HttpExchange, fault: Fault | None) -> None:
    if fault is not None and fault.kind is FaultKind.SLOW:
        await exchange.pause(fault.pause_s)
