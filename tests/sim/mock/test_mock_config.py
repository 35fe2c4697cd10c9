"""Validation of a mock engine's configuration."""

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
def test_a_contradictory_configuration_is_an_error(make_config: MakeConfig, wrong: dict[str, Any], named: str) -> None:
    """As vLLM, which refuses to start if one request cannot fit into the cache."""
    with pytest.raises(ConfigError, match=named):
        make_config(**wrong)


def test_the_pod_configuration_has_the_engines_values(make_config: MakeConfig) -> None:
    """Limits and sizes have the same names in the pod's configuration."""
    config = make_config(num_blocks=200, max_num_seqs=3, step_budget_tokens=99, block_size_tokens=32)
    pod = config.pod
    assert (pod.num_blocks, pod.max_num_seqs, pod.step_budget_tokens, pod.block_size_tokens) == (200, 3, 99, 32)
    assert pod.speed == config.speed


def test_the_event_encoding_selects_the_release(make_config: MakeConfig) -> None:
    """Maps since vLLM 0.24, arrays before."""
    assert make_config().release == "0.32.0"
    assert make_config(kv_events=None).release == "0.32.0"
    assert make_config(kv_events=KvEventConfig(encoding="array")).release == "0.23.0"


def test_an_sglang_engine_needs_a_role() -> None:
    """Both legs have the same body, so only the role distinguishes them."""
    with pytest.raises(ConfigError, match="requires role prefill or decode"):
        HandoffConfig(dialect="bootstrap")
    assert HandoffConfig(dialect="bootstrap", role=Role.DECODE).role is Role.DECODE
