"""Each filter keeps the pods that it says, by their facts and their last load."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from router.types import PodLoad, PodState, PodStatus
from tests.policy.scenes import pod, policy

FLEET = (
    PodStatus(pod("a1", hardware="h100x1", zone="eu", rack="r1"), PodState.READY, PodLoad(waiting=9, kv_usage=0.99)),
    PodStatus(pod("a2", hardware="h100x1", zone="us", rack="r1"), PodState.READY, PodLoad(waiting=8, kv_usage=0.95)),
    PodStatus(pod("b1", hardware="a100x1", zone="us", rack="r2"), PodState.READY),
)


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
def test_a_filter_leaves_out_whom_it_says(name: str, said: dict[str, Any], stay: set[str]) -> None:
    """Each by the facts and the load of the pods, its bounds included."""
    ((_, one),) = policy("queue", filters={name: said}).filters
    assert {status.pod.id for status in FLEET if one.keeps(status)} == stay


@pytest.mark.parametrize(
    "said", [{"topology": {}}, {"hardware": {}}, {"pods": {}}, {"max_kv_usage": {"share": 2}}, {"max_waiting": None}]
)
def test_a_filter_that_says_nothing_or_nonsense_is_refused(said: dict[str, Any]) -> None:
    """At once, not when a request comes."""
    with pytest.raises(ValidationError):
        policy("queue", filters=said)
