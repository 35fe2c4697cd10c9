"""Switches are spent in order, as often as they were armed for."""

from __future__ import annotations

import msgspec
import pytest

from router.sim.mock.faults import REQUEST_FAULTS, Fault, FaultBoard, FaultKind

STATUS = Fault(kind=FaultKind.STATUS, count=2)
HANG = Fault(kind=FaultKind.HANG)
SICK = Fault(kind=FaultKind.UNHEALTHY, count=None)


def test_a_fault_strikes_as_often_as_it_was_armed_for() -> None:
    """Oldest first; after the last count the next one has its turn."""
    board = FaultBoard()
    board.arm(STATUS)
    board.arm(HANG)
    assert [board.take(REQUEST_FAULTS) for _ in range(4)] == [STATUS, STATUS, HANG, None]


def test_a_fault_strikes_only_where_its_kind_applies() -> None:
    """A sick health check does not spend the fault of a request, nor the other way round."""
    board = FaultBoard()
    board.arm(SICK)
    board.arm(HANG)
    assert board.take(REQUEST_FAULTS) == HANG
    assert board.take(frozenset({FaultKind.UNHEALTHY})) == SICK


def test_without_a_count_a_fault_strikes_until_cleared() -> None:
    """`count: null` never runs out."""
    board = FaultBoard()
    board.arm(SICK)
    assert [board.take(frozenset({FaultKind.UNHEALTHY})) for _ in range(5)] == [SICK] * 5
    board.clear()
    assert board.take(frozenset({FaultKind.UNHEALTHY})) is None


@pytest.mark.parametrize(
    "body", [b'{"kind":"hang","cuont":2}', b'{"kind":"explode"}', b'{"kind":"status","status":999}']
)
def test_a_misspelt_fault_is_an_error(body: bytes) -> None:
    """Unknown keys, kinds and statuses do not pass silently."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=Fault)
