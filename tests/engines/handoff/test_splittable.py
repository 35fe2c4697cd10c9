"""What cannot be computed on one pod and answered by another."""

from __future__ import annotations

from typing import Any

import pytest

from router.engines.handoff.splittable import why_not
from router.types import Endpoint
from tests.engines.handoff.pairs import CHAT, COMPLETIONS, chat, completion


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"n": "2"},
        {"best_of": 3},
        {"use_beam_search": True},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"n": "many"},
    ],
)
def test_what_needs_more_than_one_prompts_kv_once_is_refused(fields: dict[str, Any]) -> None:
    """In a sentence."""
    reason = why_not(COMPLETIONS, completion(**fields))
    assert reason[:1].isupper()
    assert reason.endswith(".")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1},
        {"n": "1"},
        {"n": None},
        {"prompt": ["a"]},
        {"prompt": [[1, 2]]},
        {"prompt": [1, 2]},
        {"echo": False},
    ],
)
def test_one_prompt_and_one_answer_are_not_refused(fields: dict[str, Any]) -> None:
    """However they are written."""
    assert why_not(COMPLETIONS, completion(**fields)) == ""


def test_a_chat_is_split_and_an_embedding_is_not() -> None:
    """It decodes nothing."""
    assert why_not(CHAT, chat()) == ""
    assert why_not(Endpoint.EMBEDDINGS, b'{"model":"m","input":"hi"}')
    assert why_not(Endpoint.OTHER, b"{}")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", rb'{"\ud800":1}', b"[" * 100_000])
def test_what_cannot_be_read_is_refused(body: bytes) -> None:
    """Rather than raised."""
    assert why_not(CHAT, body)
