"""Two models with different tokenizers, block sizes and hardware behind one router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
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
from router.fleet.breaker import Probes
from router.policy.calibration import class_key
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.types import PodState, PrefixTrust
from router.wiring.router import build_router
from tests.kit.deadlines import DEADLINE_S
from tests.stories.conftest import SOURCE, TEMPLATE, serving
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]
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
