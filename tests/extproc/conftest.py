"""A picker in the test process, over mock engines, and a gRPC client that plays Envoy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

grpc: Any = pytest.importorskip("grpc")

from loadtest.mock_engine.mock_config import HandoffConfig, MockEngineConfig  # noqa: E402
from loadtest.mock_engine.mock_engine import MockEngine, running_engines  # noqa: E402
from router.config.load import shipped  # noqa: E402
from router.config.models import load_priors  # noqa: E402
from router.config.pod_schema import PodConfig  # noqa: E402
from router.config.schema import (  # noqa: E402  # noqa: E402
    LinkFigures,
    LinksConfig,
    ModelConfig,
    PickerListen,
    RouterConfig,
)
from router.fleet.breaker import Probes  # noqa: E402
from router.frontends.extproc.messages import (  # noqa: E402
    FULL_DUPLEX_STREAMED,
    NONE,
    ProcessingRequest,
    ProcessingResponse,
)
from router.frontends.extproc.picker_server import SERVICE, PickerServer  # noqa: E402
from router.prompt.template import ChatTemplate  # noqa: E402
from router.types import PodSpeed, Role  # noqa: E402
from router.wiring.router import (  # noqa: E402
    Router,
    build_router,
    picker_front,
)
from tests.kit.scenes import LLAMA_8B  # noqa: E402
from tests.kit.virtual_time import anyio_backend  # noqa: E402
from tests.loaded_tokenizers import loaded_tokenizer  # noqa: E402
from tests.stories.conftest import SOURCE, TEMPLATE  # noqa: E402

__all__ = ["anyio_backend"]
DEADLINE_S = 60.0
POD_HEADER = b"x-gateway-destination-endpoint"
OWN_ENVOY = (FULL_DUPLEX_STREAMED, NONE)
Headers = dict[str, str]


def chat(text: str = "Hello", **fields: Any) -> bytes:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
    return msgspec.json.encode(body)


def http_headers(fields: Headers, *, ends: bool = False) -> Any:
    pairs = [{"key": name.encode(), "raw_value": value.encode()} for name, value in fields.items()]
    return {"headers": {"headers": pairs}, "end_of_stream": ends}


@dataclass
class Answer:
    """What a gateway has received until the request may be sent, or its client be answered."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    removed: set[bytes] = field(default_factory=set)
    body: bytes = b""
    metadata: bytes = b""
    status: int = 0
    """The status of an answer of the picker's own; 0 for a pick."""

    def take(self, response: Any) -> bool:
        """Read one message. Returns whether it is the last one of the request."""
        if response.WhichOneof("response") == "immediate_response":
            immediate = response.immediate_response
            self.status, self.body = immediate.status.code, immediate.body
            self._edit(immediate.headers)
            return True
        for namespace in response.dynamic_metadata.fields:
            [pick] = namespace.value.struct_value.fields
            assert (namespace.key, pick.key) == (b"envoy.lb", POD_HEADER)
            self.metadata = pick.value.string_value
        part = getattr(response, response.WhichOneof("response")).response
        self._edit(part.header_mutation)
        streamed = part.body_mutation.streamed_response
        self.body += streamed.body or part.body_mutation.body
        return bool(streamed.end_of_stream)

    def _edit(self, mutation: Any) -> None:
        self.headers |= {one.header.key: one.header.raw_value for one in mutation.set_headers}
        self.removed |= set(mutation.remove_headers)

    @property
    def picked(self) -> list[str]:
        return self.headers[POD_HEADER].decode().split(",")


class Stream:
    """One request of an Envoy that plays with the picker."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **message: Any) -> None:
        await self.call.write(ProcessingRequest(**message).SerializeToString())

    async def receive(self) -> Any:
        """The next message; None at the end of the stream."""
        data = await self.call.read()
        return None if data is grpc.aio.EOF else ProcessingResponse.FromString(data)

    async def head(
        self, path: str = "/v1/chat/completions", method: str = "POST", modes: tuple[int, int] = OWN_ENVOY, **more: Any
    ) -> None:
        """Send the headers of the request. `headers`: those of the client; `metadata`: of the gateway."""
        fields = {":method": method, ":path": path, ":authority": "models", "content-type": "application/json"}
        message = http_headers(fields | more.pop("headers", {}), ends=method == "GET")
        config = {"request_body_mode": modes[0], "response_body_mode": modes[1]}
        await self.send(request_headers=message, protocol_config=config, **more)

    async def answer(self) -> Answer:
        """Everything that the picker says until the request may be sent."""
        found = Answer()
        while (response := await self.receive()) is not None:
            if found.take(response):
                return found
        raise AssertionError(f"the picker has closed the stream: {await self.call.code()} {await self.call.details()}")

    async def ask(self, body: bytes | None = None, **head: Any) -> Answer:
        """Send a whole request. Returns the answer."""
        await self.head(**head)
        await self.send(request_body={"body": chat() if body is None else body, "end_of_stream": True})
        return await self.answer()

    async def respond(self, status: int = 200, **message: Any) -> Any:
        """The pod's response begins. Returns what the picker makes of its headers."""
        kind = {":status": str(status), "content-type": "text/event-stream"}
        await self.send(response_headers=http_headers(kind), **message)
        return await self.receive()

    async def end(self) -> None:
        """The HTTP exchange is over."""
        await self.call.done_writing()
        assert await self.receive() is None


@dataclass
class Picking:
    """A picker, its pods and a channel to it."""

    program: Router
    server: PickerServer
    pods: list[str]
    port: int
    channel: Any
    engines: list[MockEngine]

    def stream(self) -> Stream:
        return Stream(self.channel.stream_stream(f"/{SERVICE}/Process")())

    @property
    def leases(self) -> int:
        return sum(one.requests for one in self.program.pods.state.ledger.inflight().values())

    def results(self) -> dict[str, float]:
        """The number of ended requests by result."""
        found: dict[str, float] = {}
        for family in self.program.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "warmroute_requests_total":
                    result = sample.labels["result"]
                    found[result] = found.get(result, 0) + sample.value
        return found

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await asyncio.sleep(0.005)


Pick = Callable[..., AbstractAsyncContextManager[Picking]]


@pytest.fixture
def picker() -> Pick:
    """Starts engines and a picker; both are stopped afterwards, also on errors."""
    tokenizer = loaded_tokenizer(SOURCE)
    template = ChatTemplate(tokenizer)
    engine = MockEngineConfig(
        models=("demo",), tokenizer=tokenizer, render=template.render, template=template, speed=LLAMA_8B, time_scale=0.0
    )

    @asynccontextmanager
    async def opened(
        pods: int = 2,
        picker: dict[str, Any] | None = None,
        handoff: str = "",
        models: Sequence[str] = (),
        **config: Any,
    ) -> AsyncIterator[Picking]:
        """`handoff`: the first pod is a prefill pod of this dialect, the others are decode pods. `models`: of each pod,
        if they differ."""
        names = models or ["demo"] * pods
        roles = [Role.PREFILL] + [Role.DECODE] * (pods - 1) if handoff else [Role.BOTH] * pods
        mocks = [
            replace(engine, models=(name,), handoff=HandoffConfig(dialect=handoff, role=role))  # type: ignore[arg-type]
            for role, name in zip(roles, names, strict=True)
        ]
        async with asyncio.timeout(DEADLINE_S), running_engines(mocks) as engines:
            settings = RouterConfig(
                models=tuple(
                    ModelConfig(name=name, tokenizer=SOURCE.path, chat_template=TEMPLATE)
                    for name in dict.fromkeys(names)
                ),
                pods=tuple(
                    PodConfig(url=each.url, role=role, handoff=handoff, speed=_speed(role))
                    for each, role in zip(engines, roles, strict=True)
                ),
                picker=PickerListen(port=0, **(picker or {})),
                links=LinksConfig(elsewhere=LinkFigures(t0_ms=0.1, gb_per_s=100.0)),
                probes=Probes(health_interval_s=0.1, load_interval_s=0.05, self_test=False),
                **config,
            )
            front = picker_front(settings.picker)
            priors = load_priors(shipped("config") / "models")
            program = build_router(
                settings, shipped("policies"), priors, lambda source, *, fast: tokenizer, front=front
            )
            async with program.run():
                server = PickerServer(program.edge, settings, program.is_ready, program.pods.sources.priority)
                port = await server.open()
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    addresses = [each.url.removeprefix("http://") for each in engines]
                    picking = Picking(program, server, addresses, port, channel, engines)
                    await picking.until(lambda: len(program.summary()) and _ready(program) == pods)
                    yield picking
                await server.close(0.0, 0.0)

    return opened


def _speed(role: Role) -> PodSpeed:
    """Prompts are computed so slowly on decode pods that a split is always cheaper."""
    return LLAMA_8B if role is not Role.DECODE else replace(LLAMA_8B, c0_ms=500.0)


def _ready(program: Router) -> int:
    return sum(status.state.name == "READY" and bool(status.pod.models) for status in program.fleet.snapshot.pods)
