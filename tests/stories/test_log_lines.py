"""The log: each change of a pod is one line, and no line is repeated without a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from loadtest.mock_engine.faults import Fault, FaultKind
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import running_engines
from router.config.index_schema import Index, RedisIndex
from router.config.load import shipped
from router.config.models import ModelPrior
from router.config.pod_schema import PodConfig
from router.config.schema import ModelConfig, RouterConfig
from router.fleet.breaker import Probes
from router.prompt.tokenizer import Tokenizer
from router.wiring.router import build_router
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scenes import LLAMA_8B
from tests.redis_servers.server import free_port
from tests.stories.conftest import SOURCE, TEMPLATE, Deployment, serving

pytestmark = [pytest.mark.net, pytest.mark.anyio]

PERIOD_S = 0.02
FLAPS = 2
Line = Mapping[str, Any]


def subject_of(line: Line) -> Any:
    """What a line is about: a pod, a call of Redis, a feed, or its event alone."""
    return next((line[name] for name in ("pod", "call", "feed") if name in line), line["event"])


def repeated(lines: list[Line]) -> list[Line]:
    """The lines that equal the previous line about the same subject."""
    last: dict[Any, Line] = {}
    found = []
    for line in lines:
        if last.get(subject_of(line)) == line:
            found.append(line)
        last[subject_of(line)] = line
    return found


async def test_dead_and_flapping_pods_and_a_dead_redis_repeat_no_line(
    engine_config: Callable[..., MockEngineConfig], tokenizer: Tokenizer, priors: dict[str, ModelPrior]
) -> None:
    """Over hundreds of probes, scrapes and attempts to reach Redis."""
    with capture_logs() as lines:
        async with asyncio.timeout(DEADLINE_S), running_engines([engine_config()] * 2) as engines:
            urls = {"a": engines[0].url, "b": engines[1].url, "dead": f"http://127.0.0.1:{free_port()}"}
            redis = RedisIndex(url=SecretStr(f"redis://127.0.0.1:{free_port()}/0"), ready_timeout_s=0.1, timeout_s=0.1)
            config = RouterConfig(
                models=(ModelConfig(name="demo", tokenizer=SOURCE.path, chat_template=TEMPLATE),),
                pods=tuple(PodConfig(url=url, id=name, speed=LLAMA_8B) for name, url in urls.items()),
                probes=Probes(health_interval_s=PERIOD_S, load_interval_s=PERIOD_S, self_test_interval_s=PERIOD_S),
                index=Index(redis=redis),
            )
            program = build_router(config, shipped("policies"), priors, load=lambda source, *, fast: tokenizer)
            async with serving(program) as (client, admin, url):
                deployment = Deployment(engines, program, client, admin, url)
                await deployment.until(partial(has, lines, 1, pod="b", new="ready"))
                for times in range(1, FLAPS + 1):
                    engines[1].inject(Fault(kind=FaultKind.REFUSE))
                    await deployment.until(partial(has, lines, times, pod="b", new="ejected"))
                    await engines[1].heal()
                    await deployment.until(partial(has, lines, times + 1, pod="b", new="ready"))
    assert not repeated(list(lines))
    assert count(lines, pod="dead", event="pod cannot be used") == 1
    ejected = [line for line in lines if line.get("new") == "ejected"]
    assert {(line["log_level"], line["reason"]) for line in ejected} == {("warning", "3 health checks in a row failed")}
    ready = [line for line in lines if line.get("new") == "ready"]
    assert {(line["log_level"], line["reason"]) for line in ready} == {("info", "health check passed")}


def has(lines: list[Any], number: int, **fields: str) -> bool:
    """Whether this number of lines, or more, have these fields."""
    return count(lines, **fields) >= number


def count(lines: list[Any], **fields: str) -> int:
    """Number of lines with these fields."""
    return sum(fields.items() <= line.items() for line in lines)
