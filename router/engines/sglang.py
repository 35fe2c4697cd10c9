"""How does SGLang speak? (reference/protocols.md sections 1.6 and 4.6; 0.5.23)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from router.engines.adapter import EngineAdapter, KvEventSource, on_host
from router.types import Pod


class _Events(msgspec.Struct):
    publisher: str | None = None
    endpoint_host: str = "*"
    endpoint_port_base: int = 0
    replay_endpoint_port_base: int | None = None


class _ServerInfo(msgspec.Struct):
    kv_events: _Events | None = None


class Sglang(EngineAdapter):
    """SGLang's server."""

    name: ClassVar[str] = "sglang"
    health_path = "/v1/models"  # its /health generates a token
    kv_event_sources_path: ClassVar[str | None] = "/server_info"
    running_names = ("sglang:num_running_reqs",)
    waiting_names = ("sglang:num_queue_reqs",)
    kv_usage_names = ("sglang:token_usage",)

    def parse_kv_event_sources(self, content: bytes, host: str, dp_rank: int) -> KvEventSource | None:
        try:
            events = msgspec.json.decode(content, type=_ServerInfo).kv_events
        except (msgspec.DecodeError, msgspec.ValidationError):
            return None
        if events is None or events.publisher != "zmq" or not events.endpoint_port_base:
            return None
        at = f"tcp://{events.endpoint_host}:"
        replay_base = events.replay_endpoint_port_base
        replay = on_host(f"{at}{replay_base + dp_rank}", host) if replay_base else None
        return KvEventSource(on_host(f"{at}{events.endpoint_port_base + dp_rank}", host), replay)

    def tokenize_request(self, model: str, prompt: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        given = {name: prompt[name] for name in ("messages", "tools", "prompt") if name in prompt}
        return ("/tokenize", {"model": model, **given}) if given else None

    def extra_headers(self, pod: Pod) -> Mapping[str, str]:
        return {} if pod.dp_rank is None else {"x-override-routed-dp-rank": str(pod.dp_rank)}
