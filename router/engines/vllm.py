"""How does vLLM speak? (reference/protocols.md sections 1.1 and 4; versions from 0.9 to 0.33)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from router.engines.adapter import EngineAdapter, KvEventSource, on_host
from router.types import Pod

_CHAT_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "add_special_tokens",
)


class _Source(msgspec.Struct):
    enable_kv_cache_events: bool = True
    publisher: str | None = None
    endpoint: str = ""
    replay_endpoint: str | None = None


class Vllm(EngineAdapter):
    """vLLM's OpenAI server."""

    name: ClassVar[str] = "vllm"
    kv_event_sources_path: ClassVar[str | None] = "/kv_event_sources"
    running_names = ("vllm:num_requests_running",)
    waiting_names = ("vllm:num_requests_waiting",)
    kv_usage_names = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    cache_config_name = "vllm:cache_config_info"

    def parse_kv_event_sources(self, content: bytes, host: str, dp_rank: int) -> KvEventSource | None:
        try:
            sources = msgspec.json.decode(content, type=dict[str, _Source])
        except (msgspec.DecodeError, msgspec.ValidationError):
            return None
        source = sources.get(str(dp_rank))
        if source is None or not source.enable_kv_cache_events or source.publisher != "zmq" or not source.endpoint:
            return None
        replay = on_host(source.replay_endpoint, host) if source.replay_endpoint else None
        return KvEventSource(on_host(source.endpoint, host), replay)

    def tokenize_request(self, model: str, prompt: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """None for what /tokenize does not take: documents, reasoning effort, token ids."""
        if "messages" in prompt:
            if prompt.get("documents") or prompt.get("reasoning_effort"):
                return None
            given = {name: prompt[name] for name in _CHAT_FIELDS if name in prompt}
            return "/tokenize", {"model": model, **given}
        if isinstance(prompt.get("prompt"), str):
            return "/tokenize", {"model": model, "prompt": prompt["prompt"]}
        return None

    def extra_headers(self, pod: Pod) -> Mapping[str, str]:
        return {} if pod.dp_rank is None else {"x-data-parallel-rank": str(pod.dp_rank)}
