"""Texts to embed on real vLLM pods with a tiny causal model: they go where their beginning is cached, as predicted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from tests.live.engines import HOME, start_vllm
from tests.live.live_fleet import DEADLINE_S, TEXT, LiveFleet, live_fleet

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]
BOOKS = 6


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    """Two pods that only embed, by the last token. Takes about a minute on two cores."""
    weights = HOME / "model" / "tiny-qwen3"
    start = partial(start_vllm, model_dir=weights, extra_args=("--runner", "pooling"))
    with live_fleet("embeddings", tmp_path_factory.mktemp("embeddings"), weights, start) as running:
        yield running


async def cached_tokens(client: httpx.AsyncClient, fleet: LiveFleet) -> int:
    """Counts all requests so far by the engines' metrics: their responses do not report cached tokens."""
    pages = [(await client.get(f"{pod.url}/metrics")).text for pod in fleet.pods]
    return sum(int(float(number)) for page in pages for number in re.findall(r"prefix_cache_hits_total{.*} (.*)", page))


async def test_texts_are_embedded_where_their_beginning_is_cached(fleet: LiveFleet) -> None:
    """Each has a beginning in common with two others."""
    texts = [f"Book {number}. {TEXT * 20}{end}" for end in ("", "One.", "Two.") for number in range(BOOKS)]
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client, asyncio.timeout(DEADLINE_S):
        for number, text in enumerate(texts):
            before = await cached_tokens(client, fleet)
            response = await client.post(f"{fleet.url}/v1/embeddings", json={"model": "tiny", "input": text})
            predicted = int(response.raise_for_status().headers["x-warmroute-cached-tokens"])
            assert predicted == await cached_tokens(client, fleet) - before
            assert (predicted > 300) == (number >= BOOKS)
