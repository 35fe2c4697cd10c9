"""Which pods a decision is about."""

from __future__ import annotations

import pytest

from router.request.decisions import having
from router.types import FleetSnapshot, PodState, PodStatus, Role
from tests.kit.scenes import MODEL, pod

LACKING = PodStatus(pod("lacking", lacks=frozenset({"/v1/messages"})), PodState.READY)
NEEDED = frozenset({"/v1/messages"})


@pytest.mark.parametrize(
    ("other", "pods"),
    [
        (PodStatus(pod("other"), PodState.READY), ["other"]),
        (PodStatus(pod("other"), PodState.EJECTED), ["other"]),
        (PodStatus(pod("other"), PodState.JOINING), ["lacking", "other"]),
        (PodStatus(pod("other", role=Role.PREFILL), PodState.READY), ["lacking", "other"]),
        (PodStatus(pod("other", models=("another",)), PodState.READY), ["lacking", "other"]),
    ],
    ids=["ready", "ejected", "not asked yet", "prefill", "another model"],
)
def test_pods_that_lack_what_is_needed_are_left_out_while_others_have_it(other: PodStatus, pods: list[str]) -> None:
    """An ejected pod comes back soon, so its clients should retry; else they get the answer of one that lacks it."""
    fleet = FleetSnapshot(1, (LACKING, other))
    assert [status.pod.id for status in having(fleet, MODEL, NEEDED).pods] == pods
