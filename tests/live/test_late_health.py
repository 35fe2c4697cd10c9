"""A real vLLM whose health checks time out serves on while it sends tokens; one that hangs is ejected.

The engine is two pods of the router, each behind a proxy that loses health checks and scrapes. A minute, mostly for the
start of the engine.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from loadtest.commands.child_processes import RouterUrls, free_port
from tests.live.cutting_proxy import Cuts, proxied
from tests.live.engines import HOME, EngineProcess, start_vllm
from tests.live.router_process import router

MODEL = HOME / "model" / "tiny-llama"
PROBES = {"health_interval_s": 0.2, "health_timeout_s": 1.0, "load_timeout_s": 1.0}
PROMPT = {"model": "tiny", "prompt": "The tides"}
DEADLINE_S = 120.0

pytestmark = [
    pytest.mark.live,
    pytest.mark.net,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason=f"no model in {MODEL}"),
]


@dataclass(frozen=True)
class LateFleet:
    engine: EngineProcess
    cuts: Cuts
    urls: RouterUrls

    def reasons(self, state: str) -> list[str]:
        """Why the pods in this state are."""
        pods: list[dict[str, Any]] = httpx.get(f"{self.urls.admin}/admin/pods").json()
        return [pod["state_reason"] for pod in pods if pod["state"] == state]

    def await_reasons(self, fits: Callable[[list[str]], bool]) -> None:
        """Wait until the reasons of the ready pods fit."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not fits(found := self.reasons("ready")):
            assert time.monotonic() < deadline_s, (found, self.reasons("ejected"))
            time.sleep(0.1)

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Long answers run on both pods, at least until the end."""
        pods, stop, threads = set[str](), threading.Event(), list[threading.Thread]()

        def stream() -> None:
            body = {**PROMPT, "max_tokens": 8000, "ignore_eos": True, "stream": True}
            url = f"{self.urls.public}/v1/completions"
            with suppress(httpx.HTTPError), httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as answer:
                for _ in answer.iter_raw():
                    pods.add(answer.headers["x-warmroute-pod"])
                    if stop.is_set():
                        return

        deadline_s = time.monotonic() + DEADLINE_S
        while len(pods) < 2:
            assert time.monotonic() < deadline_s, pods
            threads.append(threading.Thread(target=stream, daemon=True))
            threads[-1].start()
            time.sleep(0.5)
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(DEADLINE_S)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LateFleet]:
    port = free_port()
    with start_vllm("late", port, MODEL, kv_port=free_port()) as engine, proxied(port, port) as (proxies, cuts):
        config = {
            "models": [{"name": "tiny", "tokenizer": str(MODEL)}],
            "pods": [
                {"url": f"http://127.0.0.1:{proxy.port}", "engine": "vllm", "kv_events": "off"} for proxy in proxies
            ],
            "edge": {"route_headers": True},
            "probes": PROBES,
            "policy": "round_robin",
        }
        with router(tmp_path_factory.mktemp("router"), config) as urls:
            yield LateFleet(engine, cuts, urls)


def test_pods_that_send_tokens_are_ready_although_nothing_else_is_answered(fleet: LateFleet) -> None:
    with fleet.streaming():
        fleet.cuts.lost = (b"GET /health", b"GET /metrics")
        fleet.await_reasons(lambda found: all("it sends other things" in one for one in found))
        assert len(fleet.reasons("ready")) == 2
        answer = httpx.post(f"{fleet.urls.public}/v1/completions", json={**PROMPT, "max_tokens": 4}, timeout=DEADLINE_S)
        assert answer.status_code == 200
    fleet.cuts.lost = ()
    fleet.await_reasons(lambda found: found == ["", ""])


def test_pod_that_hangs_is_ejected_unless_it_is_the_last_one(fleet: LateFleet) -> None:
    """The process is stopped: it sends no byte of anything, and the kernel still accepts connections for it."""
    with fleet.streaming():
        os.killpg(fleet.engine.process.pid, signal.SIGSTOP)
        try:
            fleet.await_reasons(lambda found: len(found) == 1 and "the last ready pod" in found[0])
        finally:
            os.killpg(fleet.engine.process.pid, signal.SIGCONT)
        fleet.await_reasons(lambda found: found == ["", ""])


def test_pod_that_is_gone_is_ejected_although_it_is_the_last_one(fleet: LateFleet) -> None:
    fleet.engine.kill()
    fleet.await_reasons(lambda found: not found)
