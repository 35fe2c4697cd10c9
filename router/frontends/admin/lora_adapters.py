"""Loads and unloads LoRA adapters on all pods of a model.

A pod that lacks an adapter gets none of its requests, so an adapter on some pods serves with these alone. The result
names each pod; a repeated request goes only to the pods that the last one missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import structlog

from router.engines.engine_catalog import ENGINES
from router.errors import MalformedRequest, UnknownModel, UpstreamError, shortened
from router.fleet.fleet import Fleet
from router.frontends.http.relay import read_all
from router.frontends.http.upstream import UpstreamPool
from router.guards import Bound
from router.types import MAX_NAME_CHARACTERS, Pod, PodId, PodState, PodStatus

TIMEOUT_S = 120.0
"""How long one pod may take: it may download the adapter."""
ANSWER = Bound("answer", 64 * 1024)
MAX_ANSWER_CHARACTERS = 300
_DONE = {True: "loaded", False: "unloaded"}

log = structlog.get_logger()


class PodAnswer(msgspec.Struct, frozen=True):
    """What became of the request on one pod. `answer`: of the engine, or why it was not asked."""

    done: bool
    answer: str


class LoraAdapters:
    def __init__(self, fleet: Fleet, pool_of: Callable[[Pod], UpstreamPool]) -> None:
        self._fleet = fleet
        self._pool_of = pool_of
        self._turn = asyncio.Lock()

    async def change(self, body: Mapping[str, Any], *, load: bool) -> Mapping[PodId, PodAnswer]:
        """Load or unload the adapter `lora_name` on every pod of `model`, which may be omitted where pods serve one
        model. All other fields are the engine's. Raises `ClientError` before anything is sent."""
        name = _name_of(body)
        async with self._turn:
            statuses = list(self._pods(body.get("model"), name))
            sent = {key: value for key, value in body.items() if key != "model"}
            processes = {(status.pod.url, status.pod.socket): status for status in statuses}  # ranks share one
            asked = (self._on_one(status, name, sent, load=load) for status in processes.values())
            answers = dict(zip(processes, await asyncio.gather(*asked), strict=True))
            found = {status.pod.id: answers[status.pod.url, status.pod.socket] for status in statuses}
            for pod, answer in found.items():
                if answer.done:
                    self._learn(pod, name, load=load)
        failed = [pod for pod, answer in found.items() if not answer.done]
        log.info("adapter changed", adapter=name, change=_DONE[load], pods=len(found), failed=failed)
        return found

    def _pods(self, model: object, name: str) -> Iterable[PodStatus]:
        """The pods of the model. Raises `ClientError` if one of them can never do it."""
        pods = self._fleet.snapshot.pods
        models = {each for status in pods for each in status.pod.models}
        if name in models:
            raise MalformedRequest(f"`{name}` is the name of a model, not of an adapter.", param="lora_name")
        if model is None and len(models) != 1:
            raise MalformedRequest(f"Set `model`: pods serve {len(models)} models.", param="model")
        wanted = model if model is not None else models.pop()
        serving = [status for status in pods if wanted in status.pod.models]
        if not serving:
            raise UnknownModel(f"No pod serves the model `{wanted}`.", param="model")
        for status in serving:
            if ENGINES[status.pod.engine].lora_paths is None:
                why = f"the engine of pod {status.pod.id} ({status.pod.engine}) loads no adapters at run time"
                raise MalformedRequest(f"Nothing was changed: {why}.", param="model")
        return serving

    async def _on_one(self, status: PodStatus, name: str, body: Mapping[str, Any], *, load: bool) -> PodAnswer:
        pod = status.pod
        if status.state not in (PodState.READY, PodState.DRAINING):
            return PodAnswer(False, f"not sent: the pod is {status.state.value}")
        if (name in pod.adapters) is load and not body.get("load_inplace"):
            return PodAnswer(True, f"already {_DONE[load]}")
        paths = ENGINES[pod.engine].lora_paths
        assert paths is not None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                code, answer = await self._post(pod, paths[0 if load else 1], msgspec.json.encode(body))
        except TimeoutError:
            return PodAnswer(False, f"no response within {TIMEOUT_S:g} s")
        except UpstreamError as error:
            return PodAnswer(False, str(error))
        if code != 200:
            return PodAnswer(False, f"status {code}: {answer}")
        return PodAnswer(True, _DONE[load])

    async def _post(self, pod: Pod, path: str, body: bytes) -> tuple[int, str]:
        reply = await self._pool_of(pod).send("POST", path, {"content-type": "application/json"}, body)
        text = (await read_all(reply, ANSWER)).decode(errors="replace")
        return reply.status, shortened(text, MAX_ANSWER_CHARACTERS)

    def _learn(self, pod_id: PodId, name: str, *, load: bool) -> None:
        if (status := self._fleet.status(pod_id)) is not None:
            others = tuple(adapter for adapter in status.pod.adapters if adapter != name)
            self._fleet.learn(pod_id, adapters=(*others, name) if load else others)


def _name_of(body: Mapping[str, Any]) -> str:
    """Raises `MalformedRequest`."""
    name = body.get("lora_name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        why = f"`lora_name` must be a string of 1 to {MAX_NAME_CHARACTERS} characters."
        raise MalformedRequest(why, param="lora_name")
    return name
