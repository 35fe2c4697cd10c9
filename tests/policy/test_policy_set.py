"""Which of several policies decides."""

from __future__ import annotations

from typing import Any

import pytest

from router.policy.policy_set import PolicySet, policy_set
from router.policy.recording import record
from router.policy.spec import Policy
from tests.kit.scenes import pod, policy, prompt, ready, request, scene


def named(name: str, **facts: Any) -> Policy:
    return policy("queue", name=name, **facts)


DEFAULT = named("plain")


def chosen(among: PolicySet, workload: str = "", request_id: str = "r", **facts: Any) -> str:
    return among.for_request(request(request_id, **facts), workload).name


def test_alone_the_default_decides_everything() -> None:
    """Also what no other could match."""
    assert chosen(PolicySet(DEFAULT), tenant="acme") == "plain"


def test_a_policy_without_a_match_is_not_in_force() -> None:
    found = policy_set(DEFAULT, [DEFAULT, named("unused")])
    assert found.active == (DEFAULT,)


def test_the_narrowest_that_matches_decides() -> None:
    """More conditions first, for any order of the files."""
    wide, narrow = named("a_wide", match={"tenant": "acme"}), named("z", match={"tenant": "acme", "class": "rag"})
    found = policy_set(DEFAULT, [wide, narrow])
    assert chosen(found, "rag", tenant="acme") == "z"
    assert chosen(found, "chat", tenant="acme") == "a_wide"
    assert chosen(found, "rag", tenant="other") == "plain"


def test_a_canary_is_tried_before_the_policy_it_is_to_replace() -> None:
    """With equal conditions the smaller share comes first: nothing is decided by both or by none."""
    stable, canary = named("a_stable", match={"stream": True}), named("b_canary", match={"stream": True}, percent=20)
    found = policy_set(DEFAULT, [stable, canary])
    names = [chosen(found, request_id=f"r{number}", stream=True) for number in range(1000)]
    assert set(names) == {"a_stable", "b_canary"}
    assert 140 < names.count("b_canary") < 260


@pytest.mark.parametrize(
    ("match", "percent"),
    [
        ({"tenant": "acme"}, 100),
        ({"class": "rag"}, 100),
        ({"stream": True, "adapter": "lora"}, 100),
        ({"prompt_tokens": {"min": 1000, "max": 1000}}, 100),
        ({}, 50),
    ],
)
def test_a_recorded_request_meets_the_policy_that_it_met(match: dict[str, Any], percent: int) -> None:
    """By all that a match and a share go by, but for headers; and others do not meet it."""
    found = policy_set(DEFAULT, [named("narrow", match=match, percent=percent)])
    names = set()
    for number in range(20):
        for facts, workload, tokens in (
            ({"tenant": "acme", "stream": True, "adapter": "lora", "session": f"s{number}"}, "rag", 1000),
            ({"session": f"s{number}"}, "chat", 999),
        ):
            asked = request(f"r{number}", **facts)
            seen = scene(*ready(pod("a", adapters=("lora",))), request=asked, prompt=prompt(tokens))
            now = found.for_request(asked, workload, tokens)
            names.add(now.name)
            assert found.for_recorded(record(seen, workload), "another") is now
    assert names == {"narrow", "plain"}


def test_conditions_on_headers_hold_in_a_recording_for_the_policy_that_decided() -> None:
    """Headers are not kept; the other conditions are still looked at."""
    found = policy_set(DEFAULT, [named("canary", match={"headers": {"x-canary": "yes"}, "tenant": "acme"})])
    ours, theirs = (record(scene(*ready(pod("a")), request=request(tenant=name))) for name in ("acme", "other"))
    assert found.for_recorded(ours, "canary").name == "canary"
    assert found.for_recorded(ours, "plain").name == "plain"
    assert found.for_recorded(theirs, "canary").name == "plain"


def test_the_version_is_of_what_decides() -> None:
    """Another share is another version; a unused policy is none."""
    one = policy_set(DEFAULT, [named("canary", match={}, percent=5)])
    other = policy_set(DEFAULT, [named("canary", match={}, percent=6)])
    unused = policy_set(DEFAULT, [named("canary", match={}, percent=5), named("unused")])
    assert one.version != other.version
    assert one.version == unused.version
