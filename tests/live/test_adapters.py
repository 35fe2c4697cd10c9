"""Two LoRA adapters and their base on one real vLLM pod: what the router predicts is what the engine takes from its
cache, in every request, also after other weights took an adapter's name."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

from tests.live.engines import HOME, start_vllm
from tests.live.live_fleet import Answer, LiveFleet, answer_of, live_fleet

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

MODEL = HOME / "model" / "tiny-qwen3"
MODELS = ("tiny", "sql", "chat")
HIDDEN, HEADS, RANK = 128, 128, 8
VOCABULARY = 150_000
PREDICTED_S = 0.01
"""So that the pod's events alone explain its hits."""


def write_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of the query projections with random weights."""
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    random_bytes, header, data = random.Random(seed), dict[str, object](), b""
    for layer in range(2):
        for name, shape in (("lora_A", (RANK, HIDDEN)), ("lora_B", (HEADS, RANK))):
            values = [random_bytes.uniform(-1, 1) for _ in range(shape[0] * shape[1])]
            packed = struct.pack(f"<{len(values)}f", *values)
            key = f"base_model.model.model.layers.{layer}.self_attn.q_proj.{name}.weight"
            header[key] = {"dtype": "F32", "shape": shape, "data_offsets": (len(data), len(data) + len(packed))}
            data += packed
    described = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(described)) + described + data)
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, number) for number, name in enumerate(("sql", "chat", "newer"))}


@pytest.fixture(scope="module")
def fleet(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    modules = (f"{name}={adapters[name]}" for name in ("sql", "chat"))
    flags = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *modules)
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    start = partial(start_vllm, model_dir=MODEL, extra_args=flags, environment=environment)
    config = {"index": {"predicted_ttl_s": PREDICTED_S}}
    with live_fleet("adapters", tmp_path_factory.mktemp("router"), MODEL, start, pods=1, config=config) as running:
        yield running


async def ask(client: openai.AsyncOpenAI, model: str, prompt: list[int]) -> Answer:
    raw = await client.completions.with_raw_response.create(model=model, prompt=prompt, max_tokens=4, temperature=0)
    return answer_of(raw.headers, raw.parse().model_dump(exclude_none=True))


async def test_every_prediction_is_what_the_engine_reports(fleet: LiveFleet) -> None:
    """Sessions share their starts over all models, whose blocks differ."""
    source, hits = random.Random(1), 0
    start = [source.randrange(VOCABULARY) for _ in range(100)]
    sessions = [(model, [*start, *(source.randrange(VOCABULARY) for _ in range(40))]) for model in MODELS * 3]
    async with fleet.openai_sdk() as client:
        for _ in range(6):
            for model, tokens in sessions:
                answer = await ask(client, model, tokens)
                assert answer.predicted == answer.reported, model
                hits += answer.reported
                tokens += [source.randrange(VOCABULARY) for _ in range(source.randrange(10, 90))]
    assert hits > 5_000


async def test_other_weights_under_an_adapters_name_hit_nothing_old(
    fleet: LiveFleet, adapters: dict[str, Path]
) -> None:
    """The first prompt after the change is expected to hit: no event has said yet that the weights are others."""
    source = random.Random(2)
    prompts = [[source.randrange(VOCABULARY) for _ in range(200)] for _ in range(3)]
    async with fleet.openai_sdk() as client:
        for prompt in prompts:
            await ask(client, "sql", prompt)
            await ask(client, "chat", prompt)
        load = {"lora_name": "sql", "lora_path": str(adapters["newer"]), "load_inplace": True}
        async with httpx.AsyncClient(base_url=fleet.pods[0].url, timeout=60) as engine:
            (await engine.post("/v1/load_lora_adapter", json=load)).raise_for_status()
        first, clock = await ask(client, "sql", prompts[0]), asyncio.get_running_loop()
        until_s = clock.time() + 2 * PREDICTED_S
        while clock.time() < until_s:  # the router's own predictions end
            await ask(client, "chat", prompts[0])
        later = [await ask(client, "sql", prompt) for prompt in prompts[1:]]
        others = [await ask(client, "chat", prompt) for prompt in prompts]
    assert (first.predicted, first.reported) == (192, 0)
    assert [(one.predicted, one.reported) for one in later] == [(0, 0)] * 2
    assert [(one.predicted, one.reported) for one in others] == [(192, 192)] * 3
