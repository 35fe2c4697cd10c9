"""Pods of the engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.types import Pod, PodSpeed

MakePod = Callable[..., Pod]


@pytest.fixture(scope="session")
def make_pod() -> MakePod:
    """A pod of an engine, optionally with a rank."""

    def make(engine: str, dp_rank: int | None = None, url: str = "http://10.0.0.7:8000") -> Pod:
        return Pod(id="pod", url=url, engine=engine, speed=PodSpeed(1.0, 0.02, 0.0), dp_rank=dp_rank)

    return make
