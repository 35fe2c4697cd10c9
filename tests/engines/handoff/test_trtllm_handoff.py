"""TensorRT-LLM, as in docs/handoff.md#tensorrt-llm."""

from __future__ import annotations

from typing import Any

import pytest

from router.engines.handoff.dialect import Handoff
from router.engines.handoff.trtllm_handoff import TrtllmHandoff
from tests.engines.handoff.pairs import CHAT, COMPLETIONS, answer, chat, completion, pair, read

TRTLLM = TrtllmHandoff()
PARAMS = {
    "request_type": "context_only",
    "first_gen_tokens": [5],
    "ctx_request_id": 9,
    "encoded_opaque_state": "AAE=",
    "disagg_request_id": 77,
}


def handoff(**fields: Any) -> Handoff:
    said = answer({"disaggregated_params": PARAMS}, **{"prompt_token_ids": [1, 2], **fields})
    found = TRTLLM.read_handoff(said)
    assert found is not None
    return found


def test_the_context_leg_differs_by_its_parameters_alone() -> None:
    """The engine refuses unknown fields."""
    leg = read(TRTLLM.prefill_body(CHAT, chat(), pair()))
    wanted = read(chat()) | {
        "stream": False,
        "disaggregated_params": {"request_type": "context_only", "disagg_request_id": 77},
    }
    del wanted["stream_options"]
    assert leg == wanted


def test_the_generation_leg_gets_the_parameters_and_the_prompts_tokens() -> None:
    """A chat in addition to its messages, a completion instead of its prompt."""
    params = PARAMS | {"request_type": "generation_only"}
    assert read(TRTLLM.decode_body(CHAT, chat(), pair(), handoff())) == read(chat()) | {
        "disaggregated_params": params,
        "prompt_token_ids": [1, 2],
    }
    listed = handoff(prompt_token_ids=[[1, 2]])
    assert read(TRTLLM.decode_body(COMPLETIONS, completion(), pair(), listed)) == read(completion()) | {
        "disaggregated_params": params,
        "prompt": [1, 2],
    }


def test_without_tokens_the_prompt_stays() -> None:
    """The engine then tokenizes it again."""
    leg = read(TRTLLM.decode_body(COMPLETIONS, completion(), pair(), handoff(prompt_token_ids=None)))
    assert leg["prompt"] == "hi"


def test_a_first_token_that_ends_the_answer_is_the_answer() -> None:
    """Without the fields for the generation leg."""
    said = answer({"finish_reason": "stop", "disaggregated_params": PARAMS}, prompt_token_ids=[1])
    found = TRTLLM.read_handoff(said)
    assert found is not None
    assert found.response is not None
    assert read(found.response) == read(answer({"finish_reason": "stop"}))


@pytest.mark.parametrize("reason", ["length", "not_finished"])
def test_an_unfinished_answer_is_handed_over(reason: str) -> None:
    """It never reaches the client."""
    said = answer({"finish_reason": reason, "disaggregated_params": PARAMS})
    found = TRTLLM.read_handoff(said)
    assert found is not None
    assert found.response is None
    assert read(TRTLLM.decode_body(CHAT, chat(), pair(), found))["disaggregated_params"]["ctx_request_id"] == 9


def test_an_unfinished_answer_without_parameters_hands_nothing_over() -> None:
    """Nor does one without a finish reason."""
    assert TRTLLM.read_handoff(answer()) is None
    assert TRTLLM.read_handoff(answer({"finish_reason": None})) is None
