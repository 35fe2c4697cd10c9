"""Tenants in front of a real vLLM pod: whose prefixes are found, and what each is billed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.engines import HOME, start_vllm
from tests.live.live_fleet import TEXT, LiveFleet, answer_of, live_fleet

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

MODEL = HOME / "model" / "tiny-llama"
BILLED = ("pays", "leaves")
TENANTS = dict.fromkeys(("acme", "other", *BILLED)) | dict.fromkeys(("north", "south"), "pair")
"""Each with the group in which it shares prefixes."""
USAGE = "usage.jsonl"
COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "output_tokens": "vllm:generation_tokens_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
}
"""By field of a usage line, the pod's own counter."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the router's files."""
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[LiveFleet]:
    """One pod, and a router with tenants that writes usage lines."""
    entries = [
        {"name": name, "share": share, "keys": [sha256(key(name).encode()).hexdigest()]}
        for name, share in TENANTS.items()
    ]
    (folder / "tenants.yaml").write_text(json.dumps({"tenants": entries}))
    config = {"tenants": str(folder / "tenants.yaml"), "usage": {"file": str(folder / USAGE)}}
    with live_fleet("tenants", folder, MODEL, partial(start_vllm, model_dir=MODEL), pods=1, config=config) as running:
        yield running


def key(tenant: str) -> str:
    """An API key."""
    return f"key-{tenant}"


async def ask(fleet: LiveFleet, tenant: str, topic: str, **asked: Any) -> tuple[int, int]:
    """(predicted, reported) cached tokens of a chat about a topic."""
    chat: Any = [{"role": "user", "content": f"Keep the book of {topic}. {TEXT * 20}"}]
    async with fleet.openai_sdk(key(tenant)) as client:
        raw = await client.chat.completions.with_raw_response.create(model="tiny", messages=chat, max_tokens=8, **asked)
    answer = answer_of(raw.headers, raw.parse().model_dump())
    return answer.predicted, answer.reported


async def test_a_prefix_is_found_by_its_tenant_and_its_group_alone(fleet: LiveFleet) -> None:
    """By the pod's own count; the client's own salt does not lead into another tenant's cache."""
    first, again = [await ask(fleet, "acme", "tides") for _ in range(2)]
    other = await ask(fleet, "other", "tides")
    salted = await ask(fleet, "other", "tides", extra_body={"cache_salt": "acme"})
    assert first == other == salted == (0, 0)
    assert again[0] == again[1] > 0
    assert await ask(fleet, "north", "tides") == (0, 0)
    assert await ask(fleet, "south", "tides") == again


async def test_the_bill_is_what_the_pod_counts(fleet: LiveFleet, folder: Path) -> None:
    """In sum over tenants, streamed and not, and of a stream whose client leaves."""
    before = await counters(fleet)
    for tenant in BILLED:
        await ask(fleet, tenant, "bills")
        await ask(fleet, tenant, "bills")
        await stream(fleet, tenant, leaves=False)
    await stream(fleet, "leaves", leaves=True)
    billed = await lines_after(folder, 3 * len(BILLED) + 1)
    after = await counters(fleet)
    assert len({line["id"] for line in billed}) == len(billed)
    used = {field: after[field] - before[field] for field in COUNTERS}
    total = {field: sum(line[field] for line in billed) for field in COUNTERS}
    print(f"billed {total}, counted by the pod {used}, of the client that left {billed[-1]}")
    assert {**total, "output_tokens": 0} == {**used, "output_tokens": 0}
    assert billed[-1]["result"] != "ok"
    assert 0 <= used["output_tokens"] - total["output_tokens"] <= 20


async def stream(fleet: LiveFleet, tenant: str, *, leaves: bool) -> None:
    """A streamed completion, to its end or until its third event."""
    asked = {"model": "tiny", "prompt": f"Stream {tenant}. {TEXT * 5}", "max_tokens": 4000 if leaves else 8}
    headers = {"authorization": f"Bearer {key(tenant)}"}
    async with httpx.AsyncClient(timeout=60) as client:
        body = {**asked, "stream": True, "ignore_eos": True}
        async with client.stream("POST", f"{fleet.url}/v1/completions", json=body, headers=headers) as answer:
            events = 0
            async for line in answer.aiter_lines():
                events += line.startswith("data:")
                if leaves and events == 3:
                    return


async def counters(fleet: LiveFleet) -> dict[str, int]:
    """The pod's counters, by field of a usage line."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{fleet.pods[0].url}/metrics")).text
    found = {field: re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE) for field, name in COUNTERS.items()}
    return {field: int(sum(map(float, values))) for field, values in found.items()}


async def lines_after(folder: Path, count: int) -> list[dict[str, Any]]:
    """The usage lines of the billed tenants, once there are `count`."""
    file = folder / USAGE
    async with asyncio.timeout(30):
        while True:
            written = map(json.loads, file.read_text().splitlines() if file.exists() else ())
            found = [line for line in written if line["tenant"] in BILLED]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.1)
