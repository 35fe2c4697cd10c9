"""Policies, and the traffic of the public trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.simulated_peers.peer_pickers import policies_with_peers
from loadtest.simulator.traffic import TraceRequest, read_mooncake
from router.policy.spec import Policy

CONVERSATION = Path(__file__).parents[4] / "shared/data/conversation_trace.jsonl"


@pytest.fixture(scope="session")
def policies() -> dict[str, Policy]:
    """The shipped policies and the peers."""
    return policies_with_peers()


@pytest.fixture(scope="session")
def conversation() -> list[TraceRequest]:
    """The public conversation trace, an hour."""
    if not CONVERSATION.exists():
        pytest.skip("the conversation trace is missing: see loadtest/README.md")
    return read_mooncake(CONVERSATION)
