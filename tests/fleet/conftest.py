"""Pods to put into a fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from router.types import Pod, PodSpeed

MakePod = Callable[..., Pod]


@pytest.fixture(scope="session")
def make_pod() -> MakePod:
    """A vLLM pod with that id and these facts."""

    def make(pod_id: str, **facts: Any) -> Pod:
        usual: dict[str, Any] = {"url": f"http://{pod_id}:8000", "engine": "vllm", "speed": PodSpeed(1.0, 0.02, 1e-6)}
        return Pod(id=pod_id, **(usual | facts))

    return make
