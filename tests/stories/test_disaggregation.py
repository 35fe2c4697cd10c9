"""Prefill and decode pods serve a request together, without a visible difference for the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from loadtest.mock_engine.mock_config import HandoffConfig, MockEngineConfig
from loadtest.mock_engine.mock_engine import MockEngine, running_engines
from router.config.load import shipped
from router.config.models import load_priors
from router.config.pod_schema import PodConfig
from router.config.schema import LinkFigures, LinksConfig, ModelConfig, RouterConfig
from router.engines.engine_catalog import DIALECTS
from router.feeds import answers_test
from router.fleet.breaker import Probes
from router.frontends.http import kv_transfer
from router.prompt.tokenizer import Tokenizer
from router.types import BlockHash, Pod, PodSpeed, Role
from router.wiring.router import build_router
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scenes import LLAMA_8B
from tests.stories.conftest import SOURCE, TEMPLATE, Deployment, opening, serving

pytestmark = [pytest.mark.net, pytest.mark.anyio]

MakeEngine = Callable[..., MockEngineConfig]
OpenPair = Callable[..., AbstractAsyncContextManager["Pair"]]

SLOW_TO_PREFILL = PodSpeed(500.0, LLAMA_8B.c1_ms_per_token, LLAMA_8B.c2_ms_per_token2, LLAMA_8B.d0_ms)
"""The router's speed for decode pods, which makes a split always cheaper."""
ALONE = ("nixl", "mooncake", "trtllm", "shared_store", "p2p")
"""Dialects whose decode pods also work without a prefill pod."""


class Pair(Deployment):
    """A deployment with one prefill engine and some decode engines."""

    @property
    def prefill(self) -> MockEngine:
        return self.engines[0]

    @property
    def decode(self) -> MockEngine:
        return self.engines[1]

    def pod_of(self, engine: MockEngine) -> Pod:
        """The router's current status of the pod."""
        pods = {status.pod.url: status.pod for status in self.program.fleet.snapshot.pods}
        return pods[engine.url]

    def pairable(self) -> bool:
        """Whether the router has all handoff facts it needs."""
        prefill = self.pod_of(self.prefill)
        return self.program.pods.handoff_facts.of(prefill, prefill.handoff) is not None

    def handoffs(self, result: str) -> float:
        """Number of splits with this result."""
        counted = self.program.metrics.registry.collect()
        samples = (sample for family in counted for sample in family.samples)
        return sum(s.value for s in samples if s.name == "warmroute_handoffs_total" and s.labels["result"] == result)


@pytest.fixture
def open_pair(engine_config: MakeEngine, tokenizer: Tokenizer) -> OpenPair:
    """Start one prefill pod, `decodes` decode pods, and a router for `dialect`."""

    @asynccontextmanager
    async def opened(
        dialect: str, *, decodes: int = 1, handoff: dict[str, Any] | None = None, pulls: str = "", **engine: Any
    ) -> AsyncIterator[Pair]:
        store: set[BlockHash] = set()
        roles = [Role.PREFILL] + [Role.DECODE] * decodes
        configs = [
            engine_config(
                handoff=HandoffConfig(dialect=dialect, role=role, store=store, **(handoff or {})),  # type: ignore[arg-type]
                **engine,
            )
            for role in roles
        ]
        async with asyncio.timeout(DEADLINE_S), running_engines(configs) as engines:
            port = int(engines[0].url.rpartition(":")[2])
            config = RouterConfig(
                models=(ModelConfig(name="demo", tokenizer=SOURCE.path, chat_template=TEMPLATE),),
                pods=tuple(
                    PodConfig(
                        url=each.url,
                        role=role,
                        handoff=dialect,
                        pulls=pulls,
                        handoff_port=port if role is Role.PREFILL or not pulls else int(each.url.rpartition(":")[2]),
                        speed=LLAMA_8B if role is Role.PREFILL else SLOW_TO_PREFILL,
                    )
                    for each, role in zip(engines, roles, strict=True)
                ),
                links=LinksConfig(elsewhere=LinkFigures(t0_ms=0.1, gb_per_s=100.0)),
                probes=Probes(
                    health_interval_s=0.1,
                    load_interval_s=0.05,
                    self_test=dialect != "bootstrap",
                    self_test_interval_s=0.2,
                ),
            )
            priors = load_priors(shipped("config") / "models")
            program = build_router(config, shipped("policies"), priors, load=lambda source, *, fast: tokenizer)
            async with serving(program) as (client, admin, url):
                pair = Pair(engines, program, client, admin, url)
                await pair.until(pair.all_trusted)
                await pair.until(pair.pairable)
                yield pair

    return opened


async def alone(engine: MockEngine, **fields: Any) -> str:
    """The response of a fresh engine without handoff."""
    async with httpx.AsyncClient(base_url=engine.url) as client:
        answer = await client.post("/v1/chat/completions", json={"model": "demo", "max_tokens": 8, **fields})
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text


STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("dialect", [*ALONE, "bootstrap"])
async def test_a_split_request_is_answered_like_any_other(
    open_pair: OpenPair, engine_config: MakeEngine, dialect: str
) -> None:
    """In every dialect, whole and as a stream: the same text, the right two pods, and the correct cached tokens."""
    async with open_pair(dialect) as pair, MockEngine(engine_config()) as other:
        for topic, fields, cached in (
            ("rivers", {}, False),
            ("rivers", STREAMED, True),
            ("brooks", STREAMED, False),
            ("brooks", {}, True),
        ):
            chat = opening(topic)
            answer = await pair.chat(chat, **fields)
            assert answer.status_code == 200
            assert answer.headers["x-warmroute-prefill-pod"] == pair.prefill.url.removeprefix("http://")
            assert answer.headers["x-warmroute-pod"] == pair.decode.url.removeprefix("http://")
            usage = usage_of(answer)
            # SGLang's mock reports 0 for every prefill leg
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) is (cached and dialect in ALONE)
            assert said(answer) == await alone(other, messages=chat)
        assert pair.handoffs("ok") == 4
        assert not pair.program.pods.state.ledger.inflight()


def said(answer: httpx.Response) -> str:
    """The text of a response, streamed or not."""
    if "event-stream" not in answer.headers["content-type"]:
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text
    deltas = (choice["delta"] for event in events_of(answer) for choice in event["choices"])
    return "".join(delta.get("content") or "" for delta in deltas)


def usage_of(answer: httpx.Response) -> dict[str, Any]:
    """The usage of a response, streamed or not."""
    whole = "event-stream" not in answer.headers["content-type"]
    usage: dict[str, Any] = (answer.json() if whole else events_of(answer)[-1])["usage"]
    return usage


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_an_old_handoff_never_returns_a_wrong_response(
    open_pair: OpenPair, engine_config: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill pod that restarts between its response and the decode leg has other blocks at that address: an engine
    would return wrong text with a 200, and cache it. The mock's decode leg would fail."""
    async with open_pair("nixl") as pair, MockEngine(engine_config()) as other:
        nixl, fleet = DIALECTS["nixl"], pair.program.fleet

        class Interrupted(type(nixl)):  # type: ignore[misc]
            def read_handoff(self, *values: Any) -> Any:
                pair.prefill.inject(Fault(kind=FaultKind.RESTART))
                fleet.restarted(pair.pod_of(pair.prefill).id)
                return super().read_handoff(*values)

        monkeypatch.setitem(DIALECTS, "nixl", Interrupted())
        chat = opening("tides")
        for _ in range(2):
            assert said(await pair.chat(chat)) == await alone(other, messages=chat)
        assert pair.handoffs("dropped") >= 1 and pair.handoffs("decode_failed") == 0


async def test_cached_tokens_of_the_prefill_pod_are_predicted_exactly(open_pair: OpenPair) -> None:
    """The prediction is for the pod that computes, and so is the usage."""
    async with open_pair("nixl") as pair:
        chat = opening("orchards")
        await pair.chat(chat)
        answer = await pair.chat(chat)
        predicted = int(answer.headers["x-warmroute-cached-tokens"])
        assert predicted == usage_of(answer)["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("streams", [None, False, True])
async def test_offers_of_kv_never_reach_a_client_and_are_given_back(
    open_pair: OpenPair, path: str, streams: bool | None
) -> None:
    """vLLM's `bidirectional_kv_xfer`: whole responses have an offer, streams of 0.33 too (True), those of 0.32 not
    (False), which hold the KV all the same."""
    async with open_pair("nixl", handoff={"bidirectional": True, "streams_offers": bool(streams)}) as pair:
        asked = {"messages": opening("gulfs")} if "chat" in path else {"prompt": "gulfs " * 60}
        body = {"model": "demo", "max_tokens": 8, "stream": streams is not None, **asked}
        answer = await pair.client.post(path, json=body)
        assert answer.status_code == 200
        assert "kv_transfer_params" not in answer.text and "remote_" not in answer.text
        assert pair.handoffs("ok") == 1
        if streams is False:
            assert pair.decode.pinned_requests
        else:
            await pair.until(lambda: not pair.decode.pinned_requests)


@pytest.mark.parametrize("dialect", ["nixl", "trtllm", "shared_store"])
async def test_a_prefill_leg_that_hangs_is_tried_elsewhere(
    open_pair: OpenPair, monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    """Its pod accepts the request and answers nobody. Its health checks succeed."""
    monkeypatch.setattr(kv_transfer, "PREFILL_LIMIT_S", 0.1)
    async with open_pair(dialect) as pair:
        pair.prefill.inject(Fault(kind=FaultKind.HANG))
        answer = await pair.chat(opening("capes"), stream=True)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        assert answer.headers.get("x-warmroute-prefill-pod") is None
        assert pair.handoffs("prefill_failed") == 1
        assert not pair.program.pods.state.ledger.inflight()


async def test_kv_of_a_client_that_leaves_between_the_legs_is_given_back(open_pair: OpenPair) -> None:
    """Its lease would hold it for half a minute."""
    async with open_pair("nixl") as pair:
        pair.decode.inject(Fault(kind=FaultKind.HANG))
        body = {"model": "demo", "messages": opening("firths"), "max_tokens": 8, "stream": True}
        asking = asyncio.create_task(pair.client.post("/v1/chat/completions", json=body))
        await pair.until(lambda: bool(pair.prefill.pinned_requests))
        asking.cancel()
        await asyncio.wait([asking])
        await pair.until(lambda: not pair.prefill.pinned_requests)
        assert pair.handoffs("client_gone") == 1


@pytest.mark.parametrize(
    ("dialect", "keeps", "setting"),
    [
        ("shared_store", True, ""),
        ("shared_store", False, "save_decode_cache: true"),
        ("p2p", True, ""),
        ("p2p", False, "offload_prompt_only: false"),
        ("nixl", False, "a store or tier that holds answers"),
    ],
)
async def test_what_keeps_the_next_turn_from_the_last_answer_is_named_with_its_worth(
    open_pair: OpenPair, monkeypatch: pytest.MonkeyPatch, dialect: str, keeps: bool, setting: str
) -> None:
    """The decode pod is tested without traffic. The worth is known once a prefill pod has computed an answer again."""
    monkeypatch.setattr(answers_test, "SAVED_S", 0.0)
    pulls = dialect if dialect == "p2p" else ""
    async with open_pair(dialect, pulls=pulls, handoff={"keeps_answers": keeps}) as pair:
        await pair.until(lambda: pair.pod_of(pair.decode).keeps_answers is not None)
        assert pair.pod_of(pair.decode).keeps_answers is keeps
        chat = opening("fells")
        first = await pair.chat(chat, max_tokens=128, ignore_eos=True)
        await pair.apply_events()
        asked = {"role": "user", "content": "And behind them?"}
        answer = await pair.chat([*chat, {"role": "assistant", "content": said(first)}, asked])
        found = usage_of(answer)["prompt_tokens_details"]["cached_tokens"]
        assert (found > usage_of(first)["prompt_tokens"]) is keeps
        said_of = {one["role"]: one["answers"] for one in await pair.pods()}
        assert (said_of["prefill"], bool(said_of["decode"])) == ("", not keeps)
        assert setting in said_of["decode"] and ("% of" in said_of["decode"]) is not keeps


async def test_the_prefill_pod_of_a_split_pulls_the_last_answer(open_pair: OpenPair) -> None:
    """The decode pod holds it. Predicted cached tokens are those reported."""
    async with open_pair("p2p", pulls="p2p") as pair:
        chat = opening("moors")
        first = await pair.chat(chat, max_tokens=128, ignore_eos=True)
        await pair.apply_events()
        asked = {"role": "user", "content": "And behind them?"}
        answer = await pair.chat([*chat, {"role": "assistant", "content": said(first)}, asked])
        assert answer.headers["x-warmroute-prefill-pod"] == pair.prefill.url.removeprefix("http://")
        predicted = int(answer.headers["x-warmroute-cached-tokens"])
        assert predicted > usage_of(first)["prompt_tokens"] + 16
        assert usage_of(answer)["prompt_tokens_details"]["cached_tokens"] == predicted
        assert not pair.program.pods.state.ledger.inflight()
