"""What a tenant chooses moves what others get of busy pods by less than 2 %."""

from __future__ import annotations

import pytest

from router.config.schema import AdmissionConfig, SloConfig
from tests.request.busy_pods import BusyPods, Kind

ADMISSION = AdmissionConfig(slo=SloConfig(ttft_ms=2000.0, tpot_ms=100.0))
PREFILL_S, RUN_S, CLIENTS = 0.25, 40.0, 8
GOOD, OTHER = Kind("good"), Kind("other")
HURRIED = Kind("other", headers=((b"x-request-deadline-ms", b"700"),))


def served(*, is_slow: bool = False, is_hurried: bool = False) -> int:
    """How many requests of the good tenant are served when the answers of another one were slow, or while all its
    requests have deadlines that they miss."""
    busy = BusyPods(ADMISSION, PREFILL_S)
    busy.run(1.0, {GOOD: 1})
    assert busy.known.core.queues is not None
    queue = busy.known.core.queues._queues["m"]
    for _ in range(1000):
        queue.answered("good", False, 1.0)
        queue.answered("other", is_slow, 1000.0 if is_slow else 1.0)
    return busy.run(RUN_S, {GOOD: CLIENTS, HURRIED if is_hurried else OTHER: CLIENTS})["good"]


@pytest.mark.parametrize("attack", ["is_slow", "is_hurried"])
def test_a_tenant_that_tries_moves_the_goodput_of_another_by_less_than_two_percent(attack: str) -> None:
    """Or gives it more, because it wastes its own share."""
    usual = served()
    assert usual > 100
    assert served(**{attack: True}) > 0.98 * usual
