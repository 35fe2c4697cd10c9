"""What a mock engine may be told to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from router.errors import ConfigError
from router.sim.mock.mock_config import HandoffConfig, KvEventConfig, MockEngineConfig
from router.types import Role

MakeConfig = Callable[..., MockEngineConfig]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_model_len": 4097}, "max_model_len 4097 exceeds a cache of 4096 tokens"),
        ({"models": ()}, "models is empty"),
        ({"time_scale": -0.1}, "time_scale -0.1"),
    ],
)
def test_a_contradictory_engine_is_refused_at_birth(make_config: MakeConfig, wrong: dict[str, Any], named: str) -> None:
    """As vLLM refuses to start where one request could not fit into the cache."""
    with pytest.raises(ConfigError, match=named):
        make_config(**wrong)


def test_the_scheduler_gets_its_part_unchanged(make_config: MakeConfig) -> None:
    """Limits and sizes reach the pod under the same names."""
    config = make_config(num_blocks=200, max_num_seqs=3, step_budget_tokens=99, block_size_tokens=32)
    pod = config.pod
    assert (pod.num_blocks, pod.max_num_seqs, pod.step_budget_tokens, pod.block_size_tokens) == (200, 3, 99, 32)
    assert pod.speed == config.speed


def test_the_event_encoding_tells_the_release(make_config: MakeConfig) -> None:
    """Maps since vLLM 0.24, arrays before."""
    assert make_config().release == "0.32.0"
    assert make_config(kv_events=None).release == "0.32.0"
    assert make_config(kv_events=KvEventConfig(encoding="array")).release == "0.23.0"


def test_an_sglang_engine_needs_a_mode() -> None:
    """Both legs get one body there: an engine that is both could not tell which it has."""
    with pytest.raises(ConfigError, match="requires role prefill or decode"):
        HandoffConfig(dialect="bootstrap")
    assert HandoffConfig(dialect="bootstrap", role=Role.DECODE).role is Role.DECODE
