"""Response formats that vLLM's clients rely on, and the metrics that a router scrapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.engine_model.pod import SimPod, SimRequest
from loadtest.mock_engine.handoff_dialects import HandoffFields
from loadtest.mock_engine.mock_config import HandoffConfig, MockEngineConfig
from loadtest.mock_engine.mock_requests import EngineError, GenerationRequest
from loadtest.mock_engine.mock_responses import (
    DONE,
    EMBEDDING_DIMENSIONS,
    StreamFrames,
    embedding_body,
    error_body,
    error_frames,
    metrics_body,
    models_body,
    tokens_body,
    unary_body,
)
from loadtest.mock_engine.pinned_kv import HandoffCounters
from loadtest.mock_engine.vocabulary import GeneratedText, Piece
from router.hashing import token_array
from router.types import Endpoint

CHAT = GenerationRequest(
    id="chatcmpl-7",
    endpoint=Endpoint.CHAT,
    model="tiny",
    prompt=token_array([1, 2, 3]),
    output=GeneratedText((7, 8), (Piece("content", "Time"), Piece("content", " year")), "length"),
    stream=True,
)
COMPLETION = replace(CHAT, id="cmpl-7", endpoint=Endpoint.COMPLETIONS)
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1, "created_cache_tokens": 2},
}
CHAT_USAGE = USAGE | {"completion_tokens_details": {"reasoning_tokens": 0}}
NO_HANDOFFS = HandoffCounters()


def frames_of(ask: GenerationRequest) -> list[dict[str, Any]]:
    """The decoded frames of a stream, without its end marker, which is checked."""
    frames = StreamFrames(ask, 100)
    stream = b"".join([*frames.tokens(0, 1), *frames.tokens(1, 2), frames.closing(1)])
    assert stream.endswith(DONE)
    return [json.loads(frame.removeprefix(b"data: ")) for frame in stream.split(b"\n\n")[:-2]]


def test_a_chat_response_has_one_message_and_usage() -> None:
    """The cached tokens are always present."""
    answer = json.loads(unary_body(CHAT, 100, 1))
    assert answer["object"] == "chat.completion" and answer["usage"] == CHAT_USAGE
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Time year"}
    assert (choice["index"], choice["finish_reason"]) == (0, "length")


def test_a_completion_response_has_text() -> None:
    """No message, and the older object name."""
    answer = json.loads(unary_body(COMPLETION, 100, 1))
    assert answer["object"] == "text_completion" and answer["usage"] == USAGE
    assert answer["choices"][0]["text"] == "Time year"


def test_token_ids_are_returned_only_on_request() -> None:
    """A chat's prompt tokens are at the top, a completion's in the choice."""
    assert "token_ids" not in json.loads(unary_body(CHAT, 100, 1))["choices"][0]
    chat = json.loads(unary_body(replace(CHAT, return_token_ids=True), 100, 1))
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == ([1, 2, 3], [7, 8])
    completion = json.loads(unary_body(replace(COMPLETION, return_token_ids=True), 100, 1))["choices"][0]
    assert (completion["prompt_token_ids"], completion["token_ids"]) == ([1, 2, 3], [7, 8])


def test_a_chat_stream_starts_with_the_role_and_ends_with_the_reason() -> None:
    """The first frame's content is empty: it is not the first token. The last token has the reason."""
    frames = frames_of(CHAT)
    deltas = [frame["choices"][0]["delta"] for frame in frames]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Time"}, {"content": " year"}]
    assert [frame["choices"][0]["finish_reason"] for frame in frames] == [None, None, "length"]
    assert {(frame["id"], frame["object"]) for frame in frames} == {("chatcmpl-7", "chat.completion.chunk")}


def test_a_completion_stream_has_no_role() -> None:
    """Its first frame is its first token."""
    assert [frame["choices"][0]["text"] for frame in frames_of(COMPLETION)] == ["Time", " year"]


@pytest.mark.parametrize("ask", [CHAT, COMPLETION])
def test_usage_in_a_stream_is_a_frame_without_choices(ask: GenerationRequest) -> None:
    """Right before the end marker, only on request."""
    assert all("usage" not in frame for frame in frames_of(ask))
    last = frames_of(replace(ask, include_usage=True))[-1]
    assert (last["choices"], last["usage"]) == ([], CHAT_USAGE if ask is CHAT else USAGE)


@pytest.mark.parametrize("ask", [CHAT, COMPLETION])
def test_the_first_frame_has_the_prompt_tokens_and_each_frame_its_token(ask: GenerationRequest) -> None:
    """So that a reader gets the exact tokenization from the stream."""
    frames = frames_of(replace(ask, return_token_ids=True))
    prompt_ids = [frame.get("prompt_token_ids") or frame["choices"][0].get("prompt_token_ids") for frame in frames]
    assert prompt_ids[0] == [1, 2, 3] and not any(prompt_ids[1:])
    assert [token for frame in frames for token in frame["choices"][0].get("token_ids", [])] == [7, 8]


def test_an_error_has_its_class_and_the_status_as_an_integer() -> None:
    """vLLM's `code` is a number, its `type` a class name if it has one."""
    body = json.loads(error_body(EngineError("no such model", status=HTTPStatus.NOT_FOUND, param="model")))
    assert body == {"error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}}
    overload = json.loads(error_body(EngineError("busy", status=HTTPStatus.SERVICE_UNAVAILABLE)))["error"]
    assert (overload["type"], overload["code"], overload["param"]) == ("Service Unavailable", 503, None)


def test_model_cards_have_length_and_parent(make_config: Callable[..., MockEngineConfig]) -> None:
    """Served names have the base model's root; an adapter has a parent and no length."""
    cards = json.loads(models_body(make_config(models=("tiny", "alias"), adapters=("lora",)), ["lora"], 100))["data"]
    assert [(c["id"], c["root"], c["parent"], c["max_model_len"]) for c in cards] == [
        ("tiny", "tiny", None, 2048),
        ("alias", "tiny", None, 2048),
        ("lora", "/adapters/lora", "tiny", None),
    ]


def test_tokenize_returns_the_count() -> None:
    """Count, limit, and the ids."""
    answer = json.loads(tokens_body(token_array([4, 5]), 2048))
    assert answer == {"count": 2, "max_model_len": 2048, "tokens": [4, 5], "token_strs": None}


def test_embeddings_depend_on_the_tokens_alone() -> None:
    """Equal inputs get equal vectors."""
    inputs = (token_array([1]), token_array([2]), token_array([1]))
    one, other, again = json.loads(embedding_body("tiny", inputs, "float", 100))["data"]
    assert one["embedding"] == again["embedding"] != other["embedding"]
    assert len(one["embedding"]) == EMBEDDING_DIMENSIONS


def test_an_error_in_a_stream_is_a_frame() -> None:
    """The same object, then the end marker."""
    refusal = EngineError("Internal server error", status=HTTPStatus.INTERNAL_SERVER_ERROR)
    error, end, rest = error_frames(refusal).split(b"\n\n")
    assert error == b"data: " + error_body(refusal) and (end + b"\n\n", rest) == (DONE, b"")


def test_a_prefill_leg_has_additional_fields() -> None:
    """At the top of its response, and in its choice."""
    answer = json.loads(
        unary_body(CHAT, 100, 1, HandoffFields({"kv_transfer_params": None}, {"disaggregated_params": {}}))
    )
    assert answer["kv_transfer_params"] is None and answer["choices"][0]["disaggregated_params"] == {}


# --- /metrics ---


def scraped(config: MockEngineConfig, pod: SimPod, handoff: HandoffCounters = NO_HANDOFFS) -> dict[str, float]:
    """Every sample by name, parsed by Prometheus' client."""
    families = text_string_to_metric_families(metrics_body(config, pod, handoff).decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_metrics_have_vllms_names(make_config: Callable[..., MockEngineConfig]) -> None:
    """Current load, and counters in tokens."""
    config = make_config(num_blocks=8, max_model_len=100)
    pod = SimPod(config)
    for name in "ab":
        pod.submit(SimRequest(id=name, prompt=token_array(range(33)), output=[1, 2]))
        pod.start_step()
        pod.end_step()
    pod.submit(SimRequest(id="c", prompt=token_array(range(100, 133)), output=[1]))
    seen = scraped(config, pod)
    assert seen["vllm:num_requests_running"] == 1 and seen["vllm:num_requests_waiting"] == 1
    assert seen["vllm:kv_cache_usage_perc"] == 3 / 8
    assert seen["vllm:prefix_cache_queries_total"] == 66 and seen["vllm:prefix_cache_hits_total"] == 32
    assert seen["vllm:prompt_tokens_total"] == 66 and seen["vllm:generation_tokens_total"] == 3
    assert seen["vllm:num_preemptions_total"] == 0


def test_the_cache_configuration_is_exported(make_config: Callable[..., MockEngineConfig]) -> None:
    """Block size and capacity are labels, as routers read them."""
    config = make_config(models=('a "quoted" \\ name',))
    families = text_string_to_metric_families(metrics_body(config, SimPod(config), NO_HANDOFFS).decode())
    labels = {sample.name: sample.labels for family in families for sample in family.samples}
    info = labels["vllm:cache_config_info"]
    assert (info["block_size"], info["num_gpu_blocks"], info["kv_cache_size_tokens"]) == ("16", "256", "4096")
    assert labels["vllm:num_requests_running"] == {"model_name": 'a "quoted" \\ name', "engine": "0"}


def test_transfer_metrics_need_a_connector(make_config: Callable[..., MockEngineConfig]) -> None:
    """Some only with NIXL; requests that wait for KV count as waiting."""
    handoff = HandoffCounters(receiving=2, failed=3, expired=4)
    by_dialect = {}
    for dialect in ("", "mooncake", "nixl"):
        config = make_config(handoff=HandoffConfig(dialect=dialect))
        pod = SimPod(config)
        pod.submit(SimRequest(id="a", prompt=token_array(range(40)), output=[1], loaded_tokens=30))
        pod.start_step()
        pod.end_step()
        by_dialect[dialect] = scraped(config, pod, handoff)
    assert [seen["vllm:num_requests_waiting"] for seen in by_dialect.values()] == [2, 2, 2]
    assert "vllm:external_prefix_cache_hits_total" not in by_dialect[""]
    assert by_dialect["mooncake"]["vllm:external_prefix_cache_queries_total"] == 40
    assert by_dialect["mooncake"]["vllm:external_prefix_cache_hits_total"] == 30
    assert "vllm:nixl_num_failed_transfers_total" not in by_dialect["mooncake"]
    nixl = by_dialect["nixl"]
    assert (nixl["vllm:nixl_num_failed_transfers_total"], nixl["vllm:nixl_num_kv_expired_reqs_total"]) == (3, 4)
