"""llama.cpp's server, as in docs/engines.md.

It exports metrics only with `--metrics`, publishes no KV events, and reuses the prompt that a slot served last, token
by token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec.structs import replace

from router.engines.adapter import MODELS_PATH, EngineAdapter, PodFacts, Responses, decode, known_size
from router.engines.lacks import COMMON_LACKS, SEVERAL_ANSWERS, Lack
from router.engines.prometheus import LoadGauges
from router.types import Pod

_PROPS_PATH = "/props"


class _Defaults(msgspec.Struct):
    n_ctx: int = 0


class _Props(msgspec.Struct):
    default_generation_settings: _Defaults
    total_slots: int = 0


class LlamaCpp(EngineAdapter):
    """llama-server. Its /tokenize takes text alone, so chats cannot be tokenized in one call."""

    owners = ("llamacpp",)
    chart_names = ("llama.cpp",)
    image_names = ("llama.cpp", "llama-cpp")
    gauges = LoadGauges(
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        kv_usage=("llamacpp:kv_cache_usage_ratio",),
    )
    lack_answers = (
        *COMMON_LACKS,
        Lack(HTTPStatus.NOT_FOUND, re.compile(rb'.{,64}"File Not Found"')),
        Lack(HTTPStatus.BAD_REQUEST, re.compile(rb".{,64}Only one completion choice is allowed"), SEVERAL_ANSWERS),
    )
    describe_paths = (MODELS_PATH, _PROPS_PATH)

    def describe(self, responses: Responses, pod: Pod) -> PodFacts | None:
        """Each slot holds one context of n_ctx tokens."""
        facts = super().describe(responses, pod)
        props = decode(responses.get(_PROPS_PATH, b""), _Props)
        if facts is None or props is None:
            return facts
        slot_tokens = known_size(props.default_generation_settings.n_ctx)
        return replace(
            facts,
            max_model_len_tokens=slot_tokens or facts.max_model_len_tokens,
            capacity_tokens=known_size((slot_tokens or 0) * props.total_slots),
        )

    def tokenize_body(self, model: str, prompt: Mapping[str, Any]) -> dict[str, Any] | None:
        text = prompt.get("prompt")
        if not isinstance(text, str):
            return None
        special = prompt.get("add_special_tokens") is not False
        return {"content": text, "add_special": special, "parse_special": True}
