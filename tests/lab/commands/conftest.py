"""Runs commands as a user types them, with small input files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.command_line import typed

__all__ = ["typed"]

FLEET = """
about: two pods
model: llama-3.1-70b
pods:
  - {count: 2, hardware: h100x4, kv_tokens: 60000, gpus: 4}
conditions: {regret_every: 2}
"""
MIX = """
sessions_per_s: 4
duration_s: 5
kinds:
  chat: {prefixes: 2, prefix_tokens: [500, 900], output_tokens: [1, 9]}
  one_off: {output_tokens: [1, 9]}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """A fleet file of two pods."""
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


@pytest.fixture
def mix(tmp_path: Path) -> Path:
    """A mix file of about 20 requests."""
    path = tmp_path / "mix.yaml"
    path.write_text(MIX)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A Mooncake trace of 8 requests, one per second."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": 1000 * at, "input_length": 1200, "output_length": 3, "hash_ids": [1, 2, 10 + at]})
            + "\n"
            for at in range(8)
        )
    )
    return path
