"""A review reports what changes between two policies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.price import Choice
from router.policy.review import Move, Review, chosen, review
from router.policy.spec import Policy
from router.types import InFlight, Role, Scene
from tests.kit.scenes import POLICIES, holding, pod, policy, ready, request, scene, scenes

HIT, LOAD = policy("prefill"), policy("queue")


def busy_holder(name: str = "r", queue_ms: float = 500.0) -> Scene:
    """Pod `a` holds most of the prompt, and has so much to do; pod `b` is idle. T_prefill is 1 + 20 + 0.4 ms."""
    work = InFlight(requests=1, prefill_requests=1, prefill_tokens=9, prefill_ms=queue_ms, context_tokens=9)
    return holding(scene(*ready(pod("a"), pod("b")), request=request(name), inflight={"a": work}), "a", 60)


def reviewed(seen: list[Scene], old: Policy, new: Policy, limit: int = 10) -> Review:
    """What changes when `new` replaces `old`."""
    return review([(each, chosen(each, old), new) for each in seen], new.name, limit=limit)


@given(st.lists(scenes(), max_size=4), st.sampled_from(list(POLICIES.values())))
def test_a_policy_changes_nothing_against_itself(seen: list[Scene], same: Policy) -> None:
    """No changed decision and no changed time, for any scenes."""
    found = reviewed(seen, same, same)
    assert (found.decisions, found.changed, found.refused) == (len(seen), 0, 0)
    assert found.ttft_ratio == 1 and not found.moves and not found.largest


def test_both_choices_are_priced_by_what_the_client_waits_for() -> None:
    """Neither of these policies has a term for the other's: the yardstick has both."""
    found = reviewed([busy_holder("one"), busy_holder("two"), busy_holder("three", queue_ms=0.0)], HIT, LOAD)
    assert (found.decisions, found.changed) == (3, 2)
    assert found.ttft_ratio == pytest.approx(14.9 / 335.2, abs=0.001)
    assert found.moves == (Move("a", "b", 2),)
    assert {change.request_id for change in found.largest} == {"one", "two"}
    assert str(found) == "2 of 3 decisions would change"


def test_the_largest_changes_come_first() -> None:
    """In either direction, and no more than were asked for."""
    seen = [busy_holder(f"{ms:g}", queue_ms=ms) for ms in (100.0, 900.0, 300.0)]
    found = reviewed(seen, LOAD, HIT, limit=2)
    assert [change.request_id for change in found.largest] == ["900", "300"]
    assert found.largest[0].change_ms == pytest.approx(880, abs=3)


def test_a_request_that_would_be_refused_is_counted_and_has_no_time() -> None:
    """A decode pod alone, under a policy that wants a prefill pod."""
    seen = scene(*ready(pod("d", role=Role.DECODE, handoff="nixl")))
    found = reviewed([seen], policy("queue"), policy("queue", "handoff", pd={"on_no_prefill": "fail"}))
    assert (found.changed, found.refused, found.ttft_ratio) == (1, 1, 1.0)
    assert found.moves == (Move("d", "refused", 1),)
    assert str(found).endswith("1 of 1 decisions would change; 1 would be refused")


def test_choices_that_were_made_count_as_they_were_made() -> None:
    """By any policy; a choice whose pod is missing in the scene changes, without a time."""
    found = review([(busy_holder(), Choice("gone"), LOAD), (busy_holder(), Choice("b"), LOAD)], "load")
    assert (found.decisions, found.changed, found.largest[0].was_ms) == (2, 1, None)
