"""What requests need, and by which answers pods say that they lack it."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

import pytest

from router.endpoints import endpoint_of
from router.engines.engine_catalog import ENGINES
from router.engines.lacks import CONTINUING_ALONE, LARGE_BODY, LISTED_PROMPTS, SEVERAL_ANSWERS, lacking, needs
from router.request.parse import PARSERS
from router.types import Endpoint, InferenceRequest
from tests.kit import scenes

CHAT, MESSAGES, RESPONSES = Endpoint.CHAT.value, Endpoint.MESSAGES.value, Endpoint.RESPONSES.value
ALL = (SEVERAL_ANSWERS, LISTED_PROMPTS)
NOT_YET = "POST /v1/messages is not supported by the Rust frontend yet. Set VLLM_USE_RUST_FRONTEND=0 to use the ..."


def error(message: str, **fields: Any) -> bytes:
    return json.dumps({"error": {"message": message, **fields}}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("engine", "status", "said", "path", "lacks"),
    [
        ("vllm", 501, error(NOT_YET, type="NotImplementedError"), MESSAGES, MESSAGES),
        ("vllm", 404, b"", RESPONSES, RESPONSES),
        ("vllm", 404, b'{"detail":"Not Found"}', RESPONSES, RESPONSES),
        ("sglang", 404, b'{"detail":"Not Found"}', MESSAGES, MESSAGES),
        ("llamacpp", 404, b'{"error":{"code":404,"message":"File Not Found"}}', MESSAGES, MESSAGES),
        ("vllm", 400, error("Only n=1 is supported.", param="n"), CHAT, SEVERAL_ANSWERS),
        ("llamacpp", 400, error("Only one completion choice is allowed"), CHAT, SEVERAL_ANSWERS),
        ("vllm", 400, error("data did not match any variant of untagged enum Prompt"), CHAT, LISTED_PROMPTS),
        # of something else
        ("vllm", 404, error("The model `x` does not exist.", type="NotFoundError"), CHAT, ""),
        ("vllm", 404, error("Response with id 'r' not found."), RESPONSES, ""),
        ("vllm", 404, error('{"detail":"Not Found"}'), RESPONSES, ""),
        ("vllm", 400, error('The name is wrong: "Only n=1 is supported.", of 7'), CHAT, ""),
        ("sglang", 400, error("Only n=1 is supported.", param="n"), CHAT, ""),
        ("vllm", 503, b"", MESSAGES, ""),
    ],
)
def test_an_answer_says_what_its_pod_lacks(engine: str, status: int, said: bytes, path: str, lacks: str) -> None:
    """By status, body and path, as the engine writes it."""
    assert lacking(ENGINES[engine].lack_answers, status, said, (path, *ALL)) == lacks


def test_a_pod_lacks_only_what_a_request_needs() -> None:
    """A client that writes the words of another answer into its body learns nothing by it."""
    said = error("Only n=1 is supported.", param="n")
    assert lacking(ENGINES["vllm"].lack_answers, HTTPStatus.BAD_REQUEST, said, (CHAT,)) == ""
    assert lacking(ENGINES["vllm"].lack_answers, HTTPStatus.NOT_FOUND, b"", ()) == ""


def read(path: str, body: Any, choices: int = 1, prompts: int = 1) -> InferenceRequest:
    endpoint, encoded = endpoint_of(path), json.dumps(body).encode()
    fields = PARSERS[endpoint].prompt_fields(PARSERS[endpoint].parse(encoded))
    return scenes.request(endpoint=endpoint, body=encoded, choices=choices, prompts=prompts, prompt=fields)


@pytest.mark.parametrize(
    ("path", "body", "counts", "needed"),
    [
        (CHAT, {"messages": [{}]}, {}, (CHAT,)),
        (CHAT, {"messages": [{}], "n": 2}, {"choices": 2}, (CHAT, SEVERAL_ANSWERS)),
        ("/v1/completions", {"prompt": "a"}, {}, ("/v1/completions",)),
        ("/v1/completions", {"prompt": [1, 2]}, {}, ("/v1/completions",)),
        ("/v1/completions", {"prompt": ["a"]}, {}, ("/v1/completions", LISTED_PROMPTS)),
        ("/v1/completions", {"prompt": [[1], [2]]}, {"choices": 2, "prompts": 2}, ("/v1/completions", LISTED_PROMPTS)),
        (CHAT, {"messages": [{}], "continue_final_message": True}, {}, (CHAT, CONTINUING_ALONE)),
        (CHAT, {"messages": [{}], "continue_final_message": True, "add_generation_prompt": False}, {}, (CHAT,)),
        ("/rerank?x=1", {"model": "m"}, {}, ("/rerank",)),
        ("/v1/responses/r1", {"model": "m"}, {}, ()),
    ],
)
def test_a_request_needs_its_path_and_parameters(
    path: str, body: Any, counts: dict[str, int], needed: tuple[str, ...]
) -> None:
    """A list of prompts is one also with a single prompt. A pod that has a stored response has its path."""
    assert needs(read(path, body, **counts), path.encode()) == needed


@pytest.mark.parametrize(("size_mib", "needed"), [(32, ("/rerank",)), (33, ("/rerank", LARGE_BODY))])
def test_a_large_body_is_a_need(size_mib: int, needed: tuple[str, ...]) -> None:
    """The front end in Rust cuts it."""
    request = scenes.request(endpoint=Endpoint.OTHER, body=bytes(size_mib << 20))
    assert needs(request, b"/rerank") == needed
