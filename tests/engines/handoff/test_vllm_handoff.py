"""The legs of vLLM's connectors."""

from __future__ import annotations

import pytest

from router.engines.handoff.vllm_handoff import prefill_leg, takes_prompt_tokens
from tests.engines.handoff.pairs import CHAT, COMPLETIONS, chat, completion, pod, read


def test_a_prefill_leg_asks_for_one_token_and_no_stream() -> None:
    """With both names of the limit where a chat uses both, and without what contradicts one token."""
    leg = read(prefill_leg(CHAT, chat(min_tokens=4, n=1, tools=[{"a": 1}], cache_salt="s", tool_choice="required")))
    assert leg == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 1,
        "max_tokens": 1,
        "stream": False,
        "tools": [{"a": 1}],
        "cache_salt": "s",
        "tool_choice": "required",
    }


def test_a_completion_knows_only_one_limit() -> None:
    """What it may mean by the other is its own affair."""
    assert read(prefill_leg(COMPLETIONS, completion())) == {
        "model": "m",
        "prompt": "hi",
        "max_tokens": 1,
        "stream": False,
    }
    assert read(prefill_leg(COMPLETIONS, completion(max_completion_tokens=5)))["max_completion_tokens"] == 5


@pytest.mark.parametrize(
    ("version", "takes"),
    [("0.27.0", True), ("v0.27.1rc1", True), ("0.33.0.dev2+g1a", True), ("1.0", True), ("0.26.9", False), ("", False)],
)
def test_prompt_tokens_are_given_only_to_releases_that_read_them(version: str, takes: bool) -> None:
    """A pod that does not say its version gets none."""
    assert takes_prompt_tokens(pod("http://p:1", version=version)) is takes
