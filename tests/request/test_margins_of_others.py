"""What a tenant chooses moves what others get of busy pods by less than 2 %."""

from __future__ import annotations

import pytest

from router.admission.tenant import Tenant
from tests.request.busy_pods import BusyPods, Kind

PREFILL_S, RUN_S, CLIENTS = 0.25, 40.0, 8
GOOD, OTHER = Kind("good"), Kind("other")
HURRIED = Kind("other", headers=((b"x-request-deadline-ms", b"700"),))


def served(*, is_slow: bool = False, is_hurried: bool = False) -> int:
    """How many requests of the good tenant are served when the answers of another one were slow, or while all its
    requests have deadlines that they miss."""
    busy = BusyPods(PREFILL_S)
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


@pytest.mark.parametrize("headers", [(), ((b"x-request-deadline-ms", b"1000"),)], ids=["own limit", "chosen limit"])
def test_only_limits_of_the_slo_teach_how_late_a_request_may_be(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    """A client could choose one to be missed."""
    busy = BusyPods(PREFILL_S)
    hurried, chat = Kind("t", headers=headers), {Kind("t"): 3}
    busy.run(1.0, chat)
    assert busy.known.core.queues is not None
    queue = busy.known.core.queues._queues["m"]
    before = queue.error_share.of("t")
    stays = [
        busy.front.receive(hurried.path, hurried.body(), Tenant(name="t"), headers=list(headers)) for _ in range(9)
    ]
    assert any(not one.is_over and not one.asked for one in stays)
    busy.now_s += 10.0
    busy.front.send_waiting()
    assert (queue.error_share.of("t") > before) == (not headers)


def test_the_answers_of_a_tenant_move_no_price_of_another() -> None:
    busy = BusyPods(PREFILL_S)
    for _ in range(500):
        busy.known.output_lengths.answered("m", 40, "good")
        busy.known.output_lengths.answered("m", 4000, "other")
    served = busy.front.receive(GOOD.path, GOOD.body(), Tenant(name="good"))
    assert served.context is not None and served.context.recorded is not None
    assert served.context.recorded.scene.expected_output_tokens == pytest.approx(40, abs=5)
