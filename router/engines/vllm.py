"""vLLM 0.8 to 0.33, as in docs/engines.md. Every field may be missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec.structs import replace

from router.engines.adapter import (
    MAX_BLOCK_TOKENS,
    MODELS_PATH,
    EngineAdapter,
    KvEventSource,
    PodFacts,
    ReportedText,
    Responses,
    decode,
    known_size,
    on_pod,
    rank_count,
)
from router.engines.handoff.vllm_connectors import takes_prompt_tokens
from router.engines.lacks import COMMON_LACKS, CONTINUING_ALONE, LARGE_BODY, LISTED_PROMPTS, SEVERAL_ANSWERS, Lack
from router.engines.prometheus import LoadGauges, Sample, samples
from router.guards import OutOfBounds
from router.prompt.apis.conversion import Conversion
from router.prompt.apis.vllm_messages import VllmMessages
from router.prompt.apis.vllm_responses import VllmResponses
from router.prompt.apis.vllm_rust_chat import VllmRustChat
from router.prompt.conversation import reasoning_of, with_decoded_messages
from router.prompt.pictures.vllm_identifier import identify
from router.types import Endpoint, Pod

_OLD_REASONING, _REASONING = "reasoning_content", "reasoning"
_NUMBER = re.compile(r"\d{1,18}")
_METRICS_PATH = "/metrics"
_KV_PATH = "/kv_event_sources"
_VERSION_PATH = "/version"
_RUST_OWNER = "vllm-frontend-rs"
_CONTINUED = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS})
RUST_LACKS = (
    *(Endpoint.MESSAGES.value, Endpoint.COUNT_TOKENS.value, Endpoint.RESPONSES.value, "/v1/chat/completions/batch"),
    *(Endpoint.DECISIONS.value, Endpoint.SYSTEMONE.value),
    *(SEVERAL_ANSWERS, LISTED_PROMPTS, LARGE_BODY),
)
"""What the front end in Rust lacks in 0.33.0. Later ones will have some of it, so each pod is asked."""


class _Source(msgspec.Struct):
    publisher: str | None = None
    endpoint: ReportedText | None = None
    replay_endpoint: ReportedText | None = None


class _Version(msgspec.Struct):
    version: ReportedText = ""
    rust_frontend_version: ReportedText = ""


class _Rank(msgspec.Struct):
    id: int
    status: ReportedText
    fault_info: ReportedText = ""


class _Faults(msgspec.Struct):
    engines: list[_Rank]


class _Sleep(msgspec.Struct):
    is_sleeping: bool


class Vllm(EngineAdapter):
    owners: tuple[str, ...] = ("vllm", _RUST_OWNER)
    may_force_usage = True  # --enable-force-include-usage
    image_names = ("vllm",)
    gauges = LoadGauges(
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        rank_label="engine",
    )
    lack_answers = (
        *COMMON_LACKS,
        Lack(HTTPStatus.BAD_REQUEST, re.compile(rb'\{"error": ?\{"message": ?"Only n=1 is'), SEVERAL_ANSWERS),
        Lack(HTTPStatus.BAD_REQUEST, re.compile(rb".*untagged enum Prompt\b", re.DOTALL), LISTED_PROMPTS),
        Lack(HTTPStatus.BAD_REQUEST, re.compile(rb".*Cannot set both `continue_fin", re.DOTALL), CONTINUING_ALONE),
    )
    faults_path = "/fault_tolerance/status"
    sleep_path = "/is_sleeping"
    describe_paths = (MODELS_PATH, _METRICS_PATH, _KV_PATH, _VERSION_PATH)
    kv_events_flag = '--kv-events-config {"enable_kv_cache_events":true,"publisher":"zmq"}'
    returns_token_ids = True
    # Not documents and reasoning_effort, which change the prompt and which /tokenize does not accept.
    tokenize_fields = frozenset(
        {
            *("messages", "tools", "chat_template", "chat_template_kwargs"),
            *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
        }
    )

    lora_paths = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    conversions: Mapping[Endpoint, type[Conversion]] = {
        Endpoint.MESSAGES: VllmMessages,
        Endpoint.COUNT_TOKENS: VllmMessages,
        Endpoint.RESPONSES: VllmResponses,
    }
    front_ends: Mapping[str, Mapping[Endpoint, type[Conversion]]] = {"rust": {Endpoint.CHAT: VllmRustChat}}
    may_lack: Mapping[str, Sequence[str]] = {"rust": RUST_LACKS}

    identify_picture = staticmethod(identify)

    def tokenize_body(self, model: str, prompt: Mapping[str, Any]) -> dict[str, Any] | None:
        body = super().tokenize_body(model, prompt)
        if body is not None and isinstance(messages := body.get("messages"), list):
            body["messages"] = [_as_in_chats(message) for message in messages]
        return body

    def describe(self, responses: Responses, pod: Pod) -> PodFacts | None:
        facts = super().describe(responses, pod)
        if facts is None:
            return None
        caches = _caches(responses.get(_METRICS_PATH, b""))
        block_size_tokens, capacity_tokens = _cache_config(caches, pod.dp_rank)
        release = decode(responses.get(_VERSION_PATH, b""), _Version)
        return replace(
            facts,
            dp_size=_ranks(responses.get(_KV_PATH, b""), caches),
            version=release.version if release else "",
            front_end=_front_end(facts, release),
            block_size_tokens=block_size_tokens,
            capacity_tokens=capacity_tokens,
            kv_events=(events := _kv_events(responses.get(_KV_PATH, b""), pod)),
            no_events="" if events else self.without_events(_KV_PATH, responses),
        )

    def pause_reason(self, said: bytes) -> str:
        return next((reason for text, reason in _PAUSES.items() if text in said), "")

    def is_dead(self, said: bytes) -> bool:
        return _DEAD in said

    def fault(self, faults: bytes, pod: Pod) -> str:
        """A pod without a rank has a fault only if all its engines have one: else its front end uses the others."""
        reported = decode(faults, _Faults)
        own = [one for one in reported.engines if pod.dp_rank in (None, one.id)] if reported else []
        if not own or any(one.status == "healthy" for one in own):
            return ""
        return f"the engine reports that rank {own[0].id} is {own[0].status}: {own[0].fault_info}".rstrip(": ")

    def is_asleep(self, said: bytes) -> bool:
        return (found := decode(said, _Sleep)) is not None and found.is_sleeping

    def wake_calls(self, metrics: bytes) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """None where it is only paused, for new weights. Level 2 has dropped its weights, and loads them again."""
        try:
            states = {one.labels.get("sleep_state") for one in samples(metrics, "vllm:engine_sleep_state") if one.value}
        except OutOfBounds:
            return ()
        if "discard_all" in states:
            return _LOADING_WAKE
        return (("/wake_up", {}),) if "weights_offloaded" in states else ()

    def continues(self, pod: Pod) -> frozenset[Endpoint]:
        if not takes_prompt_tokens(pod):
            return frozenset()
        return _CONTINUED - {Endpoint.CHAT} if pod.front_end == "rust" else _CONTINUED

    def around_tokens(self, count: int, pod: Pod) -> tuple[bytes, bytes] | None:
        if pod.max_model_len_tokens is None:
            return None
        return b'{"count":%d,"max_model_len":%d,"tokens":[' % (count, pod.max_model_len_tokens), b'],"token_strs":null}'


_LOADING_WAKE: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("/wake_up?tags=weights", {}),
    ("/collective_rpc", {"method": "reload_weights"}),
    ("/wake_up?tags=kv_cache", {}),
)
_DEAD = b"EngineCore encountered an issue."
"""How `EngineDeadError` begins (`v1/engine/exceptions.py`), which is not recoverable; errors of one request differ."""
_PAUSES = {
    b"The model is currently scaling": "the engine changes its number of ranks",
    b"rank has been retired": "the engine has retired this rank",
}
"""Texts of its 503 while it scales (`entrypoints/serve/elastic_ep/middleware.py`). In 0.33 /health succeeds then."""


def _as_in_chats(message: Any) -> Any:
    """A message for /tokenize, which does not rename the old field of reasoning, as chats do since 0.32."""
    if isinstance(message, msgspec.Raw):
        if _OLD_REASONING.encode() not in bytes(message):
            return message
        (message,) = with_decoded_messages({"messages": [message]})["messages"]
    if not isinstance(message, dict) or _OLD_REASONING not in message:
        return message
    reasoning = reasoning_of(message)
    renamed = {name: value for name, value in message.items() if name not in (_OLD_REASONING, _REASONING)}
    return renamed if reasoning is None else {**renamed, _REASONING: reasoning}


def _caches(metrics: bytes) -> Sequence[Sample]:
    """The configurations of the caches of its ranks; none of a page that is out of bounds."""
    try:
        return list(samples(metrics, "vllm:cache_config_info"))
    except OutOfBounds:
        return ()


def _front_end(facts: PodFacts, release: _Version | None) -> str:
    is_rust = facts.owner == _RUST_OWNER or bool(release and release.rust_frontend_version)
    return "rust" if is_rust else ""


def _ranks(kv_sources: bytes, caches: Sequence[Sample]) -> int:
    """Ranks that publish KV events, else those that have metrics."""
    sources = decode(kv_sources, dict[str, _Source])
    return rank_count(sources or (sample.labels.get("engine", "") for sample in caches))


def _cache_config(caches: Sequence[Sample], dp_rank: int | None) -> tuple[int | None, int | None]:
    """(tokens per block, KV capacity in tokens) from the labels of `cache_config_info`, which are the values in force.
    Prefixes are hashed in hash_block_size; the blocks of hybrid models are larger."""
    block_size_tokens, capacity_tokens = None, 0
    for sample in caches:
        if dp_rank is not None and sample.labels.get("engine", str(dp_rank)) != str(dp_rank):
            continue
        sizes = {name: int(value) for name, value in sample.labels.items() if _NUMBER.fullmatch(value)}
        size = known_size(sizes.get("block_size"), MAX_BLOCK_TOKENS) or 0
        block_size_tokens = known_size(sizes.get("hash_block_size"), MAX_BLOCK_TOKENS) or size or None
        capacity_tokens += sizes.get("kv_cache_size_tokens") or sizes.get("num_gpu_blocks", 0) * size
    return block_size_tokens, known_size(capacity_tokens)


def _kv_events(response: bytes, pod: Pod) -> KvEventSource | None:
    """The source of the pod's rank, or the only one. None where the rank is ambiguous: no request could be sent to the
    rank that has a block."""
    sources = decode(response, dict[str, _Source]) or {}
    rank = next(iter(sources), "") if pod.dp_rank is None and len(sources) == 1 else str(pod.dp_rank)
    source = sources.get(rank)
    if source is None or source.publisher != "zmq" or not source.endpoint:
        return None
    endpoint, replay = on_pod(source.endpoint, pod), source.replay_endpoint
    return KvEventSource(endpoint, on_pod(replay, pod) if replay else None) if endpoint else None
