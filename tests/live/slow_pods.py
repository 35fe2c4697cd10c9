"""Two real vLLM pods whose random model is large enough that computation dominates HTTP.

Each has its own core and KV for a few conversations only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import pytest

from tests.live.calibrate import Calibration
from tests.live.engines import HOME, EngineProcess, start_vllm, started_together

MODEL = HOME / "model" / "tiny-llama"
SHAPE = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
KV_BLOCKS = 256
STEP_TOKENS = 8192


@pytest.fixture(scope="module")
def slow_pods() -> Iterator[list[EngineProcess]]:
    """Two pods, each with its own core."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("two independent pods need two cores")
    with started_together([partial(start_pod, number, core) for number, core in enumerate(cores)]) as pods:
        yield pods


def start_pod(number: int, core: int) -> EngineProcess:
    """Run on that core: processes inherit the affinity of the thread that starts them."""
    os.sched_setaffinity(0, {core})
    args = (
        *("--load-format", "dummy", "--hf-overrides", json.dumps(SHAPE), "--no-async-scheduling"),
        *("--max-num-batched-tokens", str(STEP_TOKENS), "--num-gpu-blocks-override", str(KV_BLOCKS)),
        *("--max-model-len", "4096"),
    )
    return start_vllm(f"simulated-{number}", 18051 + number, MODEL, kv_port=15601 + number, extra_args=args)


def speed_of(one: Calibration) -> dict[str, float]:
    """The speed as in the router's configuration."""
    return asdict(one.speed)
