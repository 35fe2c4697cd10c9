"""Filters keep the pods that they describe, and are ignored if no usable pod would be left."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from router.errors import NoReadyPod, RouterError
from router.policy.decide import decide
from router.policy.eligible import LeftOut, left_out
from router.policy.explain import explain, priced
from router.policy.recording import record
from router.types import PodLoad, PodState, PodStatus, Role, Scene
from tests.kit.scenes import pod, policy, ready, scene, scenes

FACTS = {
    "a1": ({"hardware": "h100x1", "zone": "eu", "rack": "r1"}, PodLoad(waiting=9, kv_usage=0.99)),
    "a2": ({"hardware": "h100x1", "zone": "us", "rack": "r1"}, PodLoad(waiting=8, kv_usage=0.95)),
    "b1": ({"hardware": "a100x1", "zone": "us", "rack": "r2"}, PodLoad()),
}
FLEET = scene(*(PodStatus(pod(name, **facts), PodState.READY, load) for name, (facts, load) in FACTS.items()))


def candidates(seen: Scene, **filters: dict[str, Any]) -> set[str]:
    found = decide(seen, policy("queue", filters=filters)).candidates
    return {one.plan.pod.id for one in found}


def test_filters_are_applied_one_after_another() -> None:
    """What they leave is what all of them keep."""
    assert candidates(FLEET, hardware={"only": "h100x1"}, max_waiting={}) == {"a2"}


def test_a_filter_that_would_leave_no_usable_pod_is_ignored() -> None:
    """The others still hold."""
    assert candidates(FLEET, hardware={"only": "b200x8"}, max_waiting={}) == {"a2", "b1"}


def test_a_strict_filter_refuses_the_request_with_its_name() -> None:
    """503, so that a client may come again."""
    with pytest.raises(NoReadyPod, match="filter `hardware` of policy `mine` keeps no ready pod that can serve `m`"):
        candidates(FLEET, hardware={"only": "b200x8", "strict": True})


def test_a_usable_pod_or_pair_must_be_left_in_a_fleet_with_roles() -> None:
    """A prefill pod alone serves nobody; a decode pod does where it serves alone."""
    pods = ready(
        pod("p", role=Role.PREFILL, handoff="nixl"), pod("d", role=Role.DECODE, handoff="nixl"), pod("both", handoff="")
    )
    assert candidates(scene(*pods), pods={"only": "p"}) == {"d", "both"}
    assert candidates(scene(*pods), pods={"only": "d"}) == {"d"}


def test_a_pair_is_not_usable_for_a_policy_without_splits() -> None:
    """It has no price for a handoff, so that a third must stay."""
    pods = ready(
        pod("p", role=Role.PREFILL, handoff="nixl"),
        pod("d", role=Role.DECODE, handoff="nixl", serves_alone=False),
        pod("both"),
    )
    assert candidates(scene(*pods), pods={"without": "both"}) == {"both"}


def test_a_policy_that_insists_on_a_prefill_pod_keeps_one() -> None:
    """A preference must not be what refuses a request."""
    pods = ready(pod("p", role=Role.PREFILL, handoff="nixl"), pod("d", role=Role.DECODE, handoff="nixl"))
    insists = policy("queue", "handoff", filters={"pods": {"without": "p"}}, pd={"on_no_prefill": "fail"})
    assert decide(scene(*pods), insists).candidates[0].plan.pod.id == "d"


@given(scenes(), st.integers(0, 50), st.floats(0, 1))
def test_filters_only_remove_candidates_and_refuse_no_request(seen: Scene, requests: int, share: float) -> None:
    """In any fleet; the candidates that stay cost what they did, and a recorded scene is decided alike."""
    by = policy("queue", "prefill", filters={"max_waiting": {"requests": requests}, "max_kv_usage": {"share": share}})
    try:
        before = {one.plan.pod.id: one for one in decide(seen, policy("queue", "prefill")).candidates}
    except RouterError:
        return
    after = decide(seen, by)
    assert all(before[one.plan.pod.id].cost == one.cost for one in after.candidates)
    gone = {name for one in left_out(seen, by) for name in one.pods}
    assert {one.plan.pod.id for one in after.candidates} == set(before) - gone
    assert decide(record(seen).scene(), by) == after


def test_an_explanation_names_filters_and_excluded_pods() -> None:
    """Also the one that gave way; one that changes nothing is not mentioned."""
    filters = {"pods": {"only": "*"}, "hardware": {"only": "b200x8"}, "max_waiting": {}}
    by = policy("queue", filters=filters)
    found = decide(FLEET, by)
    explanation = explain(FLEET, by, [priced(one) for one in found.candidates], len(found.candidates), found.reason)
    assert explanation.left_out == (LeftOut("hardware", (), ignored=True), LeftOut("max_waiting", ("a1",)))


# --- each filter ---


@pytest.mark.parametrize(
    ("name", "said", "stay"),
    [
        ("max_kv_usage", {}, {"a2", "b1"}),
        ("max_kv_usage", {"share": 0.5}, {"b1"}),
        ("max_waiting", {}, {"a2", "b1"}),
        ("max_waiting", {"requests": 0}, {"b1"}),
        ("pods", {"only": "a*"}, {"a1", "a2"}),
        ("pods", {"without": ["a*"]}, {"b1"}),
        ("pods", {"only": ["a?", "b*"], "without": "?2"}, {"a1", "b1"}),
        ("hardware", {"only": "h100x1"}, {"a1", "a2"}),
        ("topology", {"zone": "us"}, {"a2", "b1"}),
        ("topology", {"zone": ["us", "eu"], "rack": "r1"}, {"a1", "a2"}),
    ],
)
def test_each_filter_keeps_the_pods_it_describes(name: str, said: dict[str, Any], stay: set[str]) -> None:
    """Each by the facts and the load of the pods, its bounds included."""
    ((_, one),) = policy("queue", filters={name: said}).filters
    assert {status.pod.id for status in FLEET.fleet.pods if one.keeps(status)} == stay


@pytest.mark.parametrize(
    "said", [{"topology": {}}, {"hardware": {}}, {"pods": {}}, {"max_kv_usage": {"share": 2}}, {"max_waiting": None}]
)
def test_a_filter_without_valid_conditions_is_rejected(said: dict[str, Any]) -> None:
    """At once, not when a request comes."""
    with pytest.raises(ValidationError):
        policy("queue", filters=said)
