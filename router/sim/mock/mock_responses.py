"""Encodes response bodies, SSE frames and `/metrics` in the format of vLLM 0.32.

Source: docs/engines.md#responses. Takes values and returns bytes; no I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
import xxhash

from router.sim.mock.handoff_dialects import NO_HANDOFF_FIELDS, HandoffFields
from router.sim.mock.mock_config import MockEngineConfig
from router.sim.mock.mock_requests import EmbeddingRequest, EngineError, GenerationRequest
from router.sim.mock.pinned_kv import HandoffCounters
from router.sim.pod import SimPod
from router.types import Endpoint

_ERROR_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}

encode = msgspec.json.Encoder().encode


def error_type(error: EngineError) -> str:
    """vLLM's class of the error where it has one, else the phrase of the status."""
    return _ERROR_TYPES.get(error.status, error.status.phrase)


def data_event(body: dict[str, Any]) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """An SSE event with the `type` of its body as its name."""
    return f"event: {body['type']}\n".encode() + data_event(body)


DONE = b"data: [DONE]\n\n"
EMBEDDING_DIMENSIONS = 8
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def error_body(error: EngineError) -> bytes:
    """`{"error": {message, type, param, code}}`, where `code` is the HTTP status as an int."""
    fields = {"message": str(error), "type": error_type(error), "param": error.param, "code": int(error.status)}
    return encode({"error": fields})


def error_frames(error: EngineError) -> bytes:
    """The error as the end of a stream, whose HTTP status is already sent."""
    return b"data: " + error_body(error) + b"\n\n" + DONE


def models_body(config: MockEngineConfig, adapters: Iterable[str], created_s: int) -> bytes:
    """The `/v1/models` body: served names, then adapters. An adapter has a parent and no length."""
    base = config.models[0]
    cards = [_card(name, base, None, config.max_model_len, created_s) for name in config.models]
    cards += [_card(name, f"/adapters/{name}", base, None, created_s) for name in adapters]
    return encode({"object": "list", "data": cards})


def tokens_body(tokens: array[int], max_model_len: int) -> bytes:
    listed = tokens.tolist()
    return encode({"count": len(listed), "max_model_len": max_model_len, "tokens": listed, "token_strs": None})


def embedding_body(request: EmbeddingRequest, embedding_id: str, created_s: int) -> bytes:
    """One vector per input; equal tokens get equal vectors."""
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(tokens)}
        for index, tokens in enumerate(request.inputs)
    ]
    count = sum(len(tokens) for tokens in request.inputs)
    usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0, "prompt_tokens_details": None}
    head = {"id": f"embd-{embedding_id}", "object": "list", "created": created_s, "model": request.model}
    return encode(head | {"data": data, "usage": usage})


def usage(request: GenerationRequest, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Token counts, always with details, as with `--enable-prompt-tokens-details`."""
    prompt_tokens = len(request.prompt)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached_tokens,
            "created_cache_tokens": prompt_tokens - cached_tokens,
        },
    }


def unary_body(
    request: GenerationRequest, created_s: int, cached_tokens: int, handoff: HandoffFields = NO_HANDOFF_FIELDS
) -> bytes:
    """The complete response body, with the fields of a prefill leg."""
    output = request.output
    text = "".join(output.texts)
    chat = request.endpoint is Endpoint.CHAT
    choice: dict[str, Any] = {"index": 0}
    choice |= {"message": _chat_message(request, text)} if chat else {"text": text}
    choice |= {"logprobs": None, "finish_reason": output.finish_reason, "stop_reason": None}
    body = _envelope(request, created_s, "chat.completion" if chat else "text_completion", choice)
    if request.return_token_ids:
        choice["token_ids"] = output.tokens
        (body if chat else choice)["prompt_token_ids"] = request.prompt.tolist()
    choice |= handoff.choice
    body |= handoff.top
    body["system_fingerprint"] = request.engine
    return encode(body | {"usage": usage(request, len(output.tokens), cached_tokens)})


class StreamFrames:
    def __init__(self, request: GenerationRequest, created_s: int) -> None:
        self._request = request
        self._chat = request.endpoint is Endpoint.CHAT
        self._created_s = created_s
        self._object = "chat.completion.chunk" if self._chat else "text_completion"

    def opening(self) -> bytes:
        return b""

    def tokens(self, first: int, end: int) -> list[bytes]:
        """One frame per token in `[first, end)`; before token 0 of a chat, the frame with the role."""
        frames = [self._token(index) for index in range(first, end)]
        if first == 0 and self._chat:
            role = self._frame({"delta": {"role": "assistant", "content": ""}}, None, self._prompt_token_ids())
            frames.insert(0, role)
        return frames

    def closing(self, cached_tokens: int) -> bytes:
        request = self._request
        empty: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        frames = self._frame(empty, request.output.finish_reason, {})
        if request.include_usage:
            counts = usage(request, len(request.output.tokens), cached_tokens)
            last = _envelope(request, self._created_s, self._object)
            frames += data_event(last | {"system_fingerprint": request.engine, "usage": counts})
        return frames + DONE

    def _token(self, index: int) -> bytes:
        output = self._request.output
        text = output.texts[index]
        choice: dict[str, Any] = {"delta": self._delta(index, text)} if self._chat else {"text": text}
        if self._request.return_token_ids:
            choice["token_ids"] = (output.tokens[index],)
            if index == 0 and not self._chat:
                choice |= self._prompt_token_ids()
        return self._frame(choice, None, {})

    def _delta(self, index: int, text: str) -> dict[str, Any]:
        if self._request.output.call is None:
            return {"content": text}
        if index == 0:
            return {"tool_calls": [{"index": 0, **_call(self._request, text)}]}
        return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}

    def _prompt_token_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._request.prompt.tolist()} if self._request.return_token_ids else {}

    def _frame(self, choice: dict[str, Any], finish_reason: str | None, extra: dict[str, Any]) -> bytes:
        choice = {"index": 0, **choice, "logprobs": None, "finish_reason": finish_reason}
        return data_event(_envelope(self._request, self._created_s, self._object, choice) | extra)


def _chat_message(request: GenerationRequest, text: str) -> dict[str, Any]:
    if request.output.call is None:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": None, "tool_calls": [_call(request, text)]}


def _call(request: GenerationRequest, arguments: str) -> dict[str, Any]:
    assert request.output.call is not None
    function = {"name": request.output.call.name, "arguments": arguments}
    return {"id": f"call_{request.id}", "type": "function", "function": function}


def _envelope(request: GenerationRequest, created_s: int, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
    return {"id": request.id, "object": kind, "created": created_s, "model": request.model, "choices": choices}


def _card(name: str, root: str, parent: str | None, max_model_len: int | None, created_s: int) -> dict[str, Any]:
    card = {"id": name, "object": "model", "created": created_s, "owned_by": "vllm", "root": root, "parent": parent}
    return card | {"max_model_len": max_model_len, "permission": []}


def _vector(tokens: array[int]) -> Sequence[float]:
    digests = (xxhash.xxh3_64_intdigest(tokens.tobytes(), seed) for seed in range(EMBEDDING_DIMENSIONS))
    return [digest / 2**63 - 1 for digest in digests]


# --- /metrics ---


def metrics_body(config: MockEngineConfig, pod: SimPod, handoff: HandoffCounters) -> bytes:
    """The vLLM series that a router reads, as exposition text. Prefix cache counters are in tokens."""
    load, labels = pod.load, _labels({"model_name": config.models[0], "engine": "0"})
    gauges: Mapping[str, float] = {
        "num_requests_running": load.running,
        "num_requests_waiting": load.waiting + handoff.receiving,
        "kv_cache_usage_perc": load.kv_usage,
    }
    lines: list[str] = []
    for name, value in gauges.items():
        lines += (f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{labels}}} {float(value)}")
    for name, value in _counters(config.handoff.dialect, pod, handoff).items():
        lines += (f"# TYPE vllm:{name}_total counter", f"vllm:{name}_total{{{labels}}} {float(value)}")
    lines += ("# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{_cache_config(config)}}} 1.0")
    return ("\n".join(lines) + "\n").encode()


def _counters(dialect: str, pod: SimPod, handoff: HandoffCounters) -> dict[str, int]:
    counters = pod.counters
    values = {
        "prefix_cache_queries": counters.prompt_tokens,
        "prefix_cache_hits": counters.prefix_cache_hits,
        "prompt_tokens": counters.prompt_tokens,
        "generation_tokens": counters.generation_tokens,
        "num_preemptions": pod.preemptions,
    }
    if dialect:
        values |= {
            "external_prefix_cache_queries": counters.external_prefix_cache_queries,
            "external_prefix_cache_hits": counters.external_prefix_cache_hits,
        }
    if dialect == "nixl":
        values |= {"nixl_num_kv_expired_reqs": handoff.expired, "nixl_num_failed_transfers": handoff.failed}
    return values


def _cache_config(config: MockEngineConfig) -> str:
    return _labels(
        {
            "block_size": config.block_size_tokens,
            "hash_block_size": config.block_size_tokens,
            "num_gpu_blocks": config.num_blocks,
            "kv_cache_size_tokens": config.num_blocks * config.block_size_tokens,
            "prefix_caching_hash_algo": "xxhash",
            "enable_prefix_caching": True,
            "engine": "0",
        }
    )


def _labels(values: Mapping[str, object]) -> str:
    escaped = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{str(value).translate(escaped)}"' for name, value in values.items())
