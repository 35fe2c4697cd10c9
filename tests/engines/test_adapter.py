"""Tests of every engine adapter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.engines.adapter import EngineAdapter, on_pod, rank_headers
from router.engines.engine_catalog import ENGINES
from router.types import Pod

MakePod = Callable[..., Pod]
engines = pytest.mark.parametrize("name", ENGINES)


@pytest.mark.parametrize(
    ("endpoint", "url", "reached"),
    [
        ("tcp://*:5557", "http://10.0.0.7:8000", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "https://pod.svc/prefix", "tcp://pod.svc:5557"),
        ("tcp://0.0.0.0:5557", "http://[fd00::1]:8000", "tcp://[fd00::1]:5557"),
        ("tcp://10.9.9.9:41033", "http://10.0.0.7:8000", "tcp://10.9.9.9:41033"),
        ("ipc:///run/kv", "http://10.0.0.7:8000", "ipc:///run/kv"),
    ],
)
def test_a_wildcard_is_the_host_that_the_pod_is_reached_on(
    make_pod: MakePod, endpoint: str, url: str, reached: str
) -> None:
    """Other addresses stay."""
    assert on_pod(endpoint, make_pod("vllm", url=url)) == reached


@engines
def test_a_silent_engine_has_no_facts(name: str, make_pod: MakePod) -> None:
    """Without answers, or with garbage, the result is None and never an error."""
    adapter: EngineAdapter = ENGINES[name]
    garbage = dict.fromkeys(adapter.describe_paths, b"\xff{")
    assert adapter.describe({}, make_pod(name)) is None
    assert adapter.describe(garbage, make_pod(name)) is None
    assert adapter.parse_load(b"\xff{", None, 0.0) is None


@engines
def test_the_models_alone_describe_a_pod(name: str, make_pod: MakePod) -> None:
    """All other answers may be missing or broken."""
    adapter = ENGINES[name]
    answers = dict.fromkeys(adapter.describe_paths, b"<html>") | {adapter.describe_paths[0]: b'{"data": [{"id": "m"}]}'}
    facts = adapter.describe(answers, make_pod(name, dp_rank=0))
    assert facts is not None
    assert (facts.models, facts.block_size_tokens, facts.capacity_tokens) == (("m",), None, None)
    assert facts.kv_events is None


def test_a_request_is_pinned_to_its_rank(make_pod: MakePod) -> None:
    """A pod without a rank gets no header."""
    assert rank_headers(make_pod("vllm")) == {}
    assert rank_headers(make_pod("vllm", dp_rank=3)) == {"x-data-parallel-rank": "3"}


@engines
def test_the_health_path_costs_no_token(name: str) -> None:
    """SGLang's /health generates a token."""
    assert ENGINES[name].health_path == ("/v1/models" if name == "sglang" else "/health")
