"""Which bodies are searched for a client's `uuid` of a picture, and what pods receive."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace

from router.admission.tenant import OPEN_TENANT, Tenant
from router.errors import MalformedRequest
from router.frontends.body_edits import UuidRemoval
from router.hashing import hash_array, token_array
from router.prompt.pictures.uuids import SEARCHED_BYTES
from router.request.context import RequestContext
from router.types import Endpoint, Generation, PromptPicture, PromptPrefix
from tests.kit.scripted_pods import Town, town
from tests.proxy.test_kv_transfer import ANSWERING

pytestmark = [pytest.mark.net, pytest.mark.anyio]

PICTURE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:,"}}
TEXT = PromptPrefix(Generation(model="m"), token_array(range(50)), hash_array((1, 2, 3)))
SHOWN = replace(TEXT, pictures=(PromptPicture(1, 40, 9),))
ESTIMATED = replace(TEXT, media_tokens=1024)


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def named(pods: Town, filler: str = "") -> RequestContext:
    return pods.context(messages=chat({"type": "text", "text": filler}, {**PICTURE, "uuid": "theirs"}))


@pytest.mark.parametrize("prompt", [None, SHOWN, ESTIMATED])
async def test_pods_receive_no_uuid(prompt: PromptPrefix | None) -> None:
    """Whether the prompt was read to its end, in part, or not at all."""
    async with town(a=ANSWERING) as pods:
        pods.read_prompt = prompt
        await pods.forward(named(pods))
        (asked,) = pods.made["a"].asked
        assert asked.body["messages"] == chat({"type": "text", "text": ""}, PICTURE)


async def test_pods_of_trusted_clients_receive_it() -> None:
    async with town(a=ANSWERING, trusts_uuids=True) as pods:
        context = named(pods)
        sent = context.request.body
        await pods.forward(context)
        assert pods.made["a"].asked[0].raw == sent


async def test_a_uuid_without_its_picture_reaches_no_pod() -> None:
    async with town(a=ANSWERING) as pods:
        with pytest.raises(MalformedRequest):
            await pods.forward(pods.context(messages=chat({**PICTURE, "image_url": None, "uuid": "theirs"})))
        assert not pods.made["a"].asked


async def test_other_bodies_are_forwarded_as_they_are() -> None:
    """Also those that were read as text, which are not searched."""
    async with town(a=ANSWERING) as pods:
        pods.read_prompt, context = TEXT, named(pods)
        sent = context.request.body
        await pods.forward(context)
        assert pods.made["a"].asked[-1].raw == sent
        for body in (b"{}", json.dumps({"messages": chat(PICTURE)}).encode(), b"uuid", b'["uuid"]'):
            assert await UuidRemoval().removed(body, OPEN_TENANT) is body


@pytest.mark.parametrize(
    "endpoint", [Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.TOKENIZE, Endpoint.EMBEDDINGS, Endpoint.OTHER]
)
async def test_all_apis_with_pictures_are_searched(endpoint: Endpoint) -> None:
    """The length of texts to embed says nothing of pictures."""
    async with town() as pods:
        context = named(pods)
        context.request = replace(context.request, endpoint=endpoint)
        context.prompt = None if endpoint in (Endpoint.CHAT, Endpoint.RESPONSES) else TEXT
        assert b"uuid" not in await UuidRemoval().removed(context.request.body, OPEN_TENANT)


@pytest.mark.parametrize("shift", range(-30, 9, 3))
async def test_a_uuid_at_the_border_of_two_searches_is_found(shift: int) -> None:
    async with town() as pods:
        context = named(pods)
        filler = "x" * (SEARCHED_BYTES - context.request.body.index(b'"uuid"') + shift)
        assert b"uuid" not in await UuidRemoval().removed(named(pods, filler).request.body, OPEN_TENANT)


@pytest.mark.parametrize("parts", [[{**PICTURE, "uuid": "theirs"}] * 1000, [""] * 300_000])
async def test_other_requests_are_served_while_a_body_is_searched_and_edited(parts: list[Any]) -> None:
    """1000 small parts take 6 ms to edit, and 900 kB of quotes 8 ms to search."""
    async with town() as pods:
        context = pods.context(messages=chat(*parts))
        served = asyncio.Event()
        asyncio.get_running_loop().call_soon(served.set)
        assert b"uuid" not in await UuidRemoval().removed(context.request.body, OPEN_TENANT)
        assert served.is_set()


async def test_a_large_body_waits_for_few_of_another_tenant() -> None:
    """Not for all that another has sent before."""
    removal, order = UuidRemoval(), list[str]()

    async def removed(tenant: str, body: bytes) -> None:
        await removal.removed(body, Tenant(name=tenant))
        order.append(tenant)

    part = json.dumps({**PICTURE, "uuid": "theirs"})
    body = f'{{"messages":[{{"content":[{",".join([part] * 500)}]}}]}}'.encode()
    await asyncio.gather(*(removed("evil", body) for _ in range(9)), removed("good", body))
    assert order.index("good") <= 2
