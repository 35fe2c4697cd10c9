"""The key `edge` of `config/router.yaml`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from router.config.load import Strict
from router.engines.forwarded_headers import forwarded_header, is_header_name
from router.engines.forwarded_paths import added_path, changes_engine


def _extra_path(path: str) -> str:
    if changes_engine(path):
        raise ValueError("changes the engine for all clients; if every client may do that, name it in `control_paths`")
    return added_path(path)


def _header_name(name: str) -> str:
    if not is_header_name(name.lower()):
        raise ValueError("must be the name of a header, such as x-session-id")
    return name.lower()


def _cors_origin(value: str) -> str:
    if value != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s,A-Z]+", value):
        raise ValueError('must be "*" or scheme://host[:port] in lower case, without a path')
    return value


_HeaderName = Annotated[str, AfterValidator(_header_name)]


class Edge(Strict):
    """Headers of responses, and what clients may send."""

    route_headers: bool = True
    """Add x-warmroute-pod, x-warmroute-policy and x-warmroute-cached-tokens to responses, and x-warmroute-match where
    the prompt was routed by load only: `none; reason=...`. Off: messages of errors name no pods either."""
    trust_engine_fields: bool = False
    """Pass fields and headers of clients that steer engines on to pods, such as KV transfers, ranks, priorities and
    adapters by path (the tables of router/engines/steering.py), and the `uuid` of pictures. Off: strip them."""
    forward_headers: tuple[Annotated[str, AfterValidator(forwarded_header)], ...] = ()
    """Headers of clients to pass on although they are credentials or claims of proxies, such as authorization. With
    authorization or cookie, www-authenticate or set-cookie of pods pass as well."""
    extra_paths: tuple[Annotated[str, AfterValidator(_extra_path)], ...] = ()
    """Paths to forward by model besides those of the inference APIs, such as /tokenizer_info. Each is compared exactly.
    Engines do not authenticate paths outside /v1."""
    control_paths: tuple[Annotated[str, AfterValidator(added_path)], ...] = ()
    """Paths with which every client may change the engines, such as /reset_prefix_cache. They
    are never forwarded unless they are named here; a request changes one pod only."""
    cors_origins: tuple[Annotated[str, AfterValidator(_cors_origin)], ...] = ()
    """Origins of web pages that may call the router from a browser, such as https://chat.example.com, or "*"."""
    session_headers: tuple[_HeaderName, ...] = ("x-session-id", "session-id", "x-claude-code-session-id")
    """Headers with the id of a client's session; the first that is present counts, before `session_id` of the body. The
    defaults are those of OpenCode, Codex and Claude Code."""
    tenant_header: _HeaderName = "x-tenant-id"
    """Header with the name of the tenant, where no `tenants` are configured: any client may send any. With them,
    the key decides."""
