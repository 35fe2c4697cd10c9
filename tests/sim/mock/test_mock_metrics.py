"""The metrics that a router scrapes."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from router.hashing import token_array
from router.sim.mock.mock_config import HandoffConfig, MockEngineConfig
from router.sim.mock.mock_metrics import metrics_body
from router.sim.mock.pinned_kv import HandoffCounters
from router.sim.pod import SimPod, SimRequest

NOTHING = HandoffCounters()


def scraped(config: MockEngineConfig, pod: SimPod, handoff: HandoffCounters = NOTHING) -> dict[str, float]:
    """Every sample by name, parsed by Prometheus' client."""
    families = text_string_to_metric_families(metrics_body(config, pod, handoff).decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_metrics_have_vllms_names(make_config: Callable[..., MockEngineConfig]) -> None:
    """Current load, and counters in tokens."""
    config = make_config(num_blocks=8, max_model_len=100)
    pod = SimPod(config)
    for name in "ab":
        pod.submit(SimRequest(id=name, prompt=token_array(range(33)), output=[1, 2]))
        pod.step()
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
    families = text_string_to_metric_families(metrics_body(config, SimPod(config), NOTHING).decode())
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
        pod.step()
        by_dialect[dialect] = scraped(config, pod, handoff)
    assert [seen["vllm:num_requests_waiting"] for seen in by_dialect.values()] == [2, 2, 2]
    assert "vllm:external_prefix_cache_hits_total" not in by_dialect[""]
    assert by_dialect["mooncake"]["vllm:external_prefix_cache_queries_total"] == 40
    assert by_dialect["mooncake"]["vllm:external_prefix_cache_hits_total"] == 30
    assert "vllm:nixl_num_failed_transfers_total" not in by_dialect["mooncake"]
    nixl = by_dialect["nixl"]
    assert (nixl["vllm:nixl_num_failed_transfers_total"], nixl["vllm:nixl_num_kv_expired_reqs_total"]) == (3, 4)
