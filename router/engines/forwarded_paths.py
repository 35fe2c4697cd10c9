"""Which paths may reach a pod?

Only the inference paths of this file, and those that the operator adds. A path is compared exactly, as the client sent
it: nothing is decoded, normalized or matched by prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from router.types import Endpoint

INFERENCE_PATHS = frozenset(
    {
        *(endpoint.value for endpoint in Endpoint if endpoint is not Endpoint.OTHER),
        # OpenAI
        "/v1/chat/completions/batch",
        "/v1/moderations",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/images/generations",
        "/v1/images/edits",
        "/v1/images/variations",
        # vLLM's and SGLang's: tokens in, tokens out; a request as tokens, and tokens as an answer
        *(
            "/inference/v1/generate",
            "/v1/chat/completions/derender",
            "/v1/completions/derender",
            "/cohere/v2/chat/render",
        ),
        *(f"/v1/{api}/render" for api in ("chat/completions", "completions", "messages", "responses")),
        # Cohere, Jina and the engines' own names for scoring and pooling
        *("/cohere/v2/chat", "/v2/embed"),
        *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/reranking"),
        *("/score", "/v1/score", "/classify", "/v1/classify", "/pooling", "/v1/pooling"),
    }
)
"""POST only. Source: docs/engines.md#paths-that-are-forwarded."""

_POST = frozenset({"POST"})
_ANY = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
_STORED_RESPONSE = re.compile(r"/v1/responses/[A-Za-z0-9_-]{1,128}(/cancel|/input_items)?")
_STORED_RESPONSE_METHODS = {
    None: frozenset({"GET", "DELETE"}),
    "/input_items": frozenset({"GET"}),
    "/cancel": _POST,
}

CONTROL_WORDS = frozenset(
    {
        *("load", "unload", "lora"),  # adapters and models: /v1/load_lora_adapter, /lora-adapters, /models/unload
        *("reset", "flush", "clear", "hicache"),  # caches: /reset_prefix_cache, /flush_cache
        *("sleep", "wake", "pause", "resume", "continue", "release", "slow", "freeze"),  # /wake_up, /release_memory
        *("start", "stop", "profile", "dump", "configure", "set"),  # /start_profile, /set_internal_state
        *("update", "weight", "weights", "init", "finish", "destroy", "send"),  # /update_weights_from_disk
        *("abort", "shutdown", "scale", "role", "rpc", "apply", "fault"),  # /collective_rpc, /pd_role_switch
        *("session", "slots", "props", "events"),  # /open_session, /slots/0, /kv_cache_events (reading empties it)
    }
)
"""A path with one of these words changes its engine for all clients. Source: the routes of the same engines."""

LORA_PATHS = frozenset(
    {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"}
)
"""Paths of the admin listener, which sends them to all pods of a model."""
_CANONICAL = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)+")
_OWN = re.compile(r"/(?:health|livez|readyz|metrics|v1/models|admin|ui)(?:/.*)?")
"""Paths that the router answers itself."""


def changes_engine(path: str) -> bool:
    return not CONTROL_WORDS.isdisjoint(re.split(r"[/_.~-]", path.lower()))


def added_path(path: str) -> str:
    """The path, if the operator can add it. Raises `ValueError`."""
    if not _CANONICAL.fullmatch(path):
        raise ValueError("must be a path such as /tokenize, of letters, digits and ._~-, without a slash at the end")
    if path in LORA_PATHS:
        raise ValueError("is on the admin listener, which loads adapters on all pods of a model")
    if path == "/v1/realtime":
        where = "connect to a pod, or to a TCP load balancer in front of the pods"
        raise ValueError(f"is of realtime sessions (websockets), which are not routed: {where}")
    if _OWN.fullmatch(path):
        raise ValueError("is reserved for the router itself")
    return path


_LISTED = frozenset({*INFERENCE_PATHS, "/v1/models"})


def meant_hint(path: str) -> str:
    """The path of the API that this one ends with, if /v1 or a slash is missing or too much, and the base URLs with
    which clients find it; else ""."""
    parts = [part for part in path.rsplit("/", 8) if part][-3:]  # below /v1, no path has more
    ends = ["/".join(parts[first:]) for first in range(len(parts))]
    meant = next((start + end for end in ends for start in ("/v1/", "/") if start + end in _LISTED), "")
    base_urls = "Base URLs of clients: http://ROUTER/v1 for OpenAI's, http://ROUTER for Anthropic's."
    return f" Did you mean {meant}? {base_urls}" if meant else ""


def api_end(prefix: str) -> str:
    """The end of the path of a pod's URL that is a part of the API's paths, which the router appends; "" if none is."""
    versioned = (path for path in ("/v1", *_LISTED) if path.startswith("/v"))
    return next((end for end in versioned if prefix.rstrip("/").endswith(end)), "")


class ForwardedPaths:
    """The methods of each path that is forwarded. `added`: the operator's paths, with all methods."""

    def __init__(self, added: Iterable[str] = ()) -> None:
        self._exact = dict.fromkeys(INFERENCE_PATHS, _POST) | dict.fromkeys(added, _ANY)

    def methods(self, path: str) -> frozenset[str]:
        """The methods that pods support; empty if the path is not forwarded."""
        found = self._exact.get(path)
        if found is None and (stored := _STORED_RESPONSE.fullmatch(path)):
            found = _STORED_RESPONSE_METHODS[stored[1]]
        return found or frozenset()
