"""Pods that answer the questions of feeds, by host name and path, without sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from router.config.pod_keys import key_headers
from router.errors import ConnectFailed, UpstreamBroken, UpstreamTimeout, unexpected_status
from router.feeds.watch import Check, Watch
from router.fleet.fleet import Fleet
from router.types import Pod


@dataclass
class FakePod:
    """Answers by path, else with 404. `refuses`: connections fail. `hangs`: paths that never answer."""

    answers: dict[str, bytes | Callable[[httpx.Request], bytes]] = field(default_factory=dict)
    refuses: bool = False
    hangs: set[str] = field(default_factory=set)
    statuses: dict[str, int] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    busiest: int = 0
    """The most questions for one path that were under way at once."""
    _under_way: Counter[str] = field(default_factory=Counter)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked[path] += 1
        if self.refuses:
            raise httpx.ConnectError("nobody listens", request=request)
        self._under_way[path] += 1
        self.busiest = max(self.busiest, self._under_way[path])
        try:
            if path in self.hangs:
                await asyncio.Event().wait()
            return self._answer(request, path)
        finally:
            self._under_way[path] -= 1

    def _answer(self, request: httpx.Request, path: str) -> httpx.Response:
        answer = self.answers.get(path)
        if answer is None:
            return httpx.Response(self.statuses.get(path, 404))
        content = answer if isinstance(answer, bytes) else answer(request)
        return httpx.Response(self.statuses.get(path, 200), content=content)


class Network:
    """Fake pods by host name, reached as by `UpstreamPools`."""

    def __init__(self) -> None:
        self.pods: dict[str, FakePod] = {}

    def __getitem__(self, host: str) -> FakePod:
        return self.pods.setdefault(host, FakePod())

    async def fetch(self, pod: Pod, path: str, timeout_s: float) -> bytes:
        return await self._exchange(httpx.Request("GET", pod.url + path), pod.id, timeout_s)

    async def post(self, pod: Pod, path: str, body: Mapping[str, Any], timeout_s: float) -> bytes:
        return await self._exchange(httpx.Request("POST", pod.url + path, json=body), pod.id, timeout_s)

    async def get_url(self, url: str, timeout_s: float, *, pod: Pod | None = None) -> bytes:
        headers = key_headers(pod.bearer_file, pod.bearer_env) if pod else {}
        return await self._exchange(httpx.Request("GET", url, headers=headers), url, timeout_s)

    async def _exchange(self, request: httpx.Request, pod: str, timeout_s: float) -> bytes:
        path = request.url.path
        try:
            async with asyncio.timeout(timeout_s):
                response = await self[request.url.host].handle(request)
        except httpx.ConnectError as error:
            raise ConnectFailed(f"pod {pod}: cannot connect: {error}", pod=pod, refused=True) from error
        except httpx.HTTPError as error:
            raise UpstreamBroken(f"pod {pod}: {error}", pod=pod) from error
        except TimeoutError as error:
            raise UpstreamTimeout(f"pod {pod}: {path}: no response within {timeout_s:g} s", pod=pod) from error
        if response.status_code != httpx.codes.OK:
            raise unexpected_status(response.status_code, path, pod, response.content)
        return response.content


def watched(fleet: Fleet, *checks: Check) -> Coroutine[Any, Any, None]:
    """Runs these checks of each pod, one after another."""
    return Watch(fleet, [checks]).run()
