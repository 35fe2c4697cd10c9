"""Finds the pod that a request for a stored response must be sent to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeAlias

from router.errors import UnknownResponse
from router.fleet.fleet import Fleet
from router.index.stored_responses import StoredResponse, StoredResponses, is_response_id
from router.types import Pod, PodState

SHARING_S = 0.1
"""Longest time until other routers have a new id."""

FindShared: TypeAlias = Callable[[str], Awaitable[StoredResponse | None]]

_ADVICE = "Send the whole conversation as `input` instead."


class ResponseLocator:
    """Finds stored responses: those known here, else those of other routers. `find_shared` asks these; None for an
    unknown id or without an answer."""

    def __init__(self, fleet: Fleet, stored: StoredResponses, find_shared: FindShared | None = None) -> None:
        self._fleet = fleet
        self._find_shared = find_shared
        self.stored = stored
        fleet.listen(self._on_change)

    async def locate(self, response_id: str, param: str, owner: str | None = "") -> StoredResponse:
        """The response with its pod, which is in the fleet. To `owner`, the responses of other tenants are unknown;
        None: an operator, who may see all. An unknown id belongs to the only pod if there is one, and no tenants are.
        Raises `UnknownResponse`, which says why it is lost; `param`: the field or part of the path with the id."""
        stored = await self._find(response_id)
        if stored is not None and owner is not None and stored.owner != owner:
            stored = None
        pods = self._fleet.snapshot.pods
        if stored is None and not owner and len(pods) == 1 and pods[0].pod.models:
            return StoredResponse(response_id, pods[0].pod.id, pods[0].pod.models[0], monotonic())
        if stored is None:
            why = "it was never stored, was not used for long, or the router has restarted since"
            raise UnknownResponse(f"The response `{response_id:.128}` is not known here: {why}. {_ADVICE}", param=param)
        if self.stored.is_lost(response_id) or self._fleet.status(stored.pod) is None:
            why = "the pod that stored it has restarted or left, and pods keep responses in memory"
            raise UnknownResponse(f"The response `{response_id}` is lost: {why}. {_ADVICE}", param=param)
        return stored

    async def _find(self, response_id: str) -> StoredResponse | None:
        """The response; one that another router learnt just now arrives within `SHARING_S`."""
        stored = self.stored.find(response_id, monotonic())
        if stored is not None or self._find_shared is None or not is_response_id(response_id):
            return stored
        stored = await self._find_shared(response_id)
        if stored is None:
            await asyncio.sleep(SHARING_S)
            stored = await self._find_shared(response_id)
        if stored is not None:
            self.stored.learn(stored, monotonic(), remote=True)
        return stored

    def _on_change(self, pod: Pod, old: PodState, new: PodState) -> None:
        if new is old or new is PodState.GONE:
            self.stored.lose(pod.id, monotonic())
