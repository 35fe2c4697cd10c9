"""Encodes response bodies, SSE frames and `/metrics` in the format of vLLM 0.32.

Source: docs/engines.md#responses. Takes values and returns bytes; no I/O.
"""

from __future__ import annotations

import struct
import uuid
from array import array
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
import xxhash

from loadtest.engine_model.pod import SimPod
from loadtest.mock_engine.handoff_dialects import NO_HANDOFF_FIELDS, HandoffFields
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_requests import EngineError, GenerationRequest
from loadtest.mock_engine.pinned_kv import HandoffCounters
from loadtest.mock_engine.vocabulary import Piece
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
AUDIO_TYPES = {"pcm": b"audio/pcm", "wav": b"audio/wav", "mp3": b"audio/mpeg"}
_WAV_HEAD = (
    b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 24000, 48000, 2, 16) + b"data\xff\xff\xff\xff"
)
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
    owner = "vllm-frontend-rs" if config.front_end == "rust" else "vllm"
    cards = [_card(name, base, None, config.max_model_len, created_s, owner) for name in config.models]
    cards += [_card(name, f"/adapters/{name}", base, None, created_s, owner) for name in adapters]
    return encode({"object": "list", "data": cards})


def tokens_body(tokens: array[int], max_model_len: int) -> bytes:
    listed = tokens.tolist()
    return encode({"count": len(listed), "max_model_len": max_model_len, "tokens": listed, "token_strs": None})


def embedding_body(model: str, inputs: Sequence[array[int]], encoding: str, created_s: int) -> bytes:
    """One vector per input, as numbers or as base64 of float32; equal tokens get equal vectors."""
    vectors = [array("f", _vector(tokens)) for tokens in inputs]
    shown = [b64encode(one).decode() if encoding == "base64" else one.tolist() for one in vectors]
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(shown)]
    count = sum(map(len, inputs))
    usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0, "prompt_tokens_details": None}
    head = {"id": f"embd-{uuid.uuid4().hex}", "object": "list", "created": created_s, "model": model}
    return encode(head | {"data": data, "usage": usage})


def usage(request: GenerationRequest, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """Token counts, with details of the prompt as with `--enable-prompt-tokens-details` where its cached tokens are
    given."""
    prompt_tokens = len(request.prompt)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached_tokens is not None:
        created = prompt_tokens - cached_tokens
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens, "created_cache_tokens": created}
    if request.endpoint is Endpoint.CHAT:
        counts["completion_tokens_details"] = {"reasoning_tokens": request.output.reasoning_tokens(completion_tokens)}
    return counts


def unary_body(
    request: GenerationRequest, created_s: int, cached_tokens: int, handoff: HandoffFields = NO_HANDOFF_FIELDS
) -> bytes:
    output = request.output
    chat = request.endpoint is Endpoint.CHAT
    choice: dict[str, Any] = {"index": 0}
    choice |= {"message": _chat_message(request)} if chat else {"text": "".join(output.texts)}
    choice |= {"logprobs": None, "finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
    others = [{**choice, "index": index} for index in range(1, request.answers)]
    body = _envelope(request, created_s, "chat.completion" if chat else "text_completion", choice, *others)
    if request.return_token_ids:
        choice["token_ids"] = output.tokens
        (body if chat else choice)["prompt_token_ids"] = request.prompt.tolist()
    choice |= handoff.choice
    body |= handoff.top
    body["system_fingerprint"] = request.engine
    return encode(body | {"usage": usage(request, len(output.tokens) * request.answers, cached_tokens)})


class Frames(Protocol):
    """The frames of one streamed response: those before the prefill, those of tokens, and the last ones."""

    def opening(self) -> bytes:
        return b""

    def tokens(self, first: int, end: int) -> list[bytes]: ...

    def closing(self, cached_tokens: int) -> bytes: ...


NO_OFFERS = object()


class StreamFrames(Frames):
    def __init__(self, request: GenerationRequest, created_s: int) -> None:
        self.offer: Any = NO_OFFERS
        """Transfer parameters of the finishing chunk, in releases whose chunks have them."""
        self._request = request
        self._chat = request.endpoint is Endpoint.CHAT
        self._created_s = created_s
        self._object = "chat.completion.chunk" if self._chat else "text_completion"
        hides = self._chat and not request.include_reasoning
        self._shows_ids = request.return_token_ids and not hides
        self._deltas = _Deltas(hides)

    def tokens(self, first: int, end: int) -> list[bytes]:
        """The frames of the tokens in `[first, end)`; before token 0 of a chat, the frame with the role. A frame of a
        chat without text is sent only for its token ids or its finish reason."""
        step = self._request.stream_interval
        frames = [self._chunk(at, min(at + step, end)) for at in range(first, end, step)]
        if first == 0 and self._chat:
            delta = {"role": "assistant", "content": ""}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            frames.insert(0, self._frame(choice, 0, {"prompt_token_ids": self._prompt_ids(), "prompt_text": None}))
        return frames

    def closing(self, cached_tokens: int) -> bytes:
        request, frames = self._request, b""
        tokens = len(request.output.tokens)
        if request.output.finish_reason == "abort":
            frames = self._frame(
                self._choice({"delta": {}} if self._chat else {"text": ""}, range(0), "abort"), tokens, {}
            )
        if request.include_usage:
            last = _envelope(request, self._created_s, self._object)
            last |= {"usage": usage(request, tokens, cached_tokens), "system_fingerprint": request.engine}
            frames += data_event(last)
        return frames + DONE

    def _chunk(self, first: int, end: int) -> bytes:
        output = self._request.output
        pieces = output.pieces[first:end]
        is_last = end == len(output.tokens) and output.finish_reason != "abort"
        if self._chat:
            delta = self._deltas.of(pieces)
            if not (delta or is_last or self._shows_ids):
                return b""
            said: dict[str, Any] = {"delta": delta}
        else:
            said = {"text": "".join(piece.text for piece in pieces)}
        choice = self._choice(said, range(first, end), output.finish_reason if is_last else None)
        shows_engine = is_last and not self._request.include_usage
        extra: dict[str, Any] = {"system_fingerprint": self._request.engine} if shows_engine else {}
        if self.offer is not NO_OFFERS:
            extra["kv_transfer_params"] = self.offer if is_last else None
        return self._frame(choice, end, extra)

    def _choice(self, said: dict[str, Any], tokens: range, finish_reason: str | None) -> dict[str, Any]:
        output = self._request.output
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None or not self._chat:
            choice["stop_reason"] = output.stop_reason if finish_reason is not None else None
        if not self._chat:
            choice["prompt_token_ids"] = self._prompt_ids() if tokens.start == 0 and tokens else None
        choice["token_ids"] = output.tokens[tokens.start : tokens.stop] if self._shows_ids else None
        return choice

    def _prompt_ids(self) -> list[int] | None:
        return self._request.prompt.tolist() if self._request.return_token_ids else None

    def _frame(self, choice: dict[str, Any], tokens: int, extra: dict[str, Any]) -> bytes:
        body = _envelope(self._request, self._created_s, self._object, choice)
        if self._request.include_usage and self._request.continuous_usage:
            body["usage"] = usage(self._request, tokens)
        return data_event(body | extra)


class SpeechFrames(StreamFrames):
    """Speech that is made while it is sent, 20 ms a token: bytes, or OpenAI's events."""

    def tokens(self, first: int, end: int) -> list[bytes]:
        audio, tokens = self._request.audio, self._request.output.tokens[first:end]
        pieces = [token.to_bytes(4, "little") * 240 for token in tokens]
        if audio not in AUDIO_TYPES:
            return [data_event({"type": "speech.audio.delta", "audio": b64encode(one).decode()}) for one in pieces]
        return [_WAV_HEAD, *pieces] if audio == "wav" and not first else pieces

    def closing(self, cached_tokens: int) -> bytes:
        if self._request.audio in AUDIO_TYPES:
            return b""
        inputs, outputs = len(self._request.prompt), len(self._request.output.tokens)
        used = {"input_tokens": inputs, "output_tokens": outputs, "total_tokens": inputs + outputs}
        return data_event({"type": "speech.audio.done", "usage": used})


class _Deltas:
    """What the chunks of a chat say. Calls are numbered over the whole stream, and have random ids."""

    def __init__(self, hides_reasoning: bool) -> None:
        self._hides_reasoning = hides_reasoning
        self._calls = -1

    def of(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        texts: dict[str, str] = {}
        calls: dict[int, dict[str, Any]] = {}
        for kind, text in pieces:
            if kind == "name":
                self._calls += 1
                head = {"id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}", "type": "function"}
                calls[self._calls] = {**head, "index": self._calls, "function": {"name": text}}
            elif text and kind == "arguments":
                function = calls.setdefault(self._calls, {"index": self._calls, "function": {}})["function"]
                function["arguments"] = function.get("arguments", "") + text
            elif text and not (kind == "reasoning" and self._hides_reasoning):
                texts[kind] = texts.get(kind, "") + text
        delta: dict[str, Any] = {"content": texts.get("content")} if calls or "content" in texts else {}
        delta |= {"reasoning": texts["reasoning"]} if "reasoning" in texts else {}
        return delta | ({"tool_calls": list(calls.values())} if calls else {})


def _chat_message(request: GenerationRequest) -> dict[str, Any]:
    delta = _Deltas(not request.include_reasoning).of(request.output.pieces)
    for call in delta.get("tool_calls", ()):
        del call["index"]
        call["function"].setdefault("arguments", "")
    return {"role": "assistant", "content": None if "tool_calls" in delta else "", **delta}


def _envelope(request: GenerationRequest, created_s: int, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
    return {"id": request.id, "object": kind, "created": created_s, "model": request.model, "choices": choices}


def _card(
    name: str, root: str, parent: str | None, max_model_len: int | None, created_s: int, owner: str
) -> dict[str, Any]:
    card = {"id": name, "object": "model", "created": created_s, "owned_by": owner, "root": root, "parent": parent}
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
    cache = {
        "block_size": config.block_size_tokens,
        "hash_block_size": config.block_size_tokens,
        "num_gpu_blocks": config.num_blocks,
        "kv_cache_size_tokens": config.num_blocks * config.block_size_tokens,
        "prefix_caching_hash_algo": "xxhash",
        "enable_prefix_caching": True,
        "engine": "0",
    }
    if config.front_end != "rust":
        lines += ("# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{_labels(cache)}}} 1.0")
    return ("\n".join(lines) + "\n").encode()


def filtered_metrics(body: bytes, names: Sequence[str], kind: str) -> bytes:
    """What is left of a page for a scrape of these names: see `MockEngineConfig.metrics_filter`."""
    if kind == "ignored":
        return body
    wanted = tuple(f"{name}{{".encode() for name in names) if kind == "names" else ()
    return b"".join(line for line in body.splitlines(keepends=True) if line.startswith(wanted))


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


def _labels(values: Mapping[str, object]) -> str:
    escaped = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{str(value).translate(escaped)}"' for name, value in values.items())


def bill(price: tuple[float, float, float], answers: int, prompt: int, cached: int, output: int) -> bytes:
    """The metrics of what a hosted model has billed."""
    of_prompt, of_cached, of_output = price
    money = ((prompt - cached) * of_prompt + cached * of_cached + output * of_output) / 1e6
    line = b'mock_billed_tokens_total{kind="%b"} %d\n'
    kinds = line % (b"prompt", prompt) + line % (b"output", output)
    return b"mock_billed_answers_total %d\n%bmock_billed_money_total %.9f\n" % (answers, kinds, money)
