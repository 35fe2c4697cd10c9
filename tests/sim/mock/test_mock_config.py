"""Validation of a mock engine's configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from router.errors import ConfigError
from router.sim.mock.mock_config import HandoffConfig, MockEngineConfig
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


def test_an_sglang_engine_needs_a_role() -> None:
    """Both legs have the same body, so only the role distinguishes them."""
    with pytest.raises(ConfigError, match="requires role prefill or decode"):
        HandoffConfig(dialect="bootstrap")
    assert HandoffConfig(dialect="bootstrap", role=Role.DECODE).role is Role.DECODE
