"""Providers over real sockets: what they get, what hostile ones cause, and who serves when all pods are gone."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest

from router.config.provider_schema import Provider
from router.config.schema import Limits
from tests.redis_servers.server import tls_material
from tests.stories.conftest import Deploy

pytestmark = [pytest.mark.net, pytest.mark.anyio]
KEY = "canary7sesame"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
ANSWER = {"id": "x", "choices": [{"message": {"content": "hi"}}], "usage": USAGE}
Script: TypeAlias = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def answers(writer: asyncio.StreamWriter, status: str = "200 OK", more: str = "") -> None:
    body = json.dumps(ANSWER).encode()
    kind = "content-type: application/json\r\nset-cookie: a=b\r\nopenai-organization: ours"
    writer.write(f"HTTP/1.1 {status}\r\n{kind}\r\n{more}content-length: {len(body)}\r\n\r\n".encode() + body)


async def hangs(writer: asyncio.StreamWriter) -> None:
    """Until the router closes the connection."""


async def hangs_after_its_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")


async def redirects(writer: asyncio.StreamWriter) -> None:
    await answers(writer, "307 X", "location: http://127.0.0.1:1/v1\r\n")


async def refuses_the_key(writer: asyncio.StreamWriter) -> None:
    await answers(writer, "401 X")


async def cuts(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    writer.close()


@asynccontextmanager
async def standin(script: Script, files: Any = None) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A provider that answers by a script; yields its URL and the requests that it got."""
    got, context = list[bytes](), None
    if files is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(files.certificate, files.key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError):
            while True:  # until the router closes the connection
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
                got.append(head + await reader.readexactly(int(length.split()[1])))
                await script(writer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        scheme = "https" if context else "http"
        yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}", got


def provider(name: str, url: str, folder: Path, **fields: Any) -> Provider:
    (folder / "key").write_text(KEY)
    price = {"prompt": 2.0, "cached": 1.0, "output": 10.0}
    usual = {"model": f"{name}-there", "key_file": str(folder / "key"), "budget_per_hour": 1.0, "price": price}
    return Provider(name=name, url=url, **{**usual, **fields})


def names_of(folder: Path, fallbacks: Sequence[str], target: str = "gone") -> Path:
    file = folder / "names.yaml"
    file.write_text(json.dumps({"names": [{"name": "chat", "to": target, "fallbacks": fallbacks}]}))
    return file


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields}


async def test_a_provider_gets_its_key_and_nothing_of_the_client(deploy: Deploy, tmp_path: Path) -> None:
    """And the client nothing of its account."""
    async with standin(answers) as (url, got):
        one = provider("hosted", f"{url}/base", tmp_path)
        async with deploy(1, names=names_of(tmp_path, ["hosted"]), providers=[one]) as found:
            given = {"authorization": "Bearer client", "cookie": "a", "x-session-id": "s", "openai-beta": "b"}
            given |= {"x-forwarded-for": "192.0.2.1", "x-vllm-priority": "1"}
            body = chat(top_k=3, user="u")
            answer = await found.client.post("/v1/chat/completions?a=b", json=body, headers=given)
            assert answer.json() == ANSWER and answer.headers["x-warmroute-model"] == "hosted"
            assert not {"set-cookie", "openai-organization"} & answer.headers.keys()
    head, _, sent = got[0].partition(b"\r\n\r\n")
    lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
    assert head.startswith(b"POST /base/v1/chat/completions HTTP/1.1\r\n")
    assert lines.pop(b"host") and int(lines.pop(b"content-length")) == len(sent)
    assert lines == {
        b"content-type": b"application/json",
        b"accept-encoding": b"identity",
        b"user-agent": b"warmroute",
        b"openai-beta": b"b",
        b"authorization": f"Bearer {KEY}".encode(),
    }
    expected = {name: value for name, value in body.items() if name != "top_k"} | {"model": "hosted-there"}
    assert msgspec.json.decode(sent) == expected


async def test_anthropics_api_has_its_own_key_header_and_version(deploy: Deploy, tmp_path: Path) -> None:
    async with standin(answers) as (url, got):
        one = provider("hosted", url, tmp_path, api="anthropic")
        async with deploy(1, names=names_of(tmp_path, ["hosted"]), providers=[one]) as found:
            answer = await found.client.post("/v1/messages", json=chat(min_p=0.1))
            assert answer.status_code == 200
            assert (await found.client.post("/v1/chat/completions", json=chat())).status_code == 503
    assert f"x-api-key: {KEY}\r\n".encode() in got[0] and b"anthropic-version: 2023-06-01\r\n" in got[0]
    assert b"min_p" not in got[0] and len(got) == 1


@pytest.mark.parametrize("script", [hangs, hangs_after_its_head, redirects, refuses_the_key, cuts])
async def test_the_next_provider_serves_what_a_hostile_one_does_not(
    deploy: Deploy, tmp_path: Path, script: Script
) -> None:
    async with standin(script) as (url, got), standin(answers) as (good_url, good):
        providers = [provider("bad", url, tmp_path, timeout_s=0.5), provider("good", good_url, tmp_path)]
        async with deploy(1, names=names_of(tmp_path, ["bad", "good"]), providers=providers) as found:
            answer = await found.client.post("/v1/chat/completions", json=chat())
            assert (answer.status_code, answer.headers["x-warmroute-model"]) == (200, "good")
    assert (len(got), len(good)) == (1, 1)


async def test_a_certificate_that_nobody_vouches_for_gets_no_key(deploy: Deploy, tmp_path: Path) -> None:
    files = tls_material(tmp_path)
    async with standin(answers, files) as (url, got):
        wrong, right = provider("wrong", url, tmp_path), provider("right", url, tmp_path, ca_file=str(files.ca))
        async with deploy(1, names=names_of(tmp_path, ["wrong"]), providers=[wrong]) as found:
            assert (await found.client.post("/v1/chat/completions", json=chat())).status_code == 502
            assert not got
        async with deploy(1, names=names_of(tmp_path, ["right"]), providers=[right]) as found:
            assert (await found.client.post("/v1/chat/completions", json=chat())).status_code == 200


async def test_when_all_pods_are_killed_a_second_model_serves_then_the_provider(deploy: Deploy, tmp_path: Path) -> None:
    """Its bill is the provider's own count; a tenant whose data stays gets 503 with the reason."""
    tenants, usage = tmp_path / "tenants.yaml", tmp_path / "usage.jsonl"
    listed = [{"name": name, "keys": [sha256(name.encode()).hexdigest()]} for name in ("acme", "bank")]
    listed[1]["data"] = "stay"
    tenants.write_text(json.dumps({"tenants": listed}))
    names = names_of(tmp_path, ["second", "hosted"], "demo")
    engines = [{"models": ("demo",)}, {"models": ("second",)}]
    async with standin(answers) as (url, got):
        settings: dict[str, Any] = {"names": names, "tenants": tenants, "usage": usage, "wait": False}
        async with deploy(engines=engines, providers=[provider("hosted", url, tmp_path)], **settings) as found:
            await found.until(lambda: found.ready("demo") == found.ready("second") == 1)

            async def ask(tenant: str = "acme") -> Any:
                headers = {"authorization": f"Bearer {tenant}"}
                return await found.client.post("/v1/chat/completions", json=chat(), headers=headers)

            served = [(await ask()).headers["x-warmroute-model"]]
            for engine in found.engines:
                await engine.stop()
                served += [(await ask()).headers["x-warmroute-model"] for _ in range(3)]
            assert served == ["demo", *["second"] * 3, *["hosted"] * 3]
            stayed = await ask("bank")
            assert stayed.status_code == 503 and "data: stay" in stayed.json()["error"]["message"]
            await found.until(lambda: not found.ready("demo") and not found.ready("second"))
            previews = [
                await found.admin.post(f"/admin/preview?tenant={name}", json=chat()) for name in ("acme", "bank")
            ]
            assert ["`hosted` would serve it" in one.text for one in previews] == [True, False]
            metrics = (await found.admin.get("/metrics")).text
            assert KEY not in metrics + previews[0].text
    bills = [msgspec.json.decode(line) for line in usage.read_text().splitlines()]
    money = [line["money"] for line in bills if line["model"] == "hosted" and line["status"] == 200]
    assert money == [(5 * 2 + 4 * 1 + 2 * 10) / 1e6] * len(got) and len(got) == 3
    assert 'warmroute_provider_refusals_total{provider="hosted",reason="data_stays"} 1' in metrics


async def test_a_request_does_not_wait_for_pods_where_a_provider_serves(deploy: Deploy, tmp_path: Path) -> None:
    """With `hold_s`, whether its pods are unknown or not ready."""
    async with standin(answers) as (url, _):
        limits = Limits(hold_s=1000.0)
        for target in ("gone", "demo"):
            settings: dict[str, Any] = {"names": names_of(tmp_path, ["hosted"], target), "limits": limits}
            async with deploy(1, providers=[provider("hosted", url, tmp_path)], **settings) as found:
                await found.engines[0].stop()
                await found.until(lambda: not found.ready())
                answer = await found.client.post("/v1/chat/completions", json=chat())
                assert answer.headers["x-warmroute-model"] == "hosted"


async def test_a_preview_shows_the_money_of_providers_beside_milliseconds(deploy: Deploy, tmp_path: Path) -> None:
    one = provider("hosted", "https://example.com", tmp_path)
    async with deploy(1, names=names_of(tmp_path, ["hosted"], "demo"), providers=[one]) as found:
        (offer,) = (await found.admin.post("/admin/preview", json=chat())).json()["providers"]
        assert (offer["choice"]["pod"], offer["ttft_ms"]) == ("provider/hosted", 1000.0) and 0 < offer["money"] < 0.001
        await found.engines[0].stop()
        await found.until(lambda: not found.ready())
        answer = await found.admin.post("/admin/preview", json=chat())
        assert "Its fallback `hosted` would serve it." in answer.json()["error"]["message"]
        assert (await found.client.get("/readyz")).status_code == 200, "load balancers still send it requests"
