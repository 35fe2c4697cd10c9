"""Requests to providers: with their keys, and nothing of the client but what they know."""

from __future__ import annotations

from time import monotonic
from typing import TypeAlias

from router.config.pod_keys import file_key
from router.config.provider_schema import Provider
from router.engines.providers import PROVIDER_APIS
from router.errors import UpstreamBroken
from router.frontends.http.headers import request_message
from router.frontends.http.relay import relay
from router.frontends.http.upstream import UpstreamPool
from router.request.effects import Downstream
from router.request.inbound import HeaderList
from router.request.tracker import Tracker

ProviderPools: TypeAlias = dict[str, UpstreamPool]
"""Connections by the name of the provider."""
_OF_REQUEST = ((b"content-type", b"application/json"), (b"accept-encoding", b"identity"), (b"user-agent", b"warmroute"))
_SHOWN = frozenset({b"content-type", b"content-length", b"content-encoding", b"retry-after"})
"""Headers of a provider that the client gets: others may name its account."""
_OF_CLIENT = frozenset({400, 413, 422})
"""Errors that the request has caused. For all others the provider, or the router's account there, is the cause."""


async def ask(pool: UpstreamPool, provider: Provider, tracker: Tracker, client: Downstream) -> None:
    """Send the request to a provider, and relay its response. Redirects are not followed. Raises `UpstreamError`."""
    context = tracker.context
    target = pool.path_prefix + context.request.endpoint.value.encode()
    message = request_message("POST", target, pool.host_header, sent_headers(provider, tracker), tracker.body)
    if context.repeatable:
        reply = await pool.exchange(message)
    else:
        reply = await pool.exchange_once(lambda: message)
    try:
        if not 200 <= reply.status < 300 and reply.status not in _OF_CLIENT:
            raise UpstreamBroken(f"provider {provider.name}: status {reply.status}", pod=pool.pod, status=reply.status)
        tracker.head(reply.pod, reply.status, reply.headers, monotonic())
        left_out = {b"content-length"} if tracker.changes_length else set()
        shown = [header for header in reply.headers if header[0] in _SHOWN - left_out]
        await relay(reply, client, tracker, [*shown, *tracker.headers()])
    finally:
        reply.close()


def sent_headers(provider: Provider, tracker: Tracker) -> HeaderList:
    """Raises `UpstreamBroken` while there is no key."""
    api, key = PROVIDER_APIS[provider.api], file_key(provider.key_file)
    if not key:
        raise UpstreamBroken(f"provider {provider.name}: its key_file is not readable", pod=provider.pod.id)
    given = {name: value for name, value in tracker.context.head.headers if name in api.headers}
    name, form = api.key_header
    return [*_OF_REQUEST, *{**api.defaults, **given}.items(), (name, form % key.encode())]
