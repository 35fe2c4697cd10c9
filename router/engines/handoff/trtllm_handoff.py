"""TensorRT-LLM's handoff: the context response has parameters and prompt tokens for the generation request.

Where its one token ended the text, it is the whole response. Source: docs/handoff.md#tensorrt-llm.
"""

from __future__ import annotations

from router.engines.handoff.bodies import edited, read_prefill, whole_response
from router.engines.handoff.dialect import Dialect, Handoff, Pair
from router.types import Endpoint

_UNFINISHED = ("length", "not_finished")


class TrtllmHandoff(Dialect):
    """`trtllm-serve` with a cache transceiver, context first."""

    hold_s = 20.0
    """A third of `kv_transfer_timeout_ms`, after which the context pod drops the KV."""

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        """`max_tokens` stays: the engine stops after one token by itself."""
        params = {"request_type": "context_only", "disagg_request_id": pair.id}
        return edited(body, {"stream": False, "disaggregated_params": params}, drop=("stream_options",))

    def read_handoff(self, response: bytes) -> Handoff | None:
        prefilled = read_prefill(response)
        if prefilled is None:
            return None
        if prefilled.choice.finish_reason and prefilled.choice.finish_reason not in _UNFINISHED:
            return Handoff(cached_tokens=prefilled.cached_tokens, response=whole_response(response))
        params = prefilled.choice.disaggregated_params
        return Handoff(params, prefilled.token_ids(), prefilled.cached_tokens) if params else None

    def decode_body(self, endpoint: Endpoint, body: bytes, pair: Pair, handoff: Handoff) -> bytes:
        params = {**handoff.params, "request_type": "generation_only"}
        prompt = "prompt_token_ids" if endpoint is Endpoint.CHAT else "prompt"
        tokens = {prompt: handoff.prompt_token_ids} if handoff.prompt_token_ids else {}
        return edited(body, {"disaggregated_params": params, **tokens})
