"""One of two real prefill pods stops under load, as a process that swaps or a node that freezes: nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.pairs import PATIENCE_S, Fleet, nixl_fleet

pytestmark = [pytest.mark.live, pytest.mark.net]

REQUESTS, EVERY_S = 60, 0.5
STOPPED_AT = 20
"""The number of the request before which the pod is stopped."""
LATE_S = 10.0
"""An answer is late after this time and after twice the median of those before."""


@dataclass(frozen=True, slots=True)
class Answered:
    is_good: bool
    prefill_pod: str | None
    took_s: float


async def ask(client: httpx.AsyncClient, name: str, *, stream: bool) -> Answered:
    """One chat that no other has the prefix of."""
    text = " ".join(f"{name}: boat {line} comes in, and its cargo is written down." for line in range(12))
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": stream}
    body["messages"] = [{"role": "user", "content": text}]
    began_s = time.monotonic()
    answer = await client.post("/v1/chat/completions", json=body)
    is_good = answer.status_code == 200 and (answer.text.endswith("[DONE]\n\n") if stream else "usage" in answer.json())
    if not is_good or "error" in answer.text:
        print(name, answer.status_code, answer.text)
    return Answered(is_good, answer.headers.get("x-warmroute-prefill-pod"), time.monotonic() - began_s)


async def load(fleet: Fleet) -> tuple[list[Answered], list[Answered]]:
    """The answers before and since the pod is stopped that was the last one to compute a prompt."""
    async with httpx.AsyncClient(base_url=fleet.url, timeout=PATIENCE_S) as client:
        for number in range(5):  # the first transfer between two pods takes seconds
            print(await asyncio.gather(*(ask(client, f"first {number} {at}", stream=True) for at in range(4))))
        asking, began_s = list[asyncio.Task[Answered]](), time.monotonic()
        for number in range(REQUESTS):
            if number == STOPPED_AT:
                last = [task.result().prefill_pod for task in asking if task.done()][-1]
                stopped = next(pod for pod in fleet.prefills if pod.address == last)
                os.killpg(stopped.process.pid, signal.SIGSTOP)
            asking.append(asyncio.create_task(ask(client, f"load {number}", stream=number % 3 > 0)))
            await asyncio.sleep(max(began_s + (number + 1) * EVERY_S - time.monotonic(), 0))
        answers = await asyncio.gather(*asking)
    return answers[:STOPPED_AT], answers[STOPPED_AT:]


def test_a_prefill_pod_that_stops_under_load_fails_no_request_and_delays_none(tmp_path: Path) -> None:
    """Its connections stay open; its legs, and the KV that decode pods read from it, do not come."""
    with nixl_fleet(tmp_path, 2) as fleet:
        try:
            before, since = asyncio.run(load(fleet))
        finally:
            for pod in fleet.prefills:
                os.killpg(pod.process.pid, signal.SIGCONT)
        for answers in (before, since):
            times = sorted(answer.took_s for answer in answers)
            pods = {answer.prefill_pod for answer in answers}
            print(f"p50 {times[len(times) // 2]:.2f} s, max {times[-1]:.2f} s, prefill pods {pods}")
    usual_s = sorted(answer.took_s for answer in before)[len(before) // 2]
    assert all(answer.is_good for answer in since)
    assert [answer for answer in since if answer.took_s > max(LATE_S, 2 * usual_s)] == []
