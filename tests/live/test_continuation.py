"""Streams of real vLLM pods are cut, and go on: what the client reads is what an uncut stream has.

Needs a model that knows its answers (`answer_bodies.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from router.cli.child_processes import RouterUrls, free_port
from tests.live.answer_bodies import CASES, CHAT, COMPLETIONS, MODEL, completion, streamed
from tests.live.cutting_proxy import Cuts, proxied
from tests.live.engines import EngineProcess, start_vllm, started_together
from tests.live.live_fleet import AGENT_FLAGS
from tests.live.router_process import router
from tests.request.continuation.recorded import Received

PODS = 2
CUTS = 8
"""Cuts of each case."""

pytestmark = [
    pytest.mark.live,
    pytest.mark.net,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason=f"no model that knows its answers in {MODEL}"),
]


@dataclass(frozen=True)
class CutFleet:
    pods: list[EngineProcess]
    cuts: Cuts
    urls: RouterUrls

    def uncut(self, body: dict[str, Any], path: str = CHAT) -> Any:
        """What a client reads of a stream that no router touches."""
        return Received(streamed(self.pods[0].url, body, path)).whole[:7]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CutFleet]:
    starts = [
        lambda n=n: start_vllm(f"cut-{n}", free_port(), MODEL, kv_port=free_port(), extra_args=AGENT_FLAGS)
        for n in range(PODS)
    ]
    with started_together(starts) as pods, proxied(*(int(pod.url.rsplit(":", 1)[1]) for pod in pods)) as behind:
        proxies, cuts = behind
        config = {
            "models": [{"name": "tiny", "tokenizer": str(MODEL)}],
            "pods": [{"url": f"http://127.0.0.1:{proxy.port}", "engine": "vllm"} for proxy in proxies],
            "continuation": {"enabled": True, "silence_s": 2},
            "limits": {"retry_budget": 1.0},
            "probes": {"clients_to_eject": 16},  # cuts of this test are not the pods' fault
        }
        with router(tmp_path_factory.mktemp("router"), config) as urls:
            yield CutFleet(pods, cuts, urls)


@pytest.mark.parametrize("name", CASES)
def test_joined_stream_is_the_uncut_one(fleet: CutFleet, name: str) -> None:
    body, url = CASES[name], fleet.urls.public
    expected, whole = fleet.uncut(body), streamed(url, body)
    assert Received(whole).whole[:7] == expected
    events = whole.count(b"data: ")
    for cut in range(0, events, max(events // CUTS, 1)):
        fleet.cuts.after[:] = [cut]
        received = streamed(url, body)
        assert not fleet.cuts.after or cut > events - 3, "nothing was cut"
        fleet.cuts.after.clear()
        assert Received(received).whole[:7] == expected, f"cut after {cut} events"


def test_completion_goes_on(fleet: CutFleet) -> None:
    body = completion("bytes", logprobs=1)
    expected = fleet.uncut(body, COMPLETIONS)
    for cut in range(0, 60, 7):
        fleet.cuts.after[:] = [cut]
        received = streamed(fleet.urls.public, body, COMPLETIONS)
        fleet.cuts.after.clear()
        assert Received(received).whole[:7] == expected, f"cut after {cut} events"
