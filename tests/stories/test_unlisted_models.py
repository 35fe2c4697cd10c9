"""A router that knows only the URL of a pod routes by its cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import running_engines
from router.config.load import shipped
from router.config.models import ModelPrior
from router.config.pod_schema import PodConfig
from router.config.schema import RouterConfig
from router.fleet.breaker import Probes
from router.wiring.router import build_router
from tests.kit.deadlines import DEADLINE_S
from tests.loaded_tokenizers import loaded_tokenizer
from tests.stories.conftest import serving

pytestmark = [pytest.mark.anyio, pytest.mark.net]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "one word " * 200}], "max_tokens": 2}
PROBES = Probes(health_interval_s=0.1, load_interval_s=0.05, self_test_interval_s=0.2)


@pytest.fixture
def lines() -> Iterator[list[EventDict]]:
    """The log lines of the test."""
    with capture_logs() as captured:
        yield captured


@pytest.mark.parametrize(
    ("settings", "hit"), [({"unlisted_models": "engine"}, True), ({"unlisted_models": "load_only"}, False)]
)
async def test_an_unlisted_model_is_tokenized_by_its_pods_if_configured(
    settings: dict[str, Any],
    hit: bool,
    engine_config: Callable[..., MockEngineConfig],
    priors: dict[str, ModelPrior],
    lines: list[EventDict],
) -> None:
    """`serve --pod URL` configures it; else load alone decides."""
    async with asyncio.timeout(DEADLINE_S), running_engines([engine_config()] * 2) as engines:
        pods = tuple(PodConfig(url=engine.url) for engine in engines)
        config = RouterConfig(pods=pods, probes=PROBES, **settings)
        program = build_router(config, shipped("policies"), priors, load=loaded_tokenizer)
        async with serving(program) as (client, admin, _):
            while {(pod["state"], pod["trust"] == "trusted") for pod in (await admin.get("/admin/pods")).json()} != {
                ("ready", hit)
            }:
                await asyncio.sleep(0.01)
            events = {line["event"] for line in lines}
            assert "prompt routed without prefix matching" not in events, "a self-test is no request"
            first = await client.post("/v1/chat/completions", json=CHAT)
            second = await client.post("/v1/chat/completions", json=CHAT)
    assert first.status_code == second.status_code == 200
    assert (int(second.headers.get("x-warmroute-cached-tokens", 0)) > 0) is hit
    assert not hit or second.headers["x-warmroute-pod"] == first.headers["x-warmroute-pod"]
