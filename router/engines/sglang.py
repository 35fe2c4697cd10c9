"""How does SGLang speak?

Release 0.5, as reference/protocols.md 1.6 and 4.6 describe it. It exports metrics with `--enable-metrics` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from router.engines.adapter import Answers, Call, EngineAdapter, KvEventSource, PodFacts, on_pod
from router.engines.openai import MODELS_PATH, decode, known_size, tokenize_body
from router.engines.prometheus import LoadGauges
from router.types import Pod

_INFO_PATH = "/server_info"
_TOKENIZE_FIELDS = frozenset({"messages", "tools"})


class _KvEvents(msgspec.Struct):
    publisher: str | None = None
    endpoint_host: str = "*"
    endpoint_port_base: int | None = None
    replay_endpoint_port_base: int | None = None
    block_size: int | None = None


class _ServerInfo(msgspec.Struct):
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    """Of one rank."""
    dp_size: int = 1
    kv_events: _KvEvents | None = None


class Sglang(EngineAdapter):
    """SGLang's OpenAI server. Its /health generates a token, so a pod is asked for its models instead."""

    health_path = MODELS_PATH
    gauges = LoadGauges(
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        kv_usage=("sglang:token_usage",),
        rank_label="dp_rank",
    )
    describe_paths = (MODELS_PATH, _INFO_PATH)

    def describe(self, answers: Answers, pod: Pod) -> PodFacts | None:
        facts = super().describe(answers, pod)
        info = decode(answers.get(_INFO_PATH, b""), _ServerInfo)
        if facts is None or info is None:
            return facts
        ranks = info.dp_size if pod.dp_rank is None else 1
        own_block = known_size(info.kv_events.block_size if info.kv_events else None)
        return replace(
            facts,
            block_size_tokens=own_block or known_size(info.page_size),
            capacity_tokens=known_size((info.max_total_num_tokens or 0) * ranks),
            kv_events=_kv_events(info, pod),
        )

    def tokenize_request(self, model: str, prompt: Mapping[str, Any]) -> Call | None:
        body = tokenize_body(model, prompt, _TOKENIZE_FIELDS)
        return ("/tokenize", body) if body else None


def _kv_events(info: _ServerInfo, pod: Pod) -> KvEventSource | None:
    """Rank r publishes on base port + r. Several ranks that are not told apart give none."""
    told = info.kv_events
    if told is None or told.publisher != "zmq" or told.endpoint_port_base is None:
        return None
    if pod.dp_rank is None and info.dp_size > 1:
        return None
    rank, replay = pod.dp_rank or 0, told.replay_endpoint_port_base
    return KvEventSource(
        on_pod(f"tcp://{told.endpoint_host}:{told.endpoint_port_base + rank}", pod),
        on_pod(f"tcp://{told.endpoint_host}:{replay + rank}", pod) if replay is not None else None,
    )
