"""A prefill and a decode engine, and requests to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtest.mock_engine.mock_config import HandoffConfig
from loadtest.mock_engine.mock_engine import MockEngine
from router.types import PodLoad

_Answer = TypeVar("_Answer")
CHAT = "/v1/chat/completions"
OFFER = {"do_remote_decode": True, "do_remote_prefill": False}


def prompt(topic: str = "a", **fields: Any) -> dict[str, Any]:
    """A chat of 63 tokens: three full blocks and a partial one."""
    words = " ".join(f"{topic}{i}" for i in range(60))
    return {"messages": [{"role": "user", "content": words}], "max_tokens": 8, **fields}


def said(answer: httpx.Response) -> str:
    """The text of a successful unstreamed chat."""
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


def cached(answer: httpx.Response) -> int:
    """Cached tokens in the usage."""
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """One sample of `/metrics`."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    return next(s.value for family in families for s in family.samples if s.name == f"vllm:{name}")


@dataclass(slots=True)
class Pair:
    """A prefill and a decode engine, and their clients."""

    prefill: MockEngine
    decode: MockEngine
    to_prefill: httpx.AsyncClient
    to_decode: httpx.AsyncClient

    async def nixl_params(self, topic: str = "a") -> dict[str, Any]:
        """The parameters of a NIXL prefill leg's response."""
        leg = prompt(topic, max_tokens=1, kv_transfer_params=OFFER)
        params: dict[str, Any] = (await self.to_prefill.post(CHAT, json=leg)).json()["kv_transfer_params"]
        return params

    async def decoded(self, params: Any, topic: str = "a", **fields: Any) -> httpx.Response:
        """Send a decode leg with these parameters."""
        return await self.to_decode.post(CHAT, json=prompt(topic, kv_transfer_params=params, **fields))

    async def joined_legs(self, name: int = 7) -> tuple[dict[str, Any], dict[str, Any]]:
        """Bodies of both legs of the configured dialect, for one handoff."""
        dialect, host, port = self.prefill.config.handoff.dialect, self.prefill.config.host, self.prefill.port
        if dialect == "bootstrap":
            room: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": name}
            return prompt(**room), prompt(**room)
        if dialect == "p2p":
            peer = {"kv_request_id": f"kr-{name}", "remote_host": host, "remote_port": port}
            offer: dict[str, Any] = {"remote_decoder": {"kv_request_id": f"kr-{name}"}}
            return prompt(max_tokens=1, kv_transfer_params=offer), prompt(kv_transfer_params={"remote_prefiller": peer})
        address = f"http://{host}:{port}"
        engine_id = (await self.to_prefill.get("/query")).json()["0"]["engine_id"]
        take = {"remote_bootstrap_addr": address, "remote_engine_id": engine_id, "do_remote_prefill": True}
        return (
            prompt(max_tokens=1, kv_transfer_params={**OFFER, "transfer_id": f"x-{name}"}),
            prompt(kv_transfer_params={**take, "transfer_id": f"x-{name}"}),
        )

    @property
    def idle(self) -> bool:
        """Whether both engines have no request, no used block and no held KV."""
        return all(engine.load == PodLoad() and not engine.pinned_requests for engine in (self.prefill, self.decode))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Poll a condition, within the pair's deadline."""
        while not holds():
            await asyncio.sleep(0)


OpenPair = Callable[..., AbstractAsyncContextManager[Pair]]


async def right_answer(pair: Pair, topic: str = "a") -> str:
    """The response to this prompt without a handoff; a salt keeps it out of the cache under test."""
    return said(await pair.to_prefill.post(CHAT, json=prompt(topic, cache_salt="s")))


def under_way(request: Coroutine[Any, Any, _Answer]) -> asyncio.Task[_Answer]:
    """Start a request in the background."""
    return asyncio.get_running_loop().create_task(request)


async def undivided(pair: Pair) -> str:
    """The response of an engine without a dialect, because SGLang's pods serve only legs."""
    config = replace(pair.decode.config, handoff=HandoffConfig())
    async with MockEngine(config) as engine, httpx.AsyncClient() as client:
        return said(await client.post(engine.url + CHAT, json=prompt()))
