"""The table of paths that may reach a pod, and the paths that an operator may add."""

from __future__ import annotations

import pytest

from router.engines.forwarded_paths import INFERENCE_PATHS, ForwardedPaths, added_path, changes_engine

CONTROL = [
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/reset_mm_cache", "/sleep"),
    *("/wake_up", "/collective_rpc", "/release_kv_cache_memory", "/pause", "/resume", "/start_profile"),
    *("/stop_profile", "/scale_elastic_ep", "/abort_requests", "/update_weights", "/finish_weight_update"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/fault_tolerance/apply"),  # vLLM
    *("/flush_cache", "/load_lora_adapter", "/update_weights_from_disk", "/release_memory_occupation"),
    *("/set_internal_state", "/slow_down", "/open_session", "/close_session", "/configure_logging"),
    *("/pause_generation", "/continue_generation", "/pd_role_switch", "/freeze_gc", "/hicache/storage-backend"),
    *("/start_expert_distribution_record", "/get_weights_by_name", "/abort_request"),  # SGLang
    *("/kv_cache_events", "/release_memory", "/resume_memory"),  # TensorRT-LLM
    *("/slots/0", "/lora-adapters", "/props", "/models/load", "/models/unload"),  # llama.cpp
]


@pytest.mark.parametrize("path", CONTROL)
def test_paths_that_change_an_engine_are_known(path: str) -> None:
    """In any case of letters; none is forwarded by default."""
    assert changes_engine(path) and changes_engine(path.upper())
    assert not ForwardedPaths().methods(path)


@pytest.mark.parametrize(
    "path", [*sorted(INFERENCE_PATHS), "/tokenize", "/detokenize", "/generate", "/infill", "/v1/files", "/v1/uploads"]
)
def test_inference_paths_do_not_count_as_control(path: str) -> None:
    """Neither do those that an operator is likely to add."""
    assert not changes_engine(path) and added_path(path) == path


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/chat/completions", {"POST"}),
        ("/v1/responses", {"POST"}),
        ("/v1/responses/resp_1-a", {"GET", "DELETE"}),
        ("/v1/responses/resp_1/cancel", {"POST"}),
        ("/v1/responses/resp_1/input_items", {"GET"}),
        ("/v1/responses/resp_1/other", set()),
        ("/v1/responses/", set()),
        ("/v1/responses/a.b", set()),
        ("/v1/responses/" + "a" * 129, set()),
        ("/extra", {"GET", "POST", "PUT", "PATCH", "DELETE"}),
        ("/v1/models", set()),
        ("/metrics", set()),
    ],
)
def test_a_path_has_its_methods(path: str, methods: set[str]) -> None:
    """The paths of the operator have all."""
    assert ForwardedPaths(["/extra"]).methods(path) == methods


@pytest.mark.parametrize(
    "path", ["", "/", "tokenize", "/tokenize/", "/a//b", "/a/../b", "/a/.", "/a%2eb", "/a?b", "/a b", "/é", "/a\n"]
)
def test_a_path_that_is_not_plain_cannot_be_added(path: str) -> None:
    """It would be compared with a path that is never accepted."""
    with pytest.raises(ValueError, match="must be"):
        added_path(path)


@pytest.mark.parametrize("path", ["/metrics", "/health", "/admin/pods", "/v1/models", "/v1/models/x", "/readyz"])
def test_a_path_of_the_router_cannot_be_added(path: str) -> None:
    """It would hide the router's own."""
    with pytest.raises(ValueError, match="itself"):
        added_path(path)
