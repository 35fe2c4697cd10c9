"""Faults occur in order, as often as they were armed."""

from __future__ import annotations

import msgspec
import pytest

from loadtest.mock_engine.faults import REQUEST_FAULTS, Fault, FaultBoard, FaultKind

STATUS = Fault(kind=FaultKind.STATUS, count=2)
HANG = Fault(kind=FaultKind.HANG)
SICK = Fault(kind=FaultKind.UNHEALTHY, count=None)


def test_a_fault_occurs_as_often_as_armed() -> None:
    """Oldest first; after its last count the next fault follows."""
    board = FaultBoard()
    board.arm(STATUS)
    board.arm(HANG)
    assert [board.take(*REQUEST_FAULTS) for _ in range(4)] == [STATUS, STATUS, HANG, None]


def test_a_fault_occurs_only_where_its_kind_applies() -> None:
    """A health check does not use up the fault of a request, or vice versa."""
    board = FaultBoard()
    board.arm(SICK)
    board.arm(HANG)
    assert board.take(*REQUEST_FAULTS) == HANG
    assert board.take(FaultKind.UNHEALTHY) == SICK


def test_a_fault_without_a_count_occurs_until_cleared() -> None:
    """`count: null` has no limit."""
    board = FaultBoard()
    board.arm(SICK)
    assert [board.take(FaultKind.UNHEALTHY) for _ in range(5)] == [SICK] * 5
    board.clear()
    assert board.take(FaultKind.UNHEALTHY) is None


@pytest.mark.parametrize(
    "body", [b'{"kind":"hang","cuont":2}', b'{"kind":"explode"}', b'{"kind":"status","status":999}']
)
def test_a_misspelt_fault_is_an_error(body: bytes) -> None:
    """Unknown keys, kinds and statuses are rejected."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=Fault)
