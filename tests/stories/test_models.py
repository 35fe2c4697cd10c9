"""Models of all kinds behind one router: two at once, one that nobody listed, and adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from structlog.testing import capture_logs
from structlog.typing import EventDict
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import running_engines
from loadtest.mock_engine.vocabulary import WORDS
from router.config.load import shipped
from router.config.models import ModelPrior, prior_speed
from router.config.pod_schema import PodConfig
from router.config.schema import CostPrior, ModelConfig, RouterConfig
from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.feeds import probe
from router.fleet.breaker import Probes
from router.policy.calibration import class_key
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.types import PodState, PrefixTrust
from router.wiring.router import build_router
from tests.kit.deadlines import DEADLINE_S
from tests.loaded_tokenizers import loaded_tokenizer
from tests.stories.conftest import SOURCE, TEMPLATE, Deploy, Deployment, opening, serving

pytestmark = [pytest.mark.net, pytest.mark.anyio]


# --- two models with different tokenizers, block sizes and hardware ---


COSTS = {
    "small": CostPrior(model="llama-3.1-8b", hardware="h100x1"),
    "large": CostPrior(model="qwen3-32b", hardware="h100x2"),
}
BLOCK_TOKENS = {"small": 16, "large": 64}


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small tokenizer that has the words of the engines' answers as tokens."""
    folder = tmp_path_factory.mktemp("words")
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    words = {"vocab_size": 4096, "initial_alphabet": ByteLevel.alphabet(), "show_progress": False}
    trainer = BpeTrainer(**words)  # type: ignore[no-untyped-call]
    backend.train_from_iterator([f"{word.capitalize()} {word}" for word in WORDS] * 3, trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


async def test_each_model_has_its_own_tokens_blocks_and_costs(
    word_tokenizer: Path,
    tokenizer: Tokenizer,
    engine_config: Callable[..., MockEngineConfig],
    priors: dict[str, ModelPrior],
) -> None:
    """Each pod has its model's prior, is trusted, and is calibrated apart from the other model."""
    words_source = TokenizerSource(str(word_tokenizer), TEMPLATE)
    by_model = {"small": tokenizer, "large": load_tokenizer(words_source, fast=False)}
    sources = {"small": SOURCE, "large": words_source}
    engines = [
        engine_config(
            models=(name,),
            tokenizer=by_model[name],
            render=ChatTemplate(by_model[name]).render,
            block_size_tokens=BLOCK_TOKENS[name],
        )
        for name in COSTS
    ]
    async with asyncio.timeout(DEADLINE_S), running_engines(engines) as running:
        config = RouterConfig(
            models=tuple(
                ModelConfig(
                    name=name,
                    tokenizer=sources[name].path,
                    chat_template=TEMPLATE,
                    block_size_tokens=BLOCK_TOKENS[name],
                    cost=COSTS[name],
                )
                for name in COSTS
            ),
            pods=tuple(PodConfig(url=engine.url) for engine in running),
            probes=Probes(health_interval_s=0.1, load_interval_s=0.05, self_test_interval_s=0.2),
        )
        by_path = {sources[name].path: by_model[name] for name in COSTS}
        program = build_router(config, shipped("policies"), priors, load=lambda source, *, fast: by_path[source.path])
        async with serving(program) as (client, admin, _):

            def pods() -> dict[str, Any]:
                ready = [one.pod for one in program.fleet.snapshot.pods if one.state is PodState.READY]
                return {pod.models[0]: pod for pod in ready if pod.models and pod.trust is PrefixTrust.TRUSTED}

            while pods().keys() != COSTS.keys():
                await asyncio.sleep(0.01)
            for name, cost in COSTS.items():
                assert pods()[name].speed == prior_speed(priors, cost)
                assert pods()[name].kv_bytes_per_token == priors[cost.model].kv_bytes_per_token
                body = {"model": name, "messages": opening("tides"), "max_tokens": 4}
                for expects_hit in (False, True):
                    answer = await client.post("/v1/chat/completions", json=body)
                    assert answer.headers["x-warmroute-pod"] == pods()[name].id
                    cached = int(answer.headers["x-warmroute-cached-tokens"])
                    assert cached % BLOCK_TOKENS[name] == 0
                    assert bool(cached) is expects_hit
                assert class_key(pods()[name]).startswith(f"{name}/")
                found = await admin.get(f"/admin/explain/{answer.headers['x-request-id']}")
                (column,) = found.json()["explanation"]["columns"]
                assert column["costs_of"] == class_key(pods()[name])


# --- a model of which only the URL of a pod is known ---


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


# --- LoRA adapters ---


LORA = {"lora_name": "sql", "lora_path": "/adapters/sql"}


async def _change(deployment: Deployment, what: str, **fields: Any) -> httpx.Response:
    return await deployment.admin.post(f"/v1/{what}_lora_adapter", json={**LORA, **fields})


async def _directly(deployment: Deployment, what: str) -> None:
    """On the first engine, without the router."""
    async with httpx.AsyncClient(base_url=deployment.engines[0].url) as engine:
        (await engine.post(f"/v1/{what}_lora_adapter", json=LORA)).raise_for_status()


def _pods(deployment: Deployment) -> list[str]:
    return [status.pod.id for status in deployment.program.fleet.snapshot.pods]


async def test_all_pods_load_and_unload_an_adapter(deploy: Deploy) -> None:
    """Clients can use it as soon as the answer is there, and no longer than until it is unloaded."""
    async with deploy(pods=2) as deployment:
        loaded = await _change(deployment, "load")
        assert (loaded.status_code, loaded.json()) == (200, {"pods": dict.fromkeys(_pods(deployment), "loaded")})
        used = await deployment.chat([{"role": "user", "content": "Hi"}], model="sql")
        assert used.status_code == 200
        again = await _change(deployment, "load")
        assert (again.status_code, set(again.json()["pods"].values())) == (200, {"already loaded"})
        unloaded = await _change(deployment, "unload", model="demo")
        assert (unloaded.status_code, set(unloaded.json()["pods"].values())) == (200, {"unloaded"})
        gone = await deployment.chat([{"role": "user", "content": "Hi"}], model="sql")
        assert gone.status_code == 404


async def test_a_partial_failure_names_each_pod_and_is_repeatable(deploy: Deploy) -> None:
    """One engine has the adapter already, which the router does not know: vLLM refuses to load it twice."""
    async with deploy(pods=2) as deployment:
        await _directly(deployment, "load")
        first, second = _pods(deployment)
        partly = await _change(deployment, "load")
        assert partly.status_code == 502
        assert partly.json()["error"]["code"] == "adapter_not_on_all_pods"
        answers = partly.json()["pods"]
        assert sorted(answers) == sorted([first, second])
        assert sorted(answer.partition(":")[0] for answer in answers.values()) == ["loaded", "status 400"]
        repeated = await _change(deployment, "load", load_inplace=True)
        assert set(repeated.json()["pods"].values()) == {"loaded"}
        assert all("sql" in status.pod.adapters for status in deployment.program.fleet.snapshot.pods)


async def test_adapters_that_others_load_are_found(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another router, or the operator on the pod itself."""
    monkeypatch.setattr(probe, "ADAPTERS_INTERVAL_S", 0.05)
    async with deploy(pods=1) as deployment:
        await _directly(deployment, "load")
        await deployment.until(lambda: deployment.ready("sql") == 1)
        await _directly(deployment, "unload")
        await deployment.until(lambda: deployment.ready("sql") == 0)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"lora_name": ""}, 400, "`lora_name` must be a string"),
    ({"lora_name": "demo"}, 400, "the name of a model"),
    ({"model": "other"}, 404, "No pod serves the model `other`"),
]


async def test_what_is_refused_reaches_no_pod(deploy: Deploy) -> None:
    """With the reason."""
    async with deploy(pods=1) as deployment:
        for fields, status, what in REFUSED:
            refused = await _change(deployment, "load", **fields)
            assert refused.status_code == status
            assert what in refused.json()["error"]["message"]
            assert "pods" not in refused.json()


async def test_an_engine_without_adapters_is_refused(deploy: Deploy) -> None:
    """llama.cpp loads adapters at its start alone."""
    reach = {"engine": "llamacpp"}
    async with deploy(pods=1, reach=lambda engine: {"url": engine.url, **reach}, wait=False) as deployment:
        await deployment.until(lambda: deployment.ready() == 1)
        refused = await _change(deployment, "load")
        assert refused.status_code == 400
        assert "(llamacpp) loads no adapters at run time" in refused.json()["error"]["message"]
