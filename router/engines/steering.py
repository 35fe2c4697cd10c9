"""Which fields and headers of a request steer the engine itself?

With them a client could read or replace the KV of other tenants, choose a rank, overtake other tenants, or make an
engine connect to any address. They are removed unless `edge.trust_engine_fields`. The comments say which engines read
them, and what for. Source: docs/engines.md#fields-and-headers-that-steer-an-engine.
"""

from __future__ import annotations

HANDOFF_FIELDS = frozenset(
    {
        "kv_transfer_params",  # vllm: the pod whose KV is read; a wrong type stops the engine
        *(
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "bootstrap_pair_key",
        ),  # sglang: where KV is
        *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),  # sglang: the rank
        "disaggregated_params",  # trtllm: the pod whose KV is read
    }
)
"""Fields that only a dialect writes (`engines/handoff/`)."""

STEERING_FIELDS = HANDOFF_FIELDS | {
    "ec_transfer_params",  # vllm: the pod whose image embeddings are read
    "kv_cache_report_mode",  # vllm: announces blocks again
    *("prompt_token_ids", "prompt_token_ids_b64"),  # trtllm: replace the prompt that the router read
    *("request_id", "rid"),  # vllm, sglang: the id by which requests are aborted and KV is exchanged
    "session_params",  # sglang: continues from the KV of another request
    *("conversation_id", "conversation_params"),  # sglang, trtllm: the rank
    *("lora_path", "lora_request"),  # sglang, trtllm: an adapter by its path; the router reads `model`
    *("lora", "id_slot", "slot_id"),  # llamacpp: adapters, and the slot whose KV is replaced
    "priority",  # vllm, sglang, trtllm: overtakes other tenants
    "custom_logit_processor",  # sglang: serialized code that the engine runs
    "logits_processors",  # vllm until 0.10: code that the engine imports
    *("return_hidden_states", "return_routed_experts"),  # sglang: the model's internal state
    "custom_labels",  # sglang: series of the engine's metrics
    "nvext",  # dynamo: the worker, the rank, the tokens and the priority
}
"""Top-level fields of a body."""

CONTAINERS = frozenset({"vllm_xargs", "extra_args", "extra_body", "sampling_params"})
"""Fields whose value is an object in which engines look for the same names: vLLM copies vllm_xargs to the sampling
parameters, where connectors read kv_transfer_params."""

STEERING_HEADERS = frozenset(
    {
        *(b"x-data-parallel-rank", b"x-data-parallel-host-port"),  # vllm, sglang, llm-d: the rank
        b"x-vllm-priority",  # vllm: overtakes other tenants
        b"endpoint-load-metrics-format",  # vllm: returns the pod's load, and logs a line for each response
        # sglang: the field of that name
        *(b"x-override-bootstrap-host", b"x-override-bootstrap-port", b"x-override-bootstrap-room"),
        *(b"x-override-rid", b"x-override-routed-dp-rank", b"x-override-disagg-prefill-dp-rank"),
        *(b"x-override-priority", b"x-override-conversation-id"),
        # llm-d: the pod whose KV is read
        *(b"x-prefiller-host-port", b"x-prefiller-url"),
        *(b"x-encoder-hosts-ports", b"x-kv-cache-source-host-port"),
        *(b"x-llm-d-model-name-rewrite", b"x-gateway-model-name-rewrite"),  # llm-d: the model in place of the body's
    }
)
