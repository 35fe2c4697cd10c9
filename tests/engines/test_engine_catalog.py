"""The table of engines."""

from __future__ import annotations

from typing import get_args

from router.config.schema import EngineName
from router.engines.engine_catalog import ENGINES


def test_every_engine_that_can_be_configured_can_be_spoken_to() -> None:
    """And no other."""
    assert set(ENGINES) == set(get_args(EngineName))
