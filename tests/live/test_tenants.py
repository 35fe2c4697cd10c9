"""Tenants in front of a real vLLM pod: whose prefixes are found, and what each is billed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.live.engines import HOME, EngineProcess, start_vllm
from tests.live.router_process import router

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

MODEL = HOME / "model" / "tiny-llama"
BILLED = ("pays", "leaves")
TENANTS = dict.fromkeys(("acme", "other", *BILLED)) | dict.fromkeys(("north", "south"), "pair")
"""Each with the group in which it shares prefixes."""
TEXT = "The harbour master writes down every boat that comes in, its name and its cargo. "
COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "output_tokens": "vllm:generation_tokens_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
}
"""By field of a usage line, the pod's own counter."""


@dataclass(frozen=True, slots=True)
class Site:
    """A pod, a router with tenants in front, and its file of usage."""

    pod: EngineProcess
    url: str
    usage: Path

    def sdk(self, tenant: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=f"key-{tenant}", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Started once; takes about a minute on two cores."""
    folder = tmp_path_factory.mktemp("tenants")
    entries = [
        {"name": name, "share": share, "keys": [sha256(f"key-{name}".encode()).hexdigest()]}
        for name, share in TENANTS.items()
    ]
    (folder / "tenants.yaml").write_text(json.dumps({"tenants": entries}))
    with start_vllm("tenants", 18031, MODEL, kv_port=15591) as pod:
        config = {
            "models": [{"name": "tiny", "tokenizer": str(MODEL)}],
            "pods": [{"url": pod.url, "engine": "vllm"}],
            "tenants": str(folder / "tenants.yaml"),
            "usage": {"file": str(folder / "usage.jsonl")},
        }
        with router(folder, config) as urls:
            yield Site(pod, urls.public, folder / "usage.jsonl")


async def ask(site: Site, tenant: str, topic: str, **asked: Any) -> tuple[int, int]:
    """(predicted, reported) cached tokens of a chat about a topic."""
    chat: Any = [{"role": "user", "content": f"Keep the book of {topic}. {TEXT * 20}"}]
    async with site.sdk(tenant) as client:
        raw = await client.chat.completions.with_raw_response.create(model="tiny", messages=chat, max_tokens=8, **asked)
    usage = raw.parse().usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return int(raw.headers["x-warmroute-cached-tokens"]), usage.prompt_tokens_details.cached_tokens or 0


async def test_a_prefix_is_found_by_its_tenant_and_its_group_alone(site: Site) -> None:
    """By the pod's own count; the client's own salt does not lead into another tenant's cache."""
    first, again = [await ask(site, "acme", "tides") for _ in range(2)]
    other = await ask(site, "other", "tides")
    salted = await ask(site, "other", "tides", extra_body={"cache_salt": "acme"})
    assert first == other == salted == (0, 0)
    assert again[0] == again[1] > 0
    assert await ask(site, "north", "tides") == (0, 0)
    assert await ask(site, "south", "tides") == again


async def test_the_bill_is_what_the_pod_counts(site: Site) -> None:
    """In sum over tenants, streamed and not, and of a stream whose client leaves."""
    before = await counters(site)
    for tenant in BILLED:
        await ask(site, tenant, "bills")
        await ask(site, tenant, "bills")
        await stream(site, tenant, leaves=False)
    await stream(site, "leaves", leaves=True)
    billed = await lines_after(site, 3 * len(BILLED) + 1)
    after = await counters(site)
    assert len({line["id"] for line in billed}) == len(billed)
    used = {field: after[field] - before[field] for field in COUNTERS}
    total = {field: sum(line[field] for line in billed) for field in COUNTERS}
    print(f"billed {total}, counted by the pod {used}, of the client that left {billed[-1]}")
    assert {**total, "output_tokens": 0} == {**used, "output_tokens": 0}
    assert billed[-1]["result"] != "ok"
    assert 0 <= used["output_tokens"] - total["output_tokens"] <= 20


async def stream(site: Site, tenant: str, *, leaves: bool) -> None:
    """A streamed completion, to its end or until its third event."""
    asked = {"model": "tiny", "prompt": f"Stream {tenant}. {TEXT * 5}", "max_tokens": 4000 if leaves else 8}
    headers = {"authorization": f"Bearer key-{tenant}"}
    async with httpx.AsyncClient(timeout=60) as client:
        body = {**asked, "stream": True, "ignore_eos": True}
        async with client.stream("POST", f"{site.url}/v1/completions", json=body, headers=headers) as answer:
            events = 0
            async for line in answer.aiter_lines():
                events += line.startswith("data:")
                if leaves and events == 3:
                    return


async def counters(site: Site) -> dict[str, int]:
    """The pod's counters, by field of a usage line."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{site.pod.url}/metrics")).text
    found = {field: re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE) for field, name in COUNTERS.items()}
    return {field: int(sum(map(float, values))) for field, values in found.items()}


async def lines_after(site: Site, count: int) -> list[dict[str, Any]]:
    """The usage lines of the billed tenants, once there are `count`."""
    async with asyncio.timeout(30):
        while True:
            written = map(json.loads, site.usage.read_text().splitlines() if site.usage.exists() else ())
            found = [line for line in written if line["tenant"] in BILLED]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.1)
