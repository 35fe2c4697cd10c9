"""What is wrong is said with its reason, once, to operators, clients and alerts."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
from router.config.pod_schema import KvEvents, PodConfig
from router.config.schema import Edge, ModelConfig, RouterConfig
from router.fleet.breaker import Probes
from router.prompt.tokenizer import Tokenizer
from router.wiring.router import build_router
from tests.kit.closed_port import closed_port
from tests.kit.deadlines import DEADLINE_S
from tests.kit.raw_pods import RawPod, answering
from tests.kit.scenes import LLAMA_8B
from tests.loaded_tokenizers import loaded_tokenizer
from tests.redis_servers.server import free_port, tls_material
from tests.stories.conftest import SOURCE, TEMPLATE, Deploy, Deployment, serving

pytestmark = [pytest.mark.net, pytest.mark.anyio]


# --- pods that cannot be used ---


NO_MODELS = b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"data": []}'


@dataclass(frozen=True)
class Servers:
    """What the URLs of pods lead to."""

    engine: str
    keyed: str
    """An engine that asks for a key."""
    nobody: str
    no_models: str
    tls: str
    """With a certificate of a private authority."""


@asynccontextmanager
async def other_servers(keyed: str, engine: str, folder: Path) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:

        async def lists_no_models(context: ssl.SSLContext | None = None) -> str:
            pod = RawPod((answering(NO_MODELS),))
            server = await stack.enter_async_context(await asyncio.start_server(pod, "127.0.0.1", 0, ssl=context))
            return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

        files, context = tls_material(folder), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(files.certificate, files.key)
        nobody = stack.enter_context(closed_port())
        yield Servers(
            *(engine, keyed, f"http://127.0.0.1:{nobody}"),
            *(f"http://{await lists_no_models()}", f"https://{await lists_no_models(context)}"),
        )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")
async def test_a_pod_that_cannot_be_used_says_why(
    deploy: Deploy, engine_config: Callable[..., MockEngineConfig], tmp_path: Path
) -> None:
    """In /admin/pods, and once in the log. A pod that is ready has no reason."""
    with capture_logs() as logs:
        async with (
            deploy(pods=1) as deployment,
            running_engines([engine_config(api_key="engine-key")]) as (keyed,),
            other_servers(keyed.url, deployment.engines[0].url, tmp_path) as at,
        ):
            expected = {
                at.nobody: f"connection refused by {at.nobody[7:]}; check that the engine runs",
                "http://pod.invalid:8000": "unknown host name 'pod.invalid'; correct pods[].url",
                f"{at.engine}/v1/": "404 Not Found from /health; remove /v1, which the router appends, from pods[].url",
                f"{at.engine}/team": "404 Not Found from /health; check the path /team of pods[].url",
                at.keyed: "401 Unauthorized from /health; set pods[].auth.bearer_file",
                at.no_models: "/v1/models lists no models; check",
                at.tls: "TLS certificate not trusted (",
                at.engine.replace("http:", "https:"): "TLS handshake failed",
            }
            logged, pods = dict[str, Any](), dict[str, Any]()
            entries: list[dict[str, str]] = [{"url": url, "id": f"pod {n}"} for n, url in enumerate(expected)]
            for entry in entries:
                assert (await deployment.admin.post("/admin/pods", json=entry)).status_code == 201, entry

            async def all_are_explained() -> bool:
                logged.update({line["pod"]: line for line in logs if line["event"] == "pod cannot be used"})
                pods.update({pod["id"]: pod for pod in await deployment.pods()})
                return all(pods[entry["id"]]["state_reason"] and entry["id"] in logged for entry in entries)

            await deployment.until(all_are_explained)
    for entry, (url, reason) in zip(entries, expected.items(), strict=True):
        pod, line = pods[entry["id"]], logged[entry["id"]]
        assert pod["state"] == "joining" and pod["state_reason"].startswith(reason), url
        assert (line["log_level"], line["reason"]) == ("warning", pod["state_reason"]), url
    assert pods["pod 6"]["state_reason"].endswith("set pods[].tls.ca_file to the certificate of its authority")
    (well,) = [pod for pod in pods.values() if pod["id"] not in logged]
    assert (well["state"], well["state_reason"]) == ("ready", "")


# --- prompts that are not matched ---


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


# --- the log ---


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
