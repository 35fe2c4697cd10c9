"""That prompts are not matched is shown to clients, operators and alerts, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import running_engines
from router.config.load import shipped
from router.config.models import ModelPrior
from router.config.pod_schema import KvEvents, PodConfig
from router.config.schema import Edge, ModelConfig, RouterConfig
from router.fleet.breaker import Probes
from router.wiring.router import build_router
from tests.kit.closed_port import closed_port
from tests.kit.deadlines import DEADLINE_S
from tests.loaded_tokenizers import loaded_tokenizer
from tests.stories.conftest import SOURCE, TEMPLATE, serving

pytestmark = [pytest.mark.anyio, pytest.mark.net]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "one word " * 200}], "max_tokens": 2}
PROBES = Probes(health_interval_s=0.1, load_interval_s=0.05, self_test_interval_s=0.2)
MATCH = "x-warmroute-match"


@pytest.mark.parametrize(
    ("models", "reason", "shown"),
    [
        ((), "no_tokenizer", "no tokenizer is configured"),
        ((ModelConfig(name="demo", tokenizer=SOURCE.path),), "no_chat_template", "has no chat template"),
    ],
)
async def test_a_model_whose_chats_are_not_read(
    models: tuple[ModelConfig, ...],
    reason: str,
    shown: str,
    engine_config: Callable[..., MockEngineConfig],
    priors: dict[str, ModelPrior],
) -> None:
    async with asyncio.timeout(DEADLINE_S), running_engines([engine_config()]) as engines:
        config = RouterConfig(
            pods=(PodConfig(url=engines[0].url),), probes=PROBES, models=models, edge=Edge(cors_origins=("*",))
        )
        program = build_router(config, shipped("policies"), priors, load=loaded_tokenizer)
        async with serving(program) as (client, admin, _):
            while (await admin.get("/admin/pods")).json()[0]["state"] != "ready":
                await asyncio.sleep(0.01)
            for _ in range(6):
                answer = await client.post("/v1/chat/completions", json=CHAT, headers={"origin": "http://a"})
            (pod,) = (await admin.get("/admin/pods")).json()
            metrics = (await admin.get("/metrics")).text
            async with admin.stream("GET", "/ui/events") as events:
                snapshot = await anext(line async for line in events.aiter_lines() if line.startswith("data: "))
            previewed = await admin.post("/admin/preview", json=CHAT)
    assert answer.headers[MATCH] == f"none; reason={reason}"
    assert previewed.status_code == 200
    assert MATCH in answer.headers["access-control-expose-headers"]
    assert pod["matching"] == "off" and shown in pod["matching_reason"]
    assert f'warmroute_pod_matching{{matching="off",pod="{pod["id"]}"}} 1' in metrics
    assert f'warmroute_unread_prompts_total{{model="demo",reason="{reason}"}} 6' in metrics
    assert "are routed by load only" in snapshot and "6 of 6 requests" in snapshot


async def test_a_refused_address_of_kv_events_is_the_reason(
    engine_config: Callable[..., MockEngineConfig], priors: dict[str, ModelPrior]
) -> None:
    """Not a missing flag, nor a mismatch: prompts are matched by what the pod was sent. The log says it."""
    models = (ModelConfig(name="demo", tokenizer=SOURCE.path, chat_template=TEMPLATE),)
    async with asyncio.timeout(DEADLINE_S), running_engines([engine_config()]) as engines:
        with closed_port() as port, capture_logs() as logs:
            events = KvEvents(endpoint=f"tcp://127.0.0.1:{port}")
            pods = (PodConfig(url=engines[0].url, kv_events=events),)
            config = RouterConfig(pods=pods, probes=PROBES, models=models)
            async with serving(build_router(config, shipped("policies"), priors, load=loaded_tokenizer)) as (
                _,
                admin,
                _,
            ):
                while not any(line["event"] == "ready" for line in logs):
                    await asyncio.sleep(0.01)
                (pod,) = (await admin.get("/admin/pods")).json()
    reason = pod["matching_reason"]
    assert (pod["matching"], pod["trust"], pod["kv_events"]) == ("no_events", "trusted", "connecting")
    assert reason.startswith(f"no KV events: tcp://127.0.0.1:{port}: Connect")
    assert "check that the engine publishes there" in reason and "start it" not in reason
    changed, ready = (line for line in logs if line["event"] in ("matching changed", "ready"))
    assert (changed["log_level"], changed["pods"], changed["reason"]) == ("warning", [pod["id"]], reason)
    assert (ready["log_level"], ready["matching"]) == ("warning", f"of 1 pods, 1 by what they were sent: {reason}")
