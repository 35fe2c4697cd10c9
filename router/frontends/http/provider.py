"""Requests to providers: with their keys, and nothing of the client but what they know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

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

_OF_REQUEST = ((b"content-type", b"application/json"), (b"accept-encoding", b"identity"), (b"user-agent", b"warmroute"))
_SHOWN = frozenset({b"content-type", b"content-length", b"content-encoding", b"retry-after"})
"""Headers of a provider that the client gets: others may name its account."""
_OF_CLIENT = frozenset({400, 413, 422})
"""Errors that the request has caused. For all others the provider, or the router's account there, is the cause."""


@dataclass(frozen=True, slots=True)
class ProviderSender:
    provider: Provider
    pool: UpstreamPool

    async def send(self, tracker: Tracker, client: Downstream) -> None:
        """Send a request, and relay its response. Redirects are not followed. Raises `UpstreamError`."""
        context, pool = tracker.context, self.pool
        target = pool.path_prefix + context.request.endpoint.value.encode()
        message = request_message("POST", target, pool.host_header, self._headers(context.head.named), tracker.body)
        if context.repeatable:
            reply = await pool.exchange(message)
        else:
            reply = await pool.exchange_once(lambda: message)
        try:
            if not 200 <= reply.status < 300 and reply.status not in _OF_CLIENT:
                why = f"provider {self.provider.name}: status {reply.status}"
                raise UpstreamBroken(why, pod=pool.pod, status=reply.status)
            tracker.head(reply.pod, reply.status, reply.headers, monotonic())
            left_out = {b"content-length"} if tracker.changes_length else set()
            shown = [header for header in reply.headers if header[0] in _SHOWN - left_out]
            await relay(reply, client, tracker, [*shown, *tracker.headers()])
        finally:
            reply.close()

    def _headers(self, given: Mapping[bytes, bytes]) -> HeaderList:
        """With its key, and those of the client that its API knows. Raises `UpstreamBroken` while there is no key."""
        provider = self.provider
        if not (key := file_key(provider.key_file)):
            raise UpstreamBroken(f"provider {provider.name}: its key_file is not readable", pod=provider.pod.id)
        return [*_OF_REQUEST, *PROVIDER_APIS[provider.api].headers_with(key, given)]
