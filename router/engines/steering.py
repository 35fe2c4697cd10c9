"""Which fields and headers of a request steer the engine itself?

With them a client could read or replace the KV of other tenants, choose a rank, overtake other tenants, or make an
engine connect to any address. They are removed unless `edge.trust_engine_fields`.
"""

from __future__ import annotations

from typing import NamedTuple


class Steering(NamedTuple):
    """Names with the same effect. `engines` lists where it was read."""

    engines: str
    names: tuple[str, ...]
    effect: str


HANDOFFS = (
    Steering("vllm", ("kv_transfer_params",), "names the pod whose KV is read; a wrong type stops the engine"),
    Steering(
        "sglang",
        ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
        "names the address that KV is fetched from",
    ),
    Steering("sglang", ("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"), "chooses the rank"),
    Steering("trtllm", ("disaggregated_params",), "names the pod whose KV is read"),
)
"""Fields that only a dialect writes (`engines/handoff/`)."""

FIELDS = (
    *HANDOFFS,
    Steering("vllm", ("ec_transfer_params",), "names the pod whose image embeddings are read"),
    Steering("vllm", ("kv_cache_report_mode",), "makes the engine announce blocks again"),
    Steering("trtllm", ("prompt_token_ids", "prompt_token_ids_b64"), "replaces the prompt that the router read"),
    Steering("vllm, sglang", ("request_id", "rid"), "sets the id by which requests are aborted and KV is exchanged"),
    Steering("sglang", ("session_params",), "continues from the KV of another request"),
    Steering("sglang, trtllm", ("conversation_id", "conversation_params"), "chooses the rank"),
    Steering("sglang, trtllm", ("lora_path", "lora_request"), "loads an adapter by its path; the router reads `model`"),
    Steering("llamacpp", ("lora", "id_slot", "slot_id"), "chooses adapters and the slot whose KV is replaced"),
    Steering("vllm, sglang, trtllm", ("priority",), "overtakes other tenants"),
    Steering("sglang", ("custom_logit_processor",), "runs serialized code in the engine"),
    Steering("vllm", ("logits_processors",), "imports code in the engine (until 0.10)"),
    Steering("sglang", ("return_hidden_states", "return_routed_experts"), "returns the model's internal state"),
    Steering("sglang", ("custom_labels",), "adds series to the engine's metrics"),
    Steering("dynamo", ("nvext",), "chooses the worker, the rank, the tokens and the priority"),
)
"""Top-level fields of a body. Source: docs/engines.md#fields-and-headers-that-steer-an-engine."""

CONTAINERS = frozenset({"vllm_xargs", "extra_args", "extra_body", "sampling_params"})
"""Fields whose value is an object in which engines look for the same names: vLLM copies vllm_xargs to the sampling
parameters, where connectors read kv_transfer_params."""

HEADERS = (
    Steering("vllm, sglang, llm-d", ("x-data-parallel-rank", "x-data-parallel-host-port"), "chooses the rank"),
    Steering("vllm", ("x-vllm-priority",), "overtakes other tenants"),
    Steering("vllm", ("endpoint-load-metrics-format",), "returns the pod's load, and logs a line for each response"),
    Steering(
        "sglang",
        (
            *("x-override-bootstrap-host", "x-override-bootstrap-port", "x-override-bootstrap-room"),
            *("x-override-rid", "x-override-routed-dp-rank", "x-override-disagg-prefill-dp-rank"),
            *("x-override-priority", "x-override-conversation-id"),
        ),
        "sets the field of that name",
    ),
    Steering(
        "llm-d",
        ("x-prefiller-host-port", "x-encoder-hosts-ports", "x-kv-cache-source-host-port"),
        "names the pod whose KV is read",
    ),
)
"""Source: as of `FIELDS`."""


def names_of(table: tuple[Steering, ...]) -> frozenset[str]:
    return frozenset(name for row in table for name in row.names)


STEERING_FIELDS = names_of(FIELDS)
HANDOFF_FIELDS = names_of(HANDOFFS)
STEERING_HEADERS = frozenset(name.encode() for name in names_of(HEADERS))
