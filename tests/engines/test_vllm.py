"""vLLM, with recorded answers."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from router.engines.adapter import KvEventSource, parse_tokens
from router.engines.engine_catalog import ENGINES
from router.types import Endpoint, Pod, PodLoad
from tests.kit.scenes import make_pod

VLLM = ENGINES["vllm"]
MODELS = json.dumps({"data": [{"id": "tiny", "root": "/m", "parent": None, "max_model_len": 8192}]}).encode()
RANKS = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 7.0
vllm:num_requests_running{engine="1",model_name="tiny"} 5.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.25
vllm:cache_config_info{block_size="64",engine="0",hash_block_size="32",kv_cache_size_tokens="65536",num_gpu_blocks="3000",num_gpu_blocks_override="None"} 1.0
vllm:cache_config_info{block_size="64",engine="1",hash_block_size="32",kv_cache_size_tokens="32768",num_gpu_blocks="512",num_gpu_blocks_override="None"} 1.0
"""  # noqa: E501
BOTH = {Endpoint.CHAT, Endpoint.COMPLETIONS}
LONG = b'{"version":"%s"}' % (b"1" * 2000)
OLD = b"""\
vllm:num_requests_running{model_name="tiny"} 3.0
vllm:num_requests_waiting{model_name="tiny"} 1.0
vllm:gpu_cache_usage_perc{model_name="tiny"} 0.125
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0
"""


def source(**fields: Any) -> dict[str, Any]:
    usual = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "buffer_steps": 10000}
    return usual | {"replay_endpoint": "tcp://*:6557", "topic": "kv@a@tiny"} | fields


def kv_events(sources: dict[str, Any], pod: Pod) -> KvEventSource | None:
    answers = {"/v1/models": MODELS, "/kv_event_sources": json.dumps(sources).encode()}
    facts = VLLM.describe(answers, pod)
    assert facts is not None
    return facts.kv_events


def test_load_is_of_all_ranks_or_of_one() -> None:
    """Samples are summed."""
    assert VLLM.parse_load(RANKS, None, 4.0) == PodLoad(12, 2, 0.375, 4.0)
    assert VLLM.parse_load(RANKS, 1, 4.0) == PodLoad(5, 0, 0.25, 4.0)


def test_old_releases_are_read() -> None:
    """Without an engine label, with the old name of the usage."""
    assert VLLM.parse_load(OLD, None, 1.0) == PodLoad(3, 1, 0.125, 1.0)


def test_a_pod_describes_its_cache() -> None:
    """Prefixes are hashed in hash_block_size; the capacity is that of the pod's ranks."""
    facts = VLLM.describe({"/v1/models": MODELS, "/metrics": RANKS}, make_pod())
    assert facts is not None
    assert (facts.models, facts.max_model_len_tokens) == (("tiny",), 8192)
    assert (facts.block_size_tokens, facts.capacity_tokens) == (32, 65536 + 32768)
    facts = VLLM.describe({"/v1/models": MODELS, "/metrics": RANKS}, make_pod(dp_rank=1))
    assert facts is not None
    assert facts.capacity_tokens == 32768
    facts = VLLM.describe({"/v1/models": MODELS, "/metrics": OLD}, make_pod(dp_rank=0))
    assert facts is not None
    assert (facts.block_size_tokens, facts.capacity_tokens) == (16, 1600)


@pytest.mark.parametrize(
    ("sources", "engines", "ranks"),
    [
        ({"0": {}, "1": {}}, "", 2),
        ({"0": {}}, "01", 1),
        ({}, "01", 2),
        ({}, "3", 1),
        ({}, "", 1),
    ],
)
def test_ranks_are_those_with_events_else_those_with_metrics(sources: dict[str, Any], engines: str, ranks: int) -> None:
    """One rank where no other can be selected."""
    lines = [f'vllm:cache_config_info{{engine="{rank}",block_size="16"}} 1.0' for rank in engines]
    responses = {
        "/v1/models": b'{"data": [{"id": "m"}]}',
        "/metrics": "\n".join(lines).encode(),
        "/kv_event_sources": json.dumps(sources).encode(),
    }
    facts = ENGINES["vllm"].describe(responses, make_pod())
    assert facts is not None and facts.dp_size == ranks


def test_too_long_numbers_are_ignored() -> None:
    """Python does not parse them."""
    metrics = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="%b"} 1.0\n' % (b"9" * 5000)
    facts = VLLM.describe({"/v1/models": MODELS, "/metrics": metrics}, make_pod())
    assert facts is not None
    assert (facts.block_size_tokens, facts.capacity_tokens) == (16, None)


def test_a_pod_reports_its_release() -> None:
    """KV passes only between equal releases; a pod without a version has none."""
    for answer, version in ((b'{"version":"0.32.0"}', "0.32.0"), (b"<html>", ""), (b"{}", ""), (LONG, "")):
        facts = VLLM.describe({"/v1/models": MODELS, "/version": answer}, make_pod())
        assert facts is not None
        assert facts.version == version
    assert "/version" in VLLM.describe_paths


@pytest.mark.parametrize(
    ("owner", "answer", "front_end"),
    [
        ("vllm", b'{"version":"0.33.0"}', ""),
        ("vllm", b'{"version":"0.33.0","rust_frontend_version":"0.33.0"}', "rust"),
        ("vllm-frontend-rs", b"", "rust"),
    ],
)
def test_a_pod_reports_its_front_end(owner: str, answer: bytes, front_end: str) -> None:
    """By its version, or by the owner of its models where the version was not read."""
    models = json.dumps({"data": [{"id": "tiny", "owned_by": owner}]}).encode()
    facts = VLLM.describe({"/v1/models": models, "/version": answer}, make_pod())
    assert facts is not None and facts.front_end == front_end


def test_events_are_found_by_rank() -> None:
    """The only source for a pod without a rank, else the one of its rank."""
    two = {"0": source(), "1": source(endpoint="tcp://*:5558", replay_endpoint=None)}
    assert kv_events({"0": source()}, make_pod()) == KvEventSource("tcp://a:5557", "tcp://a:6557")
    assert kv_events(two, make_pod(dp_rank=1)) == KvEventSource("tcp://a:5558", None)


@pytest.mark.parametrize(
    ("sources", "dp_rank"),
    [
        ({"0": source(publisher="null")}, None),
        ({"0": source(endpoint=None)}, None),
        ({"0": source(), "1": source()}, None),
        ({"0": source()}, 1),
        ({}, None),
    ],
)
def test_ambiguous_or_disabled_events_are_none(sources: dict[str, Any], dp_rank: int | None) -> None:
    """Disabled, without an address, of several ranks, of another rank."""
    assert kv_events(sources, make_pod(dp_rank=dp_rank)) is None


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "does not answer /kv_event_sources, as vLLM before 0.31; name their address in pods[].kv_events"),
        ({}, "the engine publishes none; start it with --kv-events-config"),
        ({"0": source(publisher="null")}, "the engine publishes none; start it with --kv-events-config"),
        ({"0": source(endpoint="ipc:///tmp/x")}, "no TCP address for this rank; let `endpoint`"),
        ({"0": source()}, ""),
    ],
)
def test_why_there_are_no_events_is_said(answer: dict[str, Any] | None, why: str) -> None:
    """The flag is not missing where the engine publishes, or does not say."""
    named = {} if answer is None else {"/kv_event_sources": json.dumps(answer).encode()}
    facts = VLLM.describe({"/v1/models": MODELS, **named}, make_pod())
    assert facts is not None
    assert why in facts.no_events and bool(why) is bool(facts.no_events)


def test_a_chat_is_tokenized_with_the_variables_of_its_template() -> None:
    """Not with fields that /tokenize ignores."""
    chat = {"messages": [], "tools": [], "chat_template_kwargs": {"x": 1}, "continue_final_message": True}
    assert VLLM.tokenize_body("m", chat) == {"model": "m", **chat}
    assert VLLM.tokenize_body("m", {"prompt": "hi"}) == {"model": "m", "prompt": "hi"}
    for unknown in ("documents", "reasoning_effort"):
        assert VLLM.tokenize_body("m", chat | {unknown: "x"}) is None
    assert parse_tokens(b'{"count":2,"max_model_len":8192,"tokens":[5,6],"token_strs":null}') == array("I", [5, 6])


@pytest.mark.parametrize(
    ("version", "continues"),
    [("0.27.0", True), ("0.32.0+cpu", True), ("1.0.0", True), ("0.26.9", False), ("", False), ("main", False)],
)
def test_streams_go_on_from_their_ids_since_a_release(version: str, continues: bool) -> None:
    pod = make_pod(version=version)
    assert VLLM.continues(pod) == (BOTH if continues else frozenset())
    assert VLLM.continues(replace(pod, front_end="rust")) == ({Endpoint.COMPLETIONS} if continues else frozenset())
    assert not ENGINES["sglang"].continues(pod)


def sleep_state(**states: int) -> bytes:
    """As vLLM 0.32 and 0.33 write it."""
    lines = (f'vllm:engine_sleep_state{{engine="0",sleep_state="{one}"}} {float(on)}' for one, on in states.items())
    return "\n".join(lines).encode()


@pytest.mark.parametrize(
    ("metrics", "paths"),
    [
        (sleep_state(awake=1, weights_offloaded=0, discard_all=0), []),
        (sleep_state(awake=0, weights_offloaded=1, discard_all=0), ["/wake_up"]),
        (
            sleep_state(awake=0, weights_offloaded=0, discard_all=1),
            ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"],
        ),
        (sleep_state(awake=0, weights_offloaded=0, discard_all=0), []),  # the KV cache alone is gone
        (b"", []),
    ],
)
def test_it_is_woken_by_what_its_level_needs(metrics: bytes, paths: list[str]) -> None:
    assert [path for path, _ in VLLM.wake_calls(metrics)] == paths


@pytest.mark.parametrize(
    ("said", "is_asleep"),
    [(b'{"is_sleeping":true}', True), (b'{"is_sleeping":false}', False), (b"{}", False), (b"<html>", False)],
)
def test_it_sleeps_if_it_says_so(said: bytes, is_asleep: bool) -> None:
    assert VLLM.is_asleep(said) is is_asleep


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"reasoning_content": "thought"}, {"reasoning": "thought"}),
        ({"reasoning_content": "old", "reasoning": "new"}, {"reasoning": "new"}),
        ({"reasoning_content": None}, {}),
        ({"reasoning": "new"}, {"reasoning": "new"}),
        ({}, {}),
    ],
)
@pytest.mark.parametrize("is_raw", [False, True])
def test_a_message_for_tokenize_has_the_reasoning_that_chats_read(
    given: dict[str, Any], sent: dict[str, Any], is_raw: bool
) -> None:
    """Chats rename the old field; /tokenize does not."""
    message: Any = {"role": "assistant", "content": "x", **given}
    asked = VLLM.tokenize_body("m", {"messages": [msgspec.Raw(msgspec.json.encode(message)) if is_raw else message]})
    assert asked is not None
    assert msgspec.json.decode(msgspec.json.encode(asked))["messages"] == [
        {"role": "assistant", "content": "x", **sent}
    ]
