"""Reads recorded answers of vLLM 0.32 and llama.cpp with the adapters and with the stream reader.

The answers are recorded by `tests/live/record_goldens.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.engines.adapter import KvEventSource, parse_tokens, prompt_token_count, prompt_token_ids
from router.engines.engine_catalog import ENGINES
from router.request.response_reader import ResponseReader
from router.types import PodLoad
from tests.kit.scenes import make_pod

GOLDENS = Path(__file__).parent / "goldens"


def recorded(name: str) -> bytes:
    return (GOLDENS / name).read_bytes()


def test_vllm_describes_itself() -> None:
    """Its model and context, the cache of 60 blocks of 32 tokens, and the event source on the pod's host."""
    answers = {
        "/v1/models": recorded("vllm_models.json"),
        "/metrics": recorded("vllm_metrics.txt"),
        "/kv_event_sources": recorded("vllm_kv_event_sources.json"),
    }
    facts = ENGINES["vllm"].describe(answers, make_pod())
    assert facts is not None
    assert (facts.models, facts.adapters, facts.max_model_len_tokens) == (("tiny",), (), 1536)
    assert (facts.block_size_tokens, facts.capacity_tokens) == (32, 1920)
    assert facts.kv_events == KvEventSource("tcp://a:15631", "tcp://a:16631")


def test_llamacpp_describes_itself() -> None:
    """Two slots of 4096 tokens each, and no events."""
    answers = {"/v1/models": recorded("llamacpp_models.json"), "/props": recorded("llamacpp_props.json")}
    facts = ENGINES["llamacpp"].describe(answers, make_pod(engine="llamacpp"))
    assert facts is not None
    assert (facts.models, facts.max_model_len_tokens, facts.capacity_tokens) == (("tiny",), 4096, 8192)
    assert facts.kv_events is None


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_an_idle_engine_has_no_load(engine: str) -> None:
    """Recorded between requests; llama.cpp exports no KV usage, which is read as 0."""
    assert ENGINES[engine].parse_load(recorded(f"{engine}_metrics.txt"), None, 3.0) == PodLoad(0, 0, 0.0, 3.0)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_the_gauges_are_read_from_their_own_lines(engine: str) -> None:
    """The recorded text of a busy engine: only the values of the load's lines differ."""
    busy = []
    values = {"running": 3, "waiting": 2, "kv_usage": 0.25}
    gauges = ENGINES[engine].gauges
    names = {gauges.running[0]: "running", gauges.waiting[0]: "waiting", gauges.kv_usage[0]: "kv_usage"}
    for line in recorded(f"{engine}_metrics.txt").decode().splitlines():
        name = line.split("{")[0].split(" ")[0]
        busy.append(f"{line.rsplit(' ', 1)[0]} {values[names[name]]}" if name in names else line)
    load = ENGINES[engine].parse_load("\n".join(busy).encode(), None, 3.0)
    assert load == PodLoad(3, 2, 0.25 if engine == "vllm" else 0.0, 3.0)


def test_llamacpp_tokens_are_read_from_its_answer() -> None:
    """The router's body is the recorded one."""
    golden = json.loads(recorded("llamacpp_tokenize.json"))
    llamacpp = ENGINES["llamacpp"]
    assert llamacpp.tokenize_body("tiny", {"prompt": golden["body"]["content"]}) == golden["body"]
    tokens = parse_tokens(json.dumps(golden["answer"]).encode())
    assert list(tokens or ()) == [34, 2577, 963, 220, 151644, 75402, 21894]


def test_a_chat_reports_prompt_and_cached_tokens() -> None:
    """llama.cpp reuses all but the last token of a prompt that it just served."""
    first, second = (json.dumps(chat["answer"]).encode() for chat in json.loads(recorded("llamacpp_chat.json")))
    assert prompt_token_count(first) == prompt_token_count(second) == 116
    assert prompt_token_ids(first) is None
    assert [reported(answer) for answer in (first, second)] == [(116, 0), (116, 115)]


def test_a_stream_reports_prompt_and_cached_tokens() -> None:
    """In vLLM's last chunk before [DONE], for any division into chunks."""
    stream = recorded("vllm_stream_chat.txt")
    assert stream.endswith(b"data: [DONE]\n\n")
    assert {reported(stream, step) for step in (1, 7, 64, len(stream))} == {(7, 0)}


def test_a_stream_begins_with_its_first_text() -> None:
    """Not with the chunk before it, which has only a role."""
    seen = ResponseReader()
    chunks = recorded("vllm_stream_chat.txt").split(b"\n\n")
    assert [seen.feed(chunk) for chunk in chunks[:3]] == [False, True, False]


def test_errors_have_the_routers_format() -> None:
    """One object called error with message, type, param and code, the status as the code."""
    errors: list[dict[str, Any]] = json.loads(recorded("vllm_errors.json"))
    assert {error["name"]: error["status"] for error in errors} == {
        "unknown model": 404,
        "prompt too long": 400,
        "malformed JSON": 400,
        "stream_options without stream": 400,
        "tools is empty": 400,
        "max_tokens beyond the context": 400,
    }
    for error in errors:
        assert error["body"]["error"].keys() == {"message", "type", "param", "code"}
        assert error["body"]["error"]["code"] == error["status"]


def reported(answer: bytes, step: int = 50) -> tuple[int | None, int | None]:
    """(prompt tokens, cached tokens) as the relay reads them from pieces of an answer."""
    seen = ResponseReader()
    for start in range(0, len(answer), step):
        seen.feed(answer[start : start + step])
    return seen.prompt_tokens, seen.cached_tokens
