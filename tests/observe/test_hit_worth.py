"""What hits saved: seconds of prefill, against no cache and against round robin."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.decision import Direct, Split
from router.observe.declared import of_decisions
from router.observe.ended import EndedRequest
from router.observe.hit_worth import SAMPLE, SAMPLE_HOLDERS, HitWorth
from router.observe.metrics import Metrics
from router.observe.receipts import Outcome
from router.observe.recent_decisions import RecentDecisions
from router.policy.decide import decide
from router.types import PodSpeed, PrefixMatch, Role
from tests.policy.scenes import BLOCK, POLICIES, pod, ready, request, scene

BY = POLICIES["cost_aware"]
FAST, SLOW = PodSpeed(10.0, 0.1, 1e-5), PodSpeed(10.0, 0.4, 4e-5)
TOKENS = 1000


class Served:
    """Recent decisions, metrics and the worth of what was served. Pod b has four GPUs and is slower."""

    def __init__(self) -> None:
        self.recent, self.metrics = RecentDecisions(size=4 * SAMPLE), Metrics()
        self.worth = HitWorth(self.recent, self.metrics, lambda one: 4 if one.id == "b" else 1)

    def request(self, by: str, held: dict[str, int], cached_tokens: int | None = None, **facts: Any) -> None:
        """One request that pod `by` served; `held`: blocks by pod."""
        pods = {"a": pod("a", speed=FAST), "b": pod("b", speed=SLOW), "c": pod("c", speed=FAST)}
        match = PrefixMatch({name: (blocks, 0, 0, 0) for name, blocks in held.items()})
        number = len(self.recent.latest(10**6))
        seen = scene(*ready(*pods.values()), request=request(f"r{number}"), match=match)
        decision = decide(seen, BY)
        recorded = self.recent.record(seen, decision, BY)
        expected = held.get(by, 0) * BLOCK
        served = type(decision.candidates[0])(Direct(pods[by]), decision.candidates[0].cost, expected)
        usual = {"id": f"r{number}", "at_s": 0.0, "model": "m", "endpoint": "chat", "result": "ok"}
        ended = Outcome(**{**usual, "prompt_tokens": TOKENS, "cached_tokens": cached_tokens, "served": served, **facts})
        request_that_ended = EndedRequest(outcome=ended, recorded=recorded, decision=decision, prompt=seen.prompt)
        self.recent.settle(request_that_ended)
        self.metrics.ended(request_that_ended)

    def saved(self) -> dict[str, float]:
        """Milliseconds of pods by placement."""
        asyncio.run(self.worth.observe())
        return {
            labels[1]: value * 1000 for labels, [value] in self.metrics[of_decisions.PREFILL_SAVED_S].series().items()
        }

    def gpus(self) -> dict[str, float]:
        return {
            labels[1]: value * 1000
            for labels, [value] in self.metrics[of_decisions.PREFILL_SAVED_GPU_S].series().items()
        }


def test_a_hit_saves_the_prefill_of_its_tokens_by_the_pods_own_speed() -> None:
    """c1 p + c2 p^2; what the engine reports counts, not what was expected."""
    served = Served()
    served.request("a", {"a": 30}, cached_tokens=320)
    assert served.saved()["chosen"] == pytest.approx(0.1 * 320 + 1e-5 * 320**2)
    served.request("b", {"b": 20})
    served.request("b", {}, cached_tokens=0)
    assert served.saved()["chosen"] > 0


def test_round_robin_would_have_hit_what_the_pods_hold_on_average() -> None:
    """Each pod in a third of the requests, with its own speed."""
    served = Served()
    served.request("a", {"a": 30, "b": 10})
    mean = (FAST.compute_ms(0, 30 * BLOCK) + SLOW.compute_ms(0, 10 * BLOCK)) / 3
    assert served.saved() == pytest.approx({"chosen": FAST.compute_ms(0, 30 * BLOCK), "round_robin": mean})


def test_the_time_of_a_pod_counts_for_each_of_its_gpus() -> None:
    served = Served()
    served.request("b", {"b": 10})
    saved = served.saved()
    assert served.gpus() == pytest.approx({"chosen": 4 * saved["chosen"], "round_robin": 4 * saved["round_robin"]})


def test_requests_that_left_memory_count_as_much_as_those_in_it() -> None:
    """Ten times as many requests as are looked at."""
    served = Served()
    for _ in range(10 * SAMPLE):
        served.request("a", {}, cached_tokens=160)
    assert served.saved()["chosen"] == pytest.approx(10 * SAMPLE * FAST.compute_ms(0, 160))


def test_each_request_is_counted_once_however_often_somebody_asks() -> None:
    served = Served()
    served.request("a", {}, cached_tokens=160)
    assert served.saved() == served.saved()
    served.request("a", {}, cached_tokens=160)
    assert served.saved()["chosen"] == pytest.approx(2 * FAST.compute_ms(0, 160))


@pytest.mark.parametrize("facts", [{"result": "pod_error"}, {"served": None}])
def test_requests_that_were_not_served_save_nothing(facts: dict[str, Any]) -> None:
    served = Served()
    served.request("a", {"a": 30}, **facts)
    assert served.saved() == {}


def test_a_split_saves_prefill_on_the_pod_that_computes_the_prompt() -> None:
    served = Served()
    prefill = pod("p", speed=SLOW, role=Role.PREFILL, handoff="nixl")
    decoding = pod("d", speed=FAST, role=Role.DECODE, handoff="nixl")
    seen = scene(*ready(prefill, decoding), match=PrefixMatch({"p": (10, 0, 0, 0), "d": (40, 0, 0, 0)}))
    decision = decide(scene(*ready(pod("a"))), BY)
    recorded = served.recent.record(seen, decision, BY)
    chosen = type(decision.candidates[0])(Split(prefill, decoding), decision.candidates[0].cost, 160)
    facts = {"id": "r", "at_s": 0.0, "model": "m", "endpoint": "chat", "result": "ok", "prompt_tokens": TOKENS}
    ended = Outcome(**facts, served=chosen)  # type: ignore[arg-type]
    request_that_ended = EndedRequest(outcome=ended, recorded=recorded, decision=decision, prompt=seen.prompt)
    served.recent.settle(request_that_ended)
    served.metrics.ended(request_that_ended)
    wanted = SLOW.compute_ms(0, 160)
    assert served.saved() == pytest.approx({"chosen": wanted, "round_robin": wanted})


def test_many_holders_of_a_prompt_hold_the_event_loop_for_one_request_at_a_time() -> None:
    """Fewer requests are looked at. Pods that have left the fleet count for nothing."""
    served, turns = Served(), 0
    for _ in range(20):
        served.request("a", {"a": 10, **{f"gone-{number}": 5 for number in range(600)}})

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        counting = asyncio.create_task(count_turns())
        await served.worth.observe()
        counting.cancel()

    asyncio.run(main())
    assert 2 <= turns <= 1 + SAMPLE_HOLDERS // 600 + 1
    saved = FAST.compute_ms(0, 10 * BLOCK)
    assert served.saved() == pytest.approx({"chosen": 20 * saved, "round_robin": 20 * saved / 3})
