"""The ASGI application of a mock engine: vLLM's endpoints, and `POST /_fault` for fault injection."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from itertools import count
from typing import Any, NamedTuple, TypeAlias, cast
from urllib.parse import parse_qs

import msgspec

from loadtest.engine_model.pod import SimRequest
from loadtest.mock_engine import messages_format, responses_format
from loadtest.mock_engine import mock_responses as responses
from loadtest.mock_engine.faults import (
    ENGINE_FAULTS,
    REQUEST_FAULTS,
    STREAM_FAULTS,
    Fault,
    FaultBoard,
    FaultKind,
)
from loadtest.mock_engine.handoff_dialects import HandoffFields, HandoffLeg, LoadedKv, PrefillLeg
from loadtest.mock_engine.handoff_service import HandoffService
from loadtest.mock_engine.http_exchange import EVENT_STREAM, JSON, HttpExchange
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_requests import (
    EngineError,
    GenerationRequest,
    RequestParser,
    core_died,
    decode_body,
)
from loadtest.mock_engine.mock_responses import encode, error_type
from loadtest.mock_engine.sleep_mode import SleepMode
from loadtest.mock_engine.step_loop import StepLoop, StreamLost, TokenStream
from router.endpoints import conventions_of
from router.types import Endpoint

RELEASE = "0.32.0"
"""vLLM release whose HTTP interface this is."""
RUST_RELEASE = "0.33.0"
"""The first one with a front end in Rust."""
_NOT_IN_RUST = frozenset(
    {
        Endpoint.MESSAGES.value,
        Endpoint.COUNT_TOKENS.value,
        "/v1/chat/completions/batch",
        "/v1/decisions",
        "/v1/systemone",
    }
)
"""Paths that its front end in Rust answers with 501. Others that it has not got have a 404 without a body."""
_USE_PYTHON = "Set VLLM_USE_RUST_FRONTEND=0 to use the Python frontend."
_Handler: TypeAlias = Callable[[HttpExchange], Awaitable[None]]


class _Format(NamedTuple):
    """How an API's bodies are read, and how its responses are encoded."""

    parse: Callable[[RequestParser, bytes, str], GenerationRequest]
    body: Callable[[GenerationRequest, int, int, HandoffFields], bytes] = responses.unary_body
    frames: Callable[[GenerationRequest, int], responses.Frames] = responses.StreamFrames
    error_frames: Callable[[EngineError], bytes] = responses.error_frames


_FORMATS: dict[str, _Format] = {
    Endpoint.CHAT: _Format(RequestParser.chat),
    Endpoint.COMPLETIONS: _Format(RequestParser.completion),
    Endpoint.MESSAGES: _Format(
        RequestParser.messages,
        lambda request, _, cached_tokens, handoff: messages_format.message_body(request, cached_tokens, handoff),
        lambda request, _: messages_format.MessageFrames(request),
        messages_format.error_frames,
    ),
    Endpoint.RESPONSES: _Format(
        RequestParser.response,
        responses_format.response_body,
        responses_format.ResponseFrames,
        messages_format.error_frames,
    ),
    "/v1/audio/speech": _Format(RequestParser.speech, frames=responses.SpeechFrames),
}


@dataclass(slots=True)
class _Generation:
    """A generation request inside the engine."""

    request: GenerationRequest
    format: _Format
    leg: HandoffLeg
    loaded: LoadedKv
    tokens: TokenStream
    fault: Fault | None
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def breaks(self) -> bool:
        return self.fault is not None and self.fault.kind in STREAM_FAULTS


class EngineApp:
    """The endpoints of one engine. `event_sources` lists its event sockets by rank; `inject` applies a fault to it."""

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
        self._inject = inject
        self._parser = RequestParser(config)
        self._bearer = f"Bearer {config.api_key}" if config.api_key else ""
        self._billed = [0, 0, 0, 0]
        """Answers; their prompt tokens, the cached ones of these, and output tokens."""
        self._serial = count()
        self.sleep = SleepMode(config.wake_s or 0.0, steps.pod.cache.clear)
        adapters, created_s = self._parser.adapters, int(time.time())
        self._routes: dict[tuple[str, str], _Handler] = {
            **{("POST", path): partial(self._generate, form) for path, form in _FORMATS.items()},
            ("POST", "/v1/messages/count_tokens"): _answer(self._token_count),
            ("POST", "/v1/embeddings"): self._embedding,
            ("GET", "/v1/models"): _answer(lambda _: responses.models_body(config, sorted(adapters), created_s)),
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/version"): _answer(lambda _: encode(_version(config))),
            ("GET", "/kv_event_sources"): _answer(lambda _: encode(event_sources())),
            ("POST", "/tokenize"): _answer(self._tokens),
            ("POST", "/detokenize"): _answer(lambda body: encode({"prompt": self._parser.detokenize(body)})),
            ("POST", "/v1/load_lora_adapter"): _answer(self._parser.load_adapter, b"text/plain"),
            ("POST", "/v1/unload_lora_adapter"): _answer(self._parser.unload_adapter, b"text/plain"),
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            **self._sleep_routes(),
            ("POST", "/_kv/take"): handoffs.handle_take,
            ("POST", "/_kv/lookup"): handoffs.handle_lookup,
            ("GET", "/query"): handoffs.handle_query,
            ("POST", "/_fault"): self._arm_fault,
            ("DELETE", "/_fault"): self._clear_faults,
        }

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        exchange = HttpExchange(scope, receive, send)
        try:
            if self._bearer and exchange.header(b"authorization") != self._bearer:
                raise EngineError("Unauthorized", status=HTTPStatus.UNAUTHORIZED)
            handler = self._routes.get((exchange.method, exchange.path))
            if self._config.front_end == "rust" and await self._is_left_out(exchange, handler is not None):
                return
            if handler is None:
                known = any(path == exchange.path for _, path in self._routes)
                status = HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_FOUND
                raise EngineError(status.phrase, status=status)
            await handler(exchange)
        except EngineError as error:
            conventions = conventions_of(exchange.path)
            is_own = conventions.prefix != ""  # vLLM's own fields are those of OpenAI's errors, with the status as code
            fields = {"type": error_type(error), "message": str(error)}
            body = encode(conventions.error_object(fields)) if is_own else responses.error_body(error)
            await exchange.respond(error.status, body)
        except asyncio.CancelledError:
            pass  # the client has disconnected

    async def _is_left_out(self, exchange: HttpExchange, is_route: bool) -> bool:
        """Answer as the front end in Rust for a path that it has not got."""
        if exchange.path in _NOT_IN_RUST:
            message = f"{exchange.method} {exchange.path} is not supported by the Rust frontend yet. {_USE_PYTHON}"
            error = EngineError(message, status=HTTPStatus.NOT_IMPLEMENTED)
            await exchange.respond(error.status, responses.error_body(error))
            return True
        if is_route and exchange.path != Endpoint.RESPONSES:
            return False
        await exchange.respond(HTTPStatus.NOT_FOUND)
        return True

    # --- generation ---

    async def _generate(self, form: _Format, exchange: HttpExchange) -> None:
        body = await exchange.body()
        fault = self._faults.take(*REQUEST_FAULTS)
        if await self._fails_early(exchange, fault):
            return
        self.sleep.check()
        request = form.parse(self._parser, body, exchange.header(b"x-request-id") or uuid.uuid4().hex)
        # Clients may use an id twice. The engine's own ids are unique, as in vLLM since 0.17.
        engine_request_id = f"{request.id}-{next(self._serial):08x}"
        leg = self._handoffs.leg(request, engine_request_id)
        if isinstance(leg, PrefillLeg) and leg.cut is not None:
            request = replace(request, output=request.output.cut(1, leg.cut))
        if request.stream:
            await exchange.begin(HTTPStatus.OK, responses.AUDIO_TYPES.get(request.audio, EVENT_STREAM))
        try:
            loaded = LoadedKv()
            loads = leg.pulls if isinstance(leg, PrefillLeg) else leg
            if loads is not None:
                with exchange.cancelled_on_disconnect():
                    loaded = await self._handoffs.load(request, loads)
            if isinstance(leg, PrefillLeg) and leg.releases is not None:
                await self._handoffs.release(leg.releases)
            tokens = self._steps.submit(
                SimRequest(
                    id=engine_request_id,
                    prompt=request.prompt,
                    output=request.output.tokens,
                    adapter=request.adapter,
                    salt=request.salt,
                    loaded_tokens=loaded.tokens,
                    pinned=isinstance(leg, PrefillLeg) or self._handoffs.offers(leg),
                )
            )
            await self._respond(exchange, _Generation(request, form, leg, loaded, tokens, fault))
        except EngineError as error:
            if not request.stream:
                raise
            is_audio = request.audio in responses.AUDIO_TYPES
            await (exchange.close() if is_audio else exchange.write(form.error_frames(error), more=False))
        except StreamLost:
            await exchange.close()

    async def _respond(self, exchange: HttpExchange, generation: _Generation) -> None:
        try:
            with exchange.cancelled_on_disconnect():
                await (self._stream if generation.request.stream else self._unary)(exchange, generation)
        finally:
            self._steps.cancel(generation.tokens)

    async def _finish(self, generation: _Generation) -> HandoffFields:
        """Finish a computed request and return its handoff fields. Raises `StreamLost` if the engine dies first."""
        is_prefill = isinstance(generation.leg, PrefillLeg)
        if is_prefill and (fault := self._faults.take(FaultKind.DIE_BEFORE_ANSWER)) is not None:
            self._inject(Fault(kind=FaultKind.DIE, for_s=fault.for_s))
            raise StreamLost
        return await self._handoffs.finish(generation.request, generation.leg, generation.tokens)

    def _bill(self, generation: _Generation, cached_tokens: int) -> None:
        request = generation.request
        used = 1, len(request.prompt), cached_tokens, len(request.output.tokens) * request.answers
        self._billed = [sum(pair) for pair in zip(self._billed, used, strict=True)]

    def _cached_tokens(self, generation: _Generation) -> int:
        prompt_tokens, own = len(generation.request.prompt), generation.tokens.cached_tokens
        return self._handoffs.dialect.reported_cached_tokens(prompt_tokens, own, generation.loaded)

    async def _unary(self, exchange: HttpExchange, generation: _Generation) -> None:
        await generation.tokens.wait_for(len(generation.request.output.tokens))
        fields = await self._finish(generation)
        cached_tokens = self._cached_tokens(generation)
        body = generation.format.body(generation.request, generation.created_s, cached_tokens, fields)
        self._bill(generation, cached_tokens)
        await _pause_if_slow(exchange, generation.fault)
        if generation.breaks:
            await exchange.begin(HTTPStatus.OK, JSON, len(body))
            await exchange.write(body[: len(body) // 2])
            await exchange.close()
        else:
            await exchange.respond(HTTPStatus.OK, body)

    async def _stream(self, exchange: HttpExchange, generation: _Generation) -> None:
        """Headers are already sent, as in vLLM. Tokens that are ready together are sent in one write."""
        tokens, fault = generation.tokens, generation.fault
        end = total = len(generation.request.output.tokens)
        if fault is not None and generation.breaks:
            end = min(total, 1 if fault.after_chunks is None else fault.after_chunks)
        frames, sent = generation.format.frames(generation.request, generation.created_s), 0
        has_offers = self._config.handoff.streams_offers and isinstance(frames, responses.StreamFrames)
        offers = cast(responses.StreamFrames, frames) if has_offers else None
        if offers is not None:
            offers.offer = None
        if opening := frames.opening():
            await exchange.write(opening)
        while sent < end:
            ready = min(end, await tokens.wait_for(sent + 1))
            if fault is not None and fault.kind is FaultKind.SLOW:
                await _pause_if_slow(exchange, fault)
                ready = sent + 1
            if offers is not None and ready == total:
                offers.offer = (await self._finish(generation)).top.get("kv_transfer_params")
            await exchange.write(b"".join(frames.tokens(sent, ready)))
            sent = ready
        if generation.breaks:
            await self._break(exchange, generation, sent)
        else:
            if offers is None:
                await self._finish(generation)
            self._bill(generation, cached_tokens := self._cached_tokens(generation))
            await exchange.write(frames.closing(cached_tokens), more=False)

    async def _break(self, exchange: HttpExchange, generation: _Generation, sent: int) -> None:
        fault, request = generation.fault, generation.request
        assert fault is not None
        if fault.kind is FaultKind.ABORT:
            aborted = replace(request, output=request.output.cut(sent, "abort"))
            frames = generation.format.frames(aborted, generation.created_s)
            await exchange.write(frames.closing(self._cached_tokens(generation)), more=False)
            return
        if fault.kind in ENGINE_FAULTS:
            self._inject(msgspec.structs.replace(fault, after_chunks=None))
        if fault.kind is FaultKind.CORE_DIES:
            raise core_died()
        if fault.kind in (FaultKind.SILENCE, FaultKind.TERMINATE):
            await exchange.disconnected()
        await exchange.close()

    async def _fails_early(self, exchange: HttpExchange, fault: Fault | None) -> bool:
        """Apply a fault that ends the request before the engine parses it; False if there is none."""
        if fault is None or fault.kind in (FaultKind.SLOW, *STREAM_FAULTS):
            return False
        if fault.kind is FaultKind.STATUS:
            raise EngineError(fault.message, status=fault.status)
        if fault.kind in (FaultKind.UNHEALTHY, FaultKind.NO_METRICS) and fault.then != "hang":
            raise EngineError(fault.message, status=HTTPStatus.SERVICE_UNAVAILABLE)
        if fault.kind is FaultKind.RAW:
            await exchange.write_raw(fault.raw.encode("latin-1"), fault.piece_bytes)
        if fault.kind is FaultKind.RESET or (fault.kind is FaultKind.RAW and fault.then == "reset"):
            await exchange.reset()
        elif fault.kind is FaultKind.RAW and fault.then == "close":
            await exchange.close()
        else:
            await exchange.disconnected()
        return True

    async def _embedding(self, exchange: HttpExchange) -> None:
        body = await exchange.body()
        fault = self._faults.take(*REQUEST_FAULTS)
        if await self._fails_early(exchange, fault):
            return
        asked = self._parser.embedding(body)
        await _pause_if_slow(exchange, fault)
        await exchange.respond(HTTPStatus.OK, responses.embedding_body(*asked, int(time.time())))

    # --- state ---

    async def _health(self, exchange: HttpExchange) -> None:
        if not await self._fails_early(exchange, self._faults.take(FaultKind.UNHEALTHY)):
            await exchange.respond(HTTPStatus.OK)

    async def _metrics(self, exchange: HttpExchange) -> None:
        if await self._fails_early(exchange, self._faults.take(FaultKind.NO_METRICS)):
            return
        body = responses.metrics_body(self._config, self._steps.pod, self._handoffs.counters)
        if self._config.price is not None:
            body += responses.bill(self._config.price, *self._billed)
        if self._config.front_end != "rust":
            body += self.sleep.metrics(f'engine="0",model_name="{self._config.models[0]}"')
        if names := parse_qs(exchange.query).get("name[]"):
            body = responses.filtered_metrics(body, names, self._config.metrics_filter)
        await exchange.respond(HTTPStatus.OK, body, responses.METRICS_TYPE)

    def _tokens(self, body: bytes) -> bytes:
        return responses.tokens_body(self._parser.tokenize(body), self._config.max_model_len)

    def _token_count(self, body: bytes) -> bytes:
        tokens = self._parser.count_tokens(body)
        return encode({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})

    # --- operations ---

    def _sleep_routes(self) -> dict[tuple[str, str], _Handler]:
        if self._config.wake_s is None:
            return {}
        return {
            ("GET", "/is_sleeping"): self.sleep.handle_is_sleeping,
            ("POST", "/sleep"): self.sleep.handle_sleep,
            ("POST", "/wake_up"): self.sleep.handle_wake_up,
            ("POST", "/collective_rpc"): self.sleep.handle_rpc,
        }

    async def _reset_prefix_cache(self, exchange: HttpExchange) -> None:
        """Always 200, as in vLLM. Blocks in use stay; the next step publishes the cleared ones."""
        self._steps.pod.cache.clear()
        await exchange.respond(HTTPStatus.OK)

    async def _arm_fault(self, exchange: HttpExchange) -> None:
        fault = decode_body(await exchange.body(), Fault)
        await exchange.respond(HTTPStatus.OK)
        self._inject(fault)

    async def _clear_faults(self, exchange: HttpExchange) -> None:
        self._faults.clear()
        await exchange.respond(HTTPStatus.OK)


def _version(config: MockEngineConfig) -> dict[str, str]:
    is_rust = config.front_end == "rust"
    return {"version": RUST_RELEASE, "rust_frontend_version": RUST_RELEASE} if is_rust else {"version": RELEASE}


def _answer(answer: Callable[[bytes], bytes], content_type: bytes = JSON) -> _Handler:
    async def handle(exchange: HttpExchange) -> None:
        await exchange.respond(HTTPStatus.OK, answer(await exchange.body()), content_type)

    return handle


async def _pause_if_slow(exchange: HttpExchange, fault: Fault | None) -> None:
    if fault is not None and fault.kind is FaultKind.SLOW:
        await exchange.pause(fault.pause_s)
