"""Orders over priced candidates."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from router.decision import Candidate, Cost, Direct, Plan, Split
from router.policy.decide import decide
from router.policy.pickers import RING_CANDIDATES, InTurn, LowestCost, RingBoundedLoad
from router.policy.ring import PodRing, affinity_key
from router.types import InFlight, PodLoad, PodState, PodStatus, Scene
from tests.kit.scenes import POLICIES, pod, prompt, ready, request, scene, works

costs = st.lists(st.floats(0, 10_000), min_size=1, max_size=6)
asked = st.integers(0, 50).map(lambda salt: prompt(200, salt * 1000))


def priced(costs_ms: list[float]) -> list[Candidate]:
    pods = [pod(f"pod-{number}") for number in range(len(costs_ms))]
    return [Candidate(Direct(each), Cost.of((("work", ms),), ms)) for each, ms in zip(pods, costs_ms, strict=True)]


@given(costs_ms=costs, prompt=asked, indifference_ms=st.sampled_from([0.0, 1.0, 50.0]))
def test_the_first_is_the_cheapest_or_as_good(costs_ms: list[float], prompt: object, indifference_ms: float) -> None:
    """Never dearer than the lowest by more than the indifference, or the microsecond that counts as equal."""
    candidates = priced(costs_ms)
    ranked, _ = LowestCost(indifference_ms=indifference_ms).rank(scene(prompt=prompt), candidates)
    assert sorted(ranked, key=id) == sorted(candidates, key=id)
    assert ranked[0].cost.total_ms <= min(costs_ms) + max(indifference_ms, 0.001)
    beyond = [c.cost.total_ms for c in ranked if c.cost.total_ms > min(costs_ms) + indifference_ms + 0.001]
    assert all(later > earlier - 0.002 for earlier, later in itertools.pairwise(beyond))


def test_equal_prices_keep_a_conversation_together_and_spread_the_others() -> None:
    """The affinity key decides between equals."""
    candidates = priced([5.0, 5.0000001, 5.0, 5.0])
    first: Counter[str] = Counter()
    for salt in range(200):
        seen = scene(prompt=prompt(200, salt * 1000))
        winners = {LowestCost().rank(seen, order)[0][0].pod.id for order in (candidates, candidates[::-1])}
        assert len(winners) == 1
        first.update(winners)
    assert len(first) == 4
    assert max(first.values()) < 90


@given(light=works, heavy=works, swap=st.booleans(), salt=st.integers(0, 20))
def test_of_two_pods_the_lighter_wins_always(light: InFlight, heavy: InFlight, swap: bool, salt: int) -> None:
    """least_load, both under load, in either order and for any request: the property that Caddy missed. Both have the
    same head, which began at the same time; the heavier pod has more prompts after it."""
    prefill_ms = light.prefill_ms + 1 + heavy.prefill_ms
    heavier = structs.replace(
        heavy,
        requests=light.requests + 1 + heavy.requests,
        prefill_ms=prefill_ms,
        head_ms=light.head_ms or prefill_ms,
        head_since_s=light.head_since_s if light.head_ms else 0.0,
        context_tokens=light.context_tokens + heavy.context_tokens,
        prefill_requests=light.prefill_requests + 1,
        decode_tokens=light.decode_tokens + heavy.decode_tokens,
    )
    loads = {"a": heavier, "b": light} if swap else {"a": light, "b": heavier}
    seen = scene(*ready(pod("a"), pod("b")), inflight=loads, prompt=prompt(200, salt * 1000))
    ranked = decide(seen, POLICIES["least_load"]).candidates
    assert ranked[0].pod.id == ("b" if swap else "a")
    assert ranked[0].cost.total_ms < ranked[1].cost.total_ms


@given(light=st.integers(0, 30), more=st.integers(1, 30), swap=st.booleans())
def test_load_that_came_past_us_counts_too(light: int, more: int, swap: bool) -> None:
    """What the engine says waits there weighs like our own."""
    depths = (light + more, light) if swap else (light, light + more)
    pods = (
        PodStatus(pod(name), PodState.READY, PodLoad(waiting=depth)) for name, depth in zip("ab", depths, strict=True)
    )
    assert decide(scene(*pods), POLICIES["least_load"]).candidates[0].pod.id == ("b" if swap else "a")


@given(pods=st.integers(1, 9), start=st.integers(0, 1000), rounds=st.integers(1, 3))
def test_in_turn_visits_each_pod_equally_often(pods: int, start: int, rounds: int) -> None:
    """And a retry goes on with the next one."""
    candidates = priced([0.0] * pods)
    first: Counter[str] = Counter()
    for turn in range(start, start + rounds * pods):
        ranked, _ = InTurn().rank(scene(turn=turn), candidates)
        assert {c.pod.id for c in ranked} == {c.pod.id for c in candidates}
        following, _ = InTurn().rank(scene(turn=turn + 1), candidates)
        assert [*ranked[1:], ranked[0]] == following
        first[ranked[0].pod.id] += 1
    assert set(first.values()) == {rounds}


def bound_ms(picker: RingBoundedLoad, seen: Scene, candidates: list[Candidate]) -> float:
    tokens = seen.prompt.token_count if seen.prompt else 0
    mean_ms = sum(c.cost.total_ms for c in candidates) / len(candidates)
    return (1 + picker.headroom) * mean_ms + picker.slack_prefills * candidates[0].pod.speed.prefill_ms(tokens)


@given(costs_ms=costs, prompt=asked, headroom=st.sampled_from([0.0, 0.25, 1.0]), slack=st.sampled_from([0.0, 1.0]))
def test_the_ring_holds_its_bound(costs_ms: list[float], prompt: object, headroom: float, slack: float) -> None:
    """The first pods on the ring within the bound take it; the others come last, cheapest first."""
    picker, candidates = RingBoundedLoad(headroom=headroom, slack_prefills=slack), priced(costs_ms)
    seen = scene(*ready(*(candidate.pod for candidate in candidates)), prompt=prompt)
    limit_ms = bound_ms(picker, seen, candidates)
    assume(all(abs(ms - limit_ms) > 1e-6 for ms in costs_ms))
    ranked, _ = picker.rank(seen, candidates)
    assert sorted(ranked, key=id) == sorted(candidates, key=id)
    within = {c.pod.id for c in candidates if c.cost.total_ms <= limit_ms}
    key = affinity_key(seen)
    assert within and key is not None
    order = PodRing([c.pod.id for c in candidates], picker.points_per_pod).walk(key)
    first = [each for each in order if each in within][:RING_CANDIDATES]
    assert [c.pod.id for c in ranked[: len(first)]] == first
    others = [c.cost.total_ms for c in ranked[len(first) :]]
    assert all(later > earlier - 0.002 for earlier, later in itertools.pairwise(others))


@given(costs_ms=costs)
def test_without_a_key_the_ring_is_least_load(costs_ms: list[float]) -> None:
    """There is nothing to be sticky by."""
    ranked, reason = RingBoundedLoad().rank(scene(prompt=None), priced(costs_ms))
    assert ranked[0].cost.total_ms <= min(costs_ms) + 0.001
    assert "no affinity key" in reason


def test_an_idle_fleet_follows_the_ring_alone() -> None:
    """The slack of a prefill keeps a nearly idle pod within its bound."""
    seen = scene(*ready(*(pod(f"pod-{number}") for number in range(4))), prompt=prompt(200))
    picker = RingBoundedLoad()
    idle = picker.rank(seen, priced([0.0] * 4))[0][0].pod.id
    number = int(idle[-1])
    slightly = [0.0] * 4
    slightly[number] = 2.0
    assert picker.rank(seen, priced(slightly))[0][0].pod.id == idle
    busy = [0.0] * 4
    busy[number] = 500.0
    ranked, reason = picker.rank(seen, priced(busy))
    assert ranked[0].pod.id != idle
    assert ranked[-1].pod.id == idle
    assert reason.startswith("ring position 2")


def test_the_ring_drops_no_way_to_serve() -> None:
    """Several plans that end on one pod: the cheapest of each pod is what the bound looks at, the rest come last."""
    here, there, prefill = pod("pod-0"), pod("pod-1"), pod("pod-p")
    plans: list[tuple[Plan, float]] = [
        (Direct(here), 900.0),
        (Split(prefill, here), 5.0),
        (Direct(there), 8.0),
        (Split(prefill, there), 700.0),
    ]
    candidates = [Candidate(plan, Cost.of((("work", ms),), ms)) for plan, ms in plans]
    picker = RingBoundedLoad(headroom=1.0, slack_prefills=0.0)
    for salt in range(20):
        ranked, _ = picker.rank(scene(*ready(here, there, prefill), prompt=prompt(200, salt * 1000)), candidates)
        assert {candidate.cost.total_ms for candidate in ranked[:2]} == {5.0, 8.0}
        assert [candidate.cost.total_ms for candidate in ranked[2:]] == [700.0, 900.0]


def test_a_ring_of_sessions_keeps_a_session_together_whatever_it_asks() -> None:
    """By its id where it has one; otherwise by the prefix, as a ring of prefixes does."""
    picker, candidates = RingBoundedLoad(key="session"), priced([0.0] * 8)
    fleet = ready(*(candidate.pod for candidate in candidates))

    def first(salt: int, session: str) -> str:
        seen = scene(*fleet, prompt=prompt(200, salt * 1000), request=request(session=session))
        return picker.rank(seen, candidates)[0][0].pod.id

    assert len({first(salt, "s1") for salt in range(20)}) == 1
    assert len({first(0, f"s{number}") for number in range(20)}) > 3
    assert first(3, "") == RingBoundedLoad().rank(scene(*fleet, prompt=prompt(200, 3000)), candidates)[0][0].pod.id
