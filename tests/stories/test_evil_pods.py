"""A pod that reports nonsense, or too much, harms nobody but itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from loadtest.mock_engine import mock_responses
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import running_engines
from router.config.load import shipped
from router.config.models import ModelPrior
from router.config.pod_schema import PodConfig
from router.config.schema import ModelConfig, RouterConfig
from router.engines.prometheus import METRICS
from router.fleet.breaker import Probes
from router.wiring.router import build_router
from tests.kit.deadlines import DEADLINE_S
from tests.loaded_tokenizers import loaded_tokenizer
from tests.stories.conftest import SOURCE, TEMPLATE, Deploy, serving
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]

UNQUOTED = b'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{' + b"a" * 60_000 + b"} 1\n"
WAITING = b"".join(b'vllm:num_requests_waiting{engine="%d"} 1e308\n' % rank for rank in range(4))
ENORMOUS = b"#" * METRICS.max_bytes
WHOLE_PAGES = {"metrics_filter": "ignored"}
"""A pod that filters its metrics would send little."""


@pytest.fixture
def first_pod_reports(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the metrics of the first pod that is asked begin with; empty for nothing."""
    prefix, asked = list[bytes](), list[object]()
    real = mock_responses.metrics_body

    def evil(config: object, pod: object, *more: object) -> bytes:
        asked.append(pod)
        body: bytes = real(config, pod, *more)  # type: ignore[arg-type]
        return b"".join(prefix) + body if pod is asked[0] else body

    monkeypatch.setattr(mock_responses, "metrics_body", evil)
    return prefix


async def test_every_chat_is_served(deploy: Deploy, first_pod_reports: list[bytes]) -> None:
    """The only pod serves it, with any report."""
    async with deploy(pods=1, engine=WHOLE_PAGES) as deployment:
        for page in (WAITING, UNQUOTED, ENORMOUS):
            first_pod_reports[:] = [page]  # once the pod is trusted: an ejected one would not become so
            for number in range(3):
                assert (await deployment.chat(opening(f"evil {number}"))).status_code == 200


async def test_a_pod_with_enormous_metrics_is_ejected_by_name(deploy: Deploy, first_pod_reports: list[bytes]) -> None:
    """With the reason, where operators look for it."""
    async with deploy(pods=2, engine=WHOLE_PAGES) as deployment:
        first_pod_reports.append(ENORMOUS)
        await deployment.until(lambda: deployment.ready() == 1)
        assert (await deployment.chat(opening("good"))).status_code == 200
        reasons = [pod["state_reason"] for pod in await deployment.pods() if pod["state"] == "ejected"]
        assert len(reasons) == 1 and reasons[0].startswith("page of metrics: ")


@pytest.mark.parametrize("allowed", [(), ("other", "lora-*")])
async def test_a_pod_that_lists_models_of_others_is_named_or_limited(
    engine_config: Callable[..., MockEngineConfig], priors: dict[str, ModelPrior], allowed: tuple[str, ...]
) -> None:
    """It would receive their prompts. A warning names it, unless its `models` are configured: then it does not."""
    configs = [engine_config(models=("demo",)), engine_config(models=("other", "demo"))]
    with capture_logs() as logs:
        async with asyncio.timeout(DEADLINE_S), running_engines(configs) as (good, evil):
            pods = (PodConfig(url=good.url), PodConfig(url=evil.url, models=allowed))
            models = (ModelConfig(name="demo", tokenizer=SOURCE.path, chat_template=TEMPLATE),)
            config = RouterConfig(pods=pods, models=models, probes=Probes(health_interval_s=0.1))
            program = build_router(config, shipped("policies"), priors, load=loaded_tokenizer)
            async with serving(program) as (_, admin, _):
                shown: list[dict[str, Any]] = []
                while not shown or any(pod["state"] != "ready" for pod in shown):
                    shown = (await admin.get("/admin/pods")).json()
    served = {tuple(pod["models"]) for pod in shown}
    warned = [line for line in logs if line["event"] == "pod lists models of others"]
    assert served == ({("demo",), ("other",)} if allowed else {("demo",), ("other", "demo")})
    assert bool(warned) is not bool(allowed)
