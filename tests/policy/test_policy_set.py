"""Which of several policies decides."""

from __future__ import annotations

from typing import Any

from router.policy.policy_set import PolicySet, policy_set
from router.policy.spec import Policy
from tests.policy.scenes import policy, request


def named(name: str, **facts: Any) -> Policy:
    return policy("queue", name=name, **facts)


DEFAULT = named("plain")


def chosen(among: PolicySet, workload: str = "", **facts: Any) -> str:
    return among.for_request(request(**facts), workload).name


def test_alone_the_default_decides_everything() -> None:
    """Also what no other could match."""
    assert chosen(PolicySet(DEFAULT), tenant="acme") == "plain"


def test_a_policy_without_a_match_is_known_and_not_in_force() -> None:
    """It can still be a shadow."""
    found = policy_set(DEFAULT, [DEFAULT, named("spare")])
    assert found.active == (DEFAULT,)
    assert set(found.library) == {"plain", "spare"}


def test_the_narrowest_that_matches_decides() -> None:
    """More conditions first; whatever the order of the files."""
    wide, narrow = named("a_wide", match={"tenant": "acme"}), named("z", match={"tenant": "acme", "class": "rag"})
    found = policy_set(DEFAULT, [wide, narrow])
    assert chosen(found, "rag", tenant="acme") == "z"
    assert chosen(found, "chat", tenant="acme") == "a_wide"
    assert chosen(found, "rag", tenant="other") == "plain"


def test_a_canary_is_asked_before_what_it_is_to_replace() -> None:
    """Of equal conditions the smaller share first: nothing is decided by both or by none."""
    stable, canary = named("a_stable", match={"stream": True}), named("b_canary", match={"stream": True}, percent=20)
    found = policy_set(DEFAULT, [stable, canary])
    names = [chosen(found, name=f"r{number}", stream=True) for number in range(1000)]
    assert set(names) == {"a_stable", "b_canary"}
    assert 140 < names.count("b_canary") < 260


def test_the_version_is_of_what_decides() -> None:
    """Another share is another version; a spare policy is none."""
    one = policy_set(DEFAULT, [named("canary", match={}, percent=5)])
    other = policy_set(DEFAULT, [named("canary", match={}, percent=6)])
    spare = policy_set(DEFAULT, [named("canary", match={}, percent=5), named("spare")])
    assert one.version != other.version
    assert one.version == spare.version
