"""Which pod stores which response: limits, losses and hostile ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index import stored_responses
from router.index.stored_responses import TTL_S, StoredResponse, StoredResponses, id_in_path


def stored(response_id: str, pod: str = "a", at_s: float = 0.0) -> StoredResponse:
    return StoredResponse(response_id, pod, "m", at_s)


def learnt(*names: str, at_s: float = 0.0) -> StoredResponses:
    responses = StoredResponses()
    for name in names:
        responses.learn(stored(name, at_s=at_s), at_s)
    return responses


def test_a_response_is_found_until_it_was_not_used_for_long() -> None:
    """Each use counts."""
    responses = learnt("r")
    assert responses.find("r", TTL_S) == stored("r")
    assert responses.find("r", 2 * TTL_S)
    assert responses.find("r", 3 * TTL_S + 1) is None
    assert len(responses) == 0


def test_the_least_recently_used_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit."""
    monkeypatch.setattr(stored_responses, "MAX_RESPONSES", 2)
    responses = learnt("r1", "r2")
    responses.find("r1", 1.0)
    responses.learn(stored("r3"), 2.0)
    assert [bool(responses.find(name, 3.0)) for name in ("r1", "r2", "r3")] == [True, False, True]


def test_a_tenant_with_many_responses_evicts_no_other_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own are evicted, also where another tenant needs room."""
    monkeypatch.setattr(stored_responses, "MAX_RESPONSES", 6)
    responses = StoredResponses()
    for number, owner in enumerate(["good", *["flood"] * 20, "good", "late"]):
        responses.learn(StoredResponse(f"{owner}_{number}", "a", "m", 0.0, owner), float(number))
    kept = [
        number
        for number in range(23)
        for owner in ("good", "flood", "late")
        if responses.find(f"{owner}_{number}", 30.0)
    ]
    assert kept == [0, 18, 19, 20, 21, 22]
    assert len(responses) == 6


def test_an_id_that_its_pod_lost_may_get_another_owner() -> None:
    responses = StoredResponses()
    responses.learn(StoredResponse("r", "a", "m", 0.0, "one"), 0.0)
    responses.lose("a", 1.0)
    responses.learn(StoredResponse("r", "b", "m", 2.0, "two"), 2.0)
    assert responses.find("r", TTL_S + 1.0) == StoredResponse("r", "b", "m", 2.0, "two")
    assert responses.find("r", 3 * TTL_S) is None


def test_a_second_pod_cannot_take_an_id() -> None:
    """Clients of vLLM choose ids; but after the first pod has lost it, it is free."""
    responses = learnt("r")
    responses.learn(stored("r", "b", 1.0), 1.0)
    assert responses.find("r", 1.0) == stored("r")
    responses.lose("a", 2.0)
    assert responses.is_lost("r")
    responses.learn(stored("r", "b", 3.0), 3.0)
    assert responses.find("r", 3.0) == stored("r", "b", 3.0)
    assert not responses.is_lost("r")


def test_a_restarted_pod_keeps_what_it_stored_since() -> None:
    """Only older responses are lost."""
    responses = learnt("r1", at_s=1.0)
    responses.lose("a", 2.0)
    responses.learn(stored("r2", at_s=3.0), 3.0)
    assert [responses.is_lost(name) for name in ("r1", "r2")] == [True, False]


def test_lost_pods_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of pods change with every rollout."""
    monkeypatch.setattr(stored_responses, "MAX_LOST_PODS", 2)
    responses = learnt("r", at_s=-1.0)
    for pod in ("a", "b", "c"):
        responses.lose(pod, 1.0)
    assert not responses.is_lost("r")


def test_other_routers_do_not_send_an_id_back() -> None:
    """Nor is one shared twice."""
    shared = list[str]()
    responses = StoredResponses(lambda each: shared.append(each.id))
    responses.learn(stored("r1"), 0.0, remote=True)
    responses.learn(stored("r2"), 0.0)
    responses.learn(stored("r2"), 1.0)
    assert shared == ["r2"]


@pytest.mark.parametrize("name", ["", "a" * 129, "a.b", "a/b", "é", "a\n"])
def test_an_id_that_no_path_can_have_is_not_kept(name: str) -> None:
    """Its characters and length are limited."""
    assert len(learnt(name)) == 0


@given(st.text(max_size=140))
def test_only_ids_that_are_kept_are_found_in_paths(name: str) -> None:
    """With and without an action behind them."""
    found = [id_in_path(f"/v1/responses/{name}{action}") for action in ("", "/cancel", "/input_items")]
    assert found == [name if len(learnt(name)) else id_in_path(f"/v1/responses/{name}")] * 3 or "/" in name
    assert all(len(learnt(each)) for each in found if each)
    assert id_in_path(f"/v1/other/{name}") == ""
