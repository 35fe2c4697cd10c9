"""SGLang 0.5, as in docs/engines.md. It exports metrics only with `--enable-metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from router.addresses import join_address
from router.engines.adapter import (
    LOAD,
    MAX_BLOCK_TOKENS,
    MAX_RANKS,
    MAX_TOKENS,
    MODELS_PATH,
    EngineAdapter,
    KvEventSource,
    PodFacts,
    ReportedText,
    Responses,
    decode,
    known_size,
    on_pod,
)
from router.engines.prometheus import MAX_REQUESTS, LoadGauges
from router.guards import OutOfRange, checked
from router.prompt.apis.conversion import Conversion
from router.prompt.apis.sglang_chat import SglangChat, SglangRustChat
from router.prompt.apis.sglang_messages import SglangMessages
from router.types import Endpoint, Pod, PodLoad

_INFO_PATH = "/server_info"


class _KvEvents(msgspec.Struct):
    publisher: str | None = None
    endpoint_host: ReportedText = "*"
    endpoint_port_base: int | None = None
    replay_endpoint_port_base: int | None = None
    load_endpoint_port_base: int | None = None
    block_size: int | None = None


class _ServerInfo(msgspec.Struct):
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    """The capacity of one rank."""
    dp_size: int = 1
    kv_events: _KvEvents | None = None
    frontend: ReportedText = ""
    disaggregation_mode: str | None = None
    disaggregation_decode_enable_offload_kvcache: bool = False
    hicache_storage_backend: str | None = None

    @property
    def keeps_answers(self) -> bool | None:
        """A decode pod writes prompts and answers to the storage that prefill pods read; other pods know no answers."""
        if self.disaggregation_mode != "decode":
            return None
        return self.disaggregation_decode_enable_offload_kvcache and bool(self.hicache_storage_backend)


class _LoadStat(msgspec.Struct, array_like=True, tag="LoadStat"):
    """The start of what `--load-publish-endpoint` publishes."""

    running: int
    waiting: int
    tokens: int
    capacity_tokens: int
    """0 if it is unknown."""


_LOAD_STAT = msgspec.msgpack.Decoder(_LoadStat)


class Sglang(EngineAdapter):
    """SGLang's OpenAI server. Its /health generates a token, so /v1/models is the health path."""

    owners = ("sglang",)
    image_names = ("sglang",)
    salted = EngineAdapter.salted - {Endpoint.DECISIONS, Endpoint.SYSTEMONE}
    kv_events_flag = '--kv-events-config {"publisher":"zmq"}'
    health_path = MODELS_PATH
    gauges = LoadGauges(
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        kv_usage=("sglang:token_usage",),
        rank_label="dp_rank",
    )
    describe_paths = (MODELS_PATH, _INFO_PATH)
    tokenize_fields = frozenset({"messages", "tools"})
    lora_paths = ("/load_lora_adapter", "/unload_lora_adapter")
    conversions: Mapping[Endpoint, type[Conversion]] = {
        Endpoint.CHAT: SglangChat,
        Endpoint.MESSAGES: SglangMessages,
        Endpoint.COUNT_TOKENS: SglangMessages,
    }
    front_ends: Mapping[str, Mapping[Endpoint, type[Conversion]]] = {"rust": {Endpoint.CHAT: SglangRustChat}}
    may_lack: Mapping[str, Sequence[str]] = {
        "rust": (
            *(Endpoint.MESSAGES.value, Endpoint.COUNT_TOKENS.value, Endpoint.RESPONSES.value),
            *(Endpoint.DECISIONS.value, Endpoint.SYSTEMONE.value, Endpoint.EMBEDDINGS.value),
        )
    }

    def tokenize_body(self, model: str, prompt: Mapping[str, Any]) -> dict[str, Any] | None:
        if prompt.get("tool_choice") not in (None, "auto", "required"):
            return None  # tools that may not be called are left out
        return super().tokenize_body(model, prompt)

    def describe(self, responses: Responses, pod: Pod) -> PodFacts | None:
        facts = super().describe(responses, pod)
        info = decode(responses.get(_INFO_PATH, b""), _ServerInfo)
        if facts is None or info is None:
            return facts and replace(facts, no_events=self.without_events(_INFO_PATH, responses))
        ranks = info.dp_size if pod.dp_rank is None else 1
        own_block = known_size(info.kv_events.block_size if info.kv_events else None, MAX_BLOCK_TOKENS)
        return replace(
            facts,
            front_end="rust" if info.frontend == "rust" else "",
            dp_size=info.dp_size if 1 < info.dp_size <= MAX_RANKS else 1,
            block_size_tokens=own_block or known_size(info.page_size, MAX_BLOCK_TOKENS),
            capacity_tokens=known_size((info.max_total_num_tokens or 0) * ranks),
            keeps_answers=info.keeps_answers,
            load_endpoint=_address(info, info.kv_events.load_endpoint_port_base if info.kv_events else None, pod),
            kv_events=(events := _kv_events(info, pod)),
            no_events="" if events else self.without_events(_INFO_PATH, responses),
        )

    def parse_published_load(self, payload: bytes, now_s: float) -> PodLoad:
        try:
            found = LOAD.msgpack(payload, _LOAD_STAT)
        except ValueError as error:
            raise OutOfRange(f"published load: {error}") from error
        checked("running requests", found.running, 0, MAX_REQUESTS)
        checked("waiting requests", found.waiting, 0, MAX_REQUESTS)
        usage = checked("tokens in use", found.tokens, 0, MAX_TOKENS) / max(found.capacity_tokens, 1)
        return PodLoad(found.running, found.waiting, min(usage, 1.0) if found.capacity_tokens else 0.0, now_s)


def _kv_events(info: _ServerInfo, pod: Pod) -> KvEventSource | None:
    """The source of the pod's rank; None where there is none."""
    events = info.kv_events
    if events is None or not (endpoint := _address(info, events.endpoint_port_base, pod)):
        return None
    return KvEventSource(endpoint, _address(info, events.replay_endpoint_port_base, pod) or None)


def _address(info: _ServerInfo, port_base: int | None, pod: Pod) -> str:
    """Where the pod's rank publishes: rank r on base port + r. Empty where there is none, or the rank is ambiguous."""
    events = info.kv_events
    if events is None or events.publisher != "zmq" or port_base is None or (pod.dp_rank is None and info.dp_size > 1):
        return ""
    return on_pod(f"tcp://{join_address(events.endpoint_host, port_base + (pod.dp_rank or 0))}", pod) or ""
