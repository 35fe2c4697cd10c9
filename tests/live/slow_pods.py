"""Two real vLLM pods of a random model that is large enough to compute for longer than HTTP takes.

Each has a core of its own, and room for a few conversations only. This file measures nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from tests.live.calibrate import Calibration
from tests.live.engines import HOME, EngineProcess, start_vllm

MODEL = HOME / "model" / "tiny-llama"
SHAPE = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
KV_BLOCKS = 256
STEP_TOKENS = 8192


@pytest.fixture(scope="module")
def slow_pods() -> Iterator[list[EngineProcess]]:
    """Two, each with a core for itself."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("two pods that do not slow one another need two cores")
    with ThreadPoolExecutor(2) as threads:
        started = list(threads.map(start_pod, range(2), cores))
    try:
        yield started
    finally:
        for pod in started:
            pod.kill()


def start_pod(number: int, core: int) -> EngineProcess:
    """On that core: processes inherit the place of the thread that starts them."""
    os.sched_setaffinity(0, {core})
    args = (
        *("--load-format", "dummy", "--hf-overrides", json.dumps(SHAPE), "--no-async-scheduling"),
        *("--max-num-batched-tokens", str(STEP_TOKENS), "--num-gpu-blocks-override", str(KV_BLOCKS)),
        *("--max-model-len", "4096"),
    )
    return start_vllm(f"simulated-{number}", 18051 + number, MODEL, kv_port=15601 + number, extra_args=args)


def speed_of(one: Calibration) -> dict[str, float]:
    """As the router's configuration has it."""
    return asdict(one.speed)
