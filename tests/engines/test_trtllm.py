"""TensorRT-LLM, with sample answers."""

from __future__ import annotations

from router.engines.engine_catalog import ENGINES
from router.types import PodLoad
from tests.kit.scenes import make_pod

TRTLLM = ENGINES["trtllm"]
METRICS = b"""\
trtllm_num_requests_running{model_name="m",engine_type="trtllm"} 6.0
trtllm_num_requests_waiting{model_name="m",engine_type="trtllm"} 2.0
trtllm_kv_cache_utilization{model_name="m",engine_type="trtllm"} 0.75
"""


def test_load_is_read_from_the_prometheus_path() -> None:
    """From the Prometheus path; its samples have no rank."""
    assert TRTLLM.metrics_path == "/prometheus/metrics"
    assert TRTLLM.parse_load(METRICS, None, 1.0) == PodLoad(6, 2, 0.75, 1.0)
    assert TRTLLM.parse_load(METRICS, 1, 1.0) == PodLoad(6, 2, 0.75, 1.0)


def test_nothing_is_sent_that_it_would_refuse() -> None:
    """No /tokenize and no unknown field."""
    assert TRTLLM.tokenize_body("m", {"messages": []}) is None
    assert TRTLLM.tokenize_body("m", {"prompt": "hi"}) is None
    assert not TRTLLM.returns_token_ids


def test_its_models_have_no_context() -> None:
    """The longest prompt is then unknown."""
    facts = TRTLLM.describe({"/v1/models": b'{"data": [{"id": "m", "object": "model"}]}'}, make_pod(engine="trtllm"))
    assert facts is not None
    assert (facts.models, facts.max_model_len_tokens) == (("m",), None)
