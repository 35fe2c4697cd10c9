"""Recorded agent sessions become closed-loop traffic with the sharing of the recording."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulator.agent_sessions import (
    DURATION_S,
    STARTS_EVERY_S,
    AgentRequest,
    AgentSession,
    agent_traffic,
    read_agent_sessions,
)
from loadtest.simulator.traffic import Session, TrafficRequest
from router.errors import ConfigError

BLOCK = 64
AGENT_SESSIONS = Path(__file__).parents[4] / "shared/data/agent_sessions.jsonl"
FIRST = {"t": 0.0, "depth": 0, "prompt_tokens": 640, "output_tokens": 9, "stream": True, "think_s": 0, "api_s": 2.0}
SECOND = FIRST | {"t": 9.0, "prompt_tokens": 1000, "think_s": 7.0, "base": 0, "keep_blocks": 8}
LINE = {"id": "a", "model": "m", "tool_tokens": 100, "system_tokens": 60, "block_tokens": 64, "requests": [FIRST]}


def jsonl(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "agents.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def agent(
    *requests: tuple[int, int | None, int], tools: int = 2 * BLOCK, system: int = BLOCK, every_s: float = 1.0
) -> AgentSession:
    """A session of (prompt tokens, base, kept blocks)."""
    asked = [
        AgentRequest(number * every_s, tokens, 10, 0.5 if number else 0.0, base, keep)
        for number, (tokens, base, keep) in enumerate(requests)
    ]
    return AgentSession(BLOCK, asked, tools, system)


def played(recorded: Sequence[AgentSession], speedup: float = 1.0, seed: int = 0) -> list[Session]:
    return list(agent_traffic(recorded, speedup=speedup, seed=seed).sessions)


def shared(one: TrafficRequest, other: TrafficRequest) -> int:
    """Leading blocks that two prompts have in common."""
    pairs = zip(one.prompt_hashes, other.prompt_hashes, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_a_session_keeps_its_lengths_pauses_and_sharing() -> None:
    """The third request continues the first one, not the second."""
    session = played([agent((640, None, 0), (1000, 0, 8), (700, 0, 10))])[0]
    one, two, three = session.requests
    assert session.kind == "agent"
    assert [(each.prompt_tokens, each.output_tokens, each.think_s) for each in session.requests] == [
        (640, 10, 0.0),
        (1000, 10, 0.5),
        (700, 10, 0.5),
    ]
    assert [each.prompt_blocks for each in session.requests] == [10, 15, 10]
    assert (shared(one, two), shared(one, three), shared(two, three)) == (8, 10, 8)


def test_sessions_share_only_equal_tools_and_system_prompts() -> None:
    """Whole blocks of them, also between two starts of one recording."""
    same, other = agent((640, None, 0)), agent((640, None, 0), tools=BLOCK)
    sessions = played([same, same])
    assert {shared(a.requests[0], b.requests[0]) for a, b in pairwise(sessions)} == {3}
    first = {session.requests[0].blocks[0]: session.requests[0] for session in played([same, other])}
    one, two = first.values()
    assert shared(one, two) == 0


def test_a_prompt_shorter_than_its_tools_has_only_its_own_blocks() -> None:
    """Two of the three shared ones."""
    (only,) = played([agent((150, None, 0))])[0].requests
    assert (len(only.blocks), only.prompt_blocks) == (2, 2)


agents = st.lists(st.integers(1, 40).map(lambda n: agent(*[(200, None, 0)] * n, every_s=300.0)), min_size=1, max_size=4)


@given(recorded=agents, speedup=st.sampled_from([0.5, 1.0, 3.0]), seed=st.integers(0, 5))
def test_no_request_is_recorded_after_the_end(recorded: list[AgentSession], speedup: float, seed: int) -> None:
    """Starts are in order, and every session begins."""
    sessions = played(recorded, speedup, seed)
    starts_s = [session.start_s for session in sessions]
    assert starts_s == sorted(starts_s)
    for session in sessions:
        assert session.requests
        assert session.start_s + (len(session.requests) - 1) * 300.0 < DURATION_S


def test_a_load_multiplies_the_rate_of_starts_and_not_the_pauses() -> None:
    """About 80 starts in two hours at load 1."""
    recorded = [agent((200, None, 0), (300, 0, 3))]
    numbers = {load: len(played(recorded, load)) for load in (0.5, 1.0, 2.0)}
    expected = DURATION_S / STARTS_EVERY_S
    assert all(0.7 * load * expected < number < 1.3 * load * expected for load, number in numbers.items())
    assert {session.requests[1].think_s for session in played(recorded, 2.0)} == {0.5}


def test_every_session_starts_once_before_any_starts_again() -> None:
    """In an order that depends on the seed alone."""
    recorded = [agent((200 + number, None, 0)) for number in range(10)]

    def order(seed: int) -> list[int]:
        return [session.requests[0].prompt_tokens for session in played(recorded, seed=seed)]

    assert sorted(order(0)[:10]) == sorted(order(0)[10:20]) == list(range(200, 210))
    assert order(0) == order(0) != order(1)


def test_a_file_is_read(tmp_path: Path) -> None:
    """Unknown fields are ignored."""
    (session,) = read_agent_sessions(jsonl(tmp_path, LINE | {"requests": [FIRST, SECOND]}))
    assert (session.tool_tokens, session.system_tokens, session.block_tokens) == (100, 60, 64)
    assert session.requests[1] == AgentRequest(9.0, 1000, 9, 7.0, 0, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": []}, "length >= 1"),
        ({"block_tokens": 0}, ">= 1"),
        ({"requests": [FIRST | {"prompt_tokens": 0}]}, ">= 1"),
        ({"requests": [FIRST | {"prompt_tokens": 1 << 40}]}, "<= 16777216"),
        ({"requests": [FIRST | {"base": 0, "keep_blocks": 1}]}, "request 0: base 0 is not an earlier request"),
        ({"requests": [FIRST, SECOND | {"keep_blocks": 11}]}, "request 1: keep_blocks 11 exceeds 640 prompt tokens"),
        ({"requests": [FIRST | {"think_s": -1}]}, ">= 0"),
    ],
)
def test_an_invalid_line_is_reported(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """With file, line and reason."""
    with pytest.raises(ConfigError, match=rf"agents\.jsonl:2: invalid line of agent sessions: .*{message}"):
        read_agent_sessions(jsonl(tmp_path, LINE, LINE | change))


def test_different_block_sizes_and_empty_files_are_reported(tmp_path: Path) -> None:
    """A simulation has one block size."""
    with pytest.raises(ConfigError, match=r"one `block_tokens`; found \[16, 64\]"):
        read_agent_sessions(jsonl(tmp_path, LINE, LINE | {"block_tokens": 16}))
    with pytest.raises(ConfigError, match=r"found \[\]"):
        read_agent_sessions(jsonl(tmp_path))


def test_nearly_all_of_the_public_sessions_is_reuse() -> None:
    """Each prompt holds what its session sent before: 96 % of all tokens."""
    if not AGENT_SESSIONS.exists():
        pytest.skip("the agent sessions are missing: see loadtest/README.md")
    recorded = read_agent_sessions(AGENT_SESSIONS)
    kept = sum(one.keep_blocks * BLOCK for session in recorded for one in session.requests)
    assert (len(recorded), sum(len(session.requests) for session in recorded)) == (61, 3445)
    assert kept / sum(one.prompt_tokens for session in recorded for one in session.requests) == pytest.approx(
        0.96, abs=0.01
    )
