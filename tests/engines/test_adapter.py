"""Tests of every engine adapter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from router.engines.adapter import (
    MAX_MODELS,
    MODELS,
    EngineAdapter,
    PodFacts,
    on_pod,
    parse_models,
    parse_tokens,
    prompt_token_count,
    prompt_token_ids,
    rank_count,
    rank_headers,
)
from router.engines.engine_catalog import ENGINES, OWNERS
from router.engines.sglang import Sglang
from router.guards import OutOfBounds
from router.prompt import completion
from router.types import MAX_NAME_CHARACTERS
from tests.kit.scenes import make_pod

engines = pytest.mark.parametrize("name", ENGINES)


@pytest.mark.parametrize(
    ("endpoint", "url", "reached"),
    [
        ("tcp://*:5557", "http://10.0.0.7:8000", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "https://pod.svc/prefix", "tcp://pod.svc:5557"),
        ("tcp://0.0.0.0:5557", "http://[fd00::1]:8000", "tcp://[fd00::1]:5557"),
        ("tcp://10.9.9.9:41033", "http://10.0.0.7:8000", "tcp://10.0.0.7:41033"),
        ("tcp://redis.svc:6379", "http://10.0.0.7:8000", "tcp://10.0.0.7:6379"),
        *((f"tcp://*:{port}", "http://10.0.0.7:8000", None) for port in ("", "*", "0", "-1", "65536", "1e3", "٣")),
        *((name, "http://10.0.0.7:8000", None) for name in ("ipc:///run/kv", "ipc://*", "inproc://x:1", "*:5557", "")),
    ],
)
def test_a_pod_names_no_host_but_its_own(endpoint: str, url: str, reached: str | None) -> None:
    """The router connects to its port over TCP, on the host on which it reaches the pod."""
    assert on_pod(endpoint, make_pod(url=url)) == reached


@engines
def test_a_silent_engine_has_no_facts(name: str) -> None:
    """Without answers, or with garbage, the result is None and never an error."""
    adapter: EngineAdapter = ENGINES[name]
    garbage = dict.fromkeys(adapter.describe_paths, b"\xff{")
    assert adapter.describe({}, make_pod(engine=name)) is None
    assert adapter.describe(garbage, make_pod(engine=name)) is None
    assert adapter.parse_load(b"\xff{", None, 0.0) is None


@engines
def test_the_models_alone_describe_a_pod(name: str) -> None:
    """All other answers may be missing or broken."""
    adapter = ENGINES[name]
    answers = dict.fromkeys(adapter.describe_paths, b"<html>") | {adapter.describe_paths[0]: b'{"data": [{"id": "m"}]}'}
    facts = adapter.describe(answers, make_pod(engine=name, dp_rank=0))
    assert facts is not None
    assert (facts.models, facts.block_size_tokens, facts.capacity_tokens) == (("m",), None, None)
    assert facts.kv_events is None


def test_a_request_is_pinned_to_its_rank() -> None:
    """A pod without a rank gets no header."""
    assert rank_headers(make_pod()) == {}
    assert rank_headers(make_pod(dp_rank=3)) == {"x-data-parallel-rank": "3"}


@engines
def test_the_health_path_costs_no_token(name: str) -> None:
    """SGLang's /health generates a token."""
    assert ENGINES[name].health_path == ("/v1/models" if name == "sglang" else "/health")


MESSAGES = [{"role": "user", "content": "hi"}]


def answer(body: Any) -> bytes:
    return json.dumps(body).encode()


def test_adapters_are_the_models_with_a_parent() -> None:
    """The context is the smallest of all base models; adapters have none."""
    cards = [
        {"id": "m", "parent": None, "max_model_len": 8192, "permission": []},
        {"id": "m2", "max_model_len": 4096},
        {"id": "sql", "parent": "m", "max_model_len": None},
    ]
    assert parse_models(answer({"object": "list", "data": cards})) == PodFacts(
        models=("m", "m2"), adapters=("sql",), max_model_len_tokens=4096
    )


def test_a_context_may_be_in_the_meta_or_missing() -> None:
    """llama.cpp writes meta.n_ctx, TensorRT-LLM nothing."""
    assert parse_models(answer({"data": [{"id": "m", "meta": {"n_ctx": 2048}}]})) == PodFacts(
        models=("m",), max_model_len_tokens=2048
    )
    assert parse_models(answer({"data": [{"id": "m", "meta": None}]})) == PodFacts(models=("m",))


@pytest.mark.parametrize("size", [0, -1])
def test_an_invalid_context_is_unknown(size: int) -> None:
    """No prompt would fit."""
    card = {"id": "m", "max_model_len": size, "meta": {"n_ctx": size}}
    assert parse_models(answer({"data": [card]})) == PodFacts(models=("m",))


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b'{"data": []}', b'{"data": [{"id": "a", "parent": "m"}]}'])
def test_an_answer_without_a_base_model_is_none(body: bytes) -> None:
    """The same for invalid JSON."""
    assert parse_models(body) is None


@pytest.mark.parametrize("read", [parse_models, parse_tokens, prompt_token_ids, prompt_token_count])
@pytest.mark.parametrize("body", [b"", b"nope", b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"tokens": ["a"]}'])
def test_garbage_is_none(read: Callable[[bytes], object], body: bytes) -> None:
    """Reading never raises."""
    assert read(body) is None


def test_prompt_tokens_are_found_in_chats_and_completions() -> None:
    """At the top level for a chat, in the choice for a completion."""
    chat = {"prompt_token_ids": [1, 2], "choices": [{"message": {}, "token_ids": [9]}], "usage": {"prompt_tokens": 2}}
    completed = {"choices": [{"text": "", "prompt_token_ids": [3]}]}
    assert prompt_token_ids(answer(chat)) == [1, 2]
    assert prompt_token_ids(answer(completed)) == [3]
    assert prompt_token_count(answer(chat)) == 2
    assert prompt_token_ids(answer({"choices": [{"message": {}}]})) is None
    assert prompt_token_count(answer({"usage": None})) is None


def test_a_body_for_tokenize_has_all_fields_that_change_the_tokens() -> None:
    """Messages with their fields, or a text; tool_choice is omitted."""
    chat = {"messages": MESSAGES, "tools": [], "tool_choice": "auto", "documents": None}
    assert Sglang().tokenize_body("m", chat) == {"model": "m", "messages": MESSAGES, "tools": []}
    text = {"prompt": "hi", "add_special_tokens": False}
    assert Sglang().tokenize_body("m", text) == {"model": "m", **text}


@pytest.mark.parametrize("prompt", [{"messages": MESSAGES, "documents": [{}]}, {"prompt": [1, 2]}, {"input": "hi"}])
def test_a_prompt_that_tokenize_might_get_wrong_has_no_call(prompt: dict[str, Any]) -> None:
    """An unsupported field, a prompt of tokens, no prompt."""
    assert Sglang().tokenize_body("m", prompt) is None


def test_too_long_names_of_models_are_ignored() -> None:
    """They would be kept, logged and labels of metrics."""
    long = "x" * (MAX_NAME_CHARACTERS + 1)
    cards = [{"id": long}, {"id": "m"}, {"id": long, "parent": "m"}, {"id": "lora", "parent": "m"}]
    facts = parse_models(json.dumps({"data": cards}).encode())
    assert facts is not None and (facts.models, facts.adapters) == (("m",), ("lora",))
    assert parse_models(json.dumps({"data": cards[:1]}).encode()) is None


def test_models_beyond_a_number_are_ignored() -> None:
    cards = [{"id": f"m{number}"} for number in range(2 * MAX_MODELS)]
    facts = parse_models(json.dumps({"data": cards}).encode())
    assert facts is not None and len(facts.models) == MAX_MODELS


@pytest.mark.parametrize("token", [-1, 1 << 32, 10**2000])
def test_numbers_that_are_no_tokens_are_refused(token: int) -> None:
    """They do not fit into a token array."""
    assert parse_tokens(b'{"tokens": [1, %d]}' % token) is None
    assert prompt_token_ids(b'{"prompt_token_ids": [1, %d]}' % token) is None


def test_no_call_of_the_decoder_reads_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold the interpreter, in any thread."""
    monkeypatch.setattr(completion, "SLICE_BYTES", 100)
    assert list(parse_tokens(answer({"tokens": list(range(1_000))})) or ()) == list(range(1_000))
    assert parse_tokens(b'{"tokens": [%b]}' % (b"1" * 200)) is None


def test_numbers_that_are_no_size_are_unknown() -> None:
    """They would not fit into a float."""
    assert prompt_token_count(b'{"usage": {"prompt_tokens": 1%s}}' % (b"0" * 2000)) is None
    facts = parse_models(b'{"data": [{"id": "m", "max_model_len": 1%s}]}' % (b"0" * 2000))
    assert facts is not None and facts.max_model_len_tokens is None


@pytest.mark.parametrize(
    ("owner", "engine"),
    [
        *(("vllm", "vllm"), ("vllm-frontend-rs", "vllm"), ("sglang", "sglang")),
        *(("tensorrt_llm", "trtllm"), ("llamacpp", "llamacpp"), ("me", "")),
    ],
)
def test_the_owner_of_models_shows_the_engine(owner: str, engine: str) -> None:
    """Whichever adapter reads it."""
    body = b'{"data": [{"id": "m", "owned_by": "%b"}]}' % owner.encode()
    facts = parse_models(body)
    assert facts is not None and OWNERS.get(facts.owner, "") == engine


@pytest.mark.parametrize(
    ("ranks", "count"),
    [
        ([], 1),
        (["0"], 1),
        (["1", "0"], 2),
        (["0", "2"], 1),
        (["4", "5"], 1),
        ([""], 1),
        ([str(rank) for rank in range(65)], 1),
    ],
    ids=["none", "one", "two", "a gap", "not from zero", "unnamed", "too many"],
)
def test_ranks_count_only_if_they_are_numbered_from_zero(ranks: Iterable[str], count: int) -> None:
    """And if they are not more than a pod has."""
    assert rank_count(ranks) == count


SOURCES = "/kv_event_sources"


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/*", "ipc://\0x", "tcp://*:99999999", "udp://*:1", "\0"])
def test_other_addresses_are_no_source_of_events(endpoint: str) -> None:
    """This holds for each engine, with and without a replay."""
    models = answer({"data": [{"id": "m"}]})
    vllm = answer({"0": {"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": endpoint}})
    host = endpoint.partition("://")[2] or endpoint
    events = {"publisher": "zmq", "endpoint_host": f"x/../{host}", "endpoint_port_base": 1 << 40}
    info = answer({"kv_events": events})
    for name, answers in (("vllm", {SOURCES: vllm}), ("sglang", {"/server_info": info})):
        facts = ENGINES[name].describe({"/v1/models": models, **answers}, make_pod(engine=name))
        assert facts is not None and facts.kv_events is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"data":[%b]}' % b",".join([b'{"id":"m"}'] * 100_000),
        b'{"data":[{"id":"%b"}]}' % (b"m" * MODELS.max_bytes),
    ],
    ids=["too many", "too long"],
)
def test_a_list_of_models_without_an_end_is_not_decoded(body: bytes) -> None:
    """100,000 of them would hold the event loop for 12 ms, every 10 s."""
    with pytest.raises(OutOfBounds, match="list of models"):
        parse_models(body)


@pytest.mark.parametrize("name", ["block_size", "hash_block_size"])
def test_a_block_that_no_engine_has_is_unknown(name: str) -> None:
    """The self-test sends four blocks of text."""
    metrics = b'vllm:cache_config_info{%b="999999999999999",num_gpu_blocks="9"} 1\n' % name.encode()
    answers = {"/v1/models": answer({"data": [{"id": "m"}]}), "/metrics": metrics}
    facts = ENGINES["vllm"].describe(answers, make_pod())
    assert facts is not None and facts.block_size_tokens is None and facts.capacity_tokens is None


def test_a_pod_serves_only_the_models_that_it_may() -> None:
    """Names and patterns; of base models and adapters alike."""
    cards = [{"id": "m"}, {"id": "bank"}, {"id": "lora-1", "parent": "m"}, {"id": "bank-lora", "parent": "m"}]
    body = answer({"data": cards})
    facts = parse_models(body, ("m", "lora-*"))
    assert facts is not None and (facts.models, facts.adapters) == (("m",), ("lora-1",))
    assert parse_models(body, ("other",)) is None
