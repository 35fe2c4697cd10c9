"""Transfers share the bandwidth of their places, and no byte is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulator.link_sharing import MAX_TRANSFERS, LinkEnd, LinkSharing

Start = tuple[float, float, tuple[LinkEnd, ...]]
"""When, how many bytes, through what."""
BANDWIDTHS: dict[LinkEnd, float] = {"a": 10.0, "b": 40.0}


def ends(starts: Sequence[Start], t0_ms: float = 0.0) -> list[float]:
    """When each transfer ends; drives `LinkSharing` as `World` does."""
    links, found = LinkSharing(BANDWIDTHS), [math.nan] * len(starts)
    due = sorted(enumerate(starts), key=lambda one: one[1][0])
    while due or links.next_ms < math.inf:
        if due and due[0][1][0] <= links.next_ms:
            number, (now_ms, kv_bytes, places) = due.pop(0)
            links.start(number, places, kv_bytes, t0_ms, now_ms)
            continue
        now_ms = links.next_ms
        for number in links.advance(now_ms):
            found[number] = now_ms
    assert all(links.transfers_through(place) == 0 for place in BANDWIDTHS)
    return found


def test_one_transfer_takes_its_setup_time_and_then_its_bytes() -> None:
    """t0 + bytes / bandwidth."""
    assert ends([(7.0, 50.0, ("a",))], t0_ms=3.0) == [7 + 3 + 5]


@pytest.mark.parametrize("transfers", [2, 5])
def test_concurrent_transfers_take_as_long_as_all_their_bytes(transfers: int) -> None:
    """They share equally, so they end together."""
    assert ends([(0.0, 50.0, ("a",))] * transfers) == pytest.approx([transfers * 5.0] * transfers)


def test_a_transfer_through_two_places_has_the_rate_of_the_more_crowded_one() -> None:
    """A wide place with eight others is slower than a narrow one alone: 40 / 9 against 10."""
    crowd: list[Start] = [(0.0, 400.0, ("b",))] * 8
    alone, *_ = ends([(0.0, 40.0, ("a", "b"))])
    among, *_ = ends([(0.0, 40.0, ("a", "b")), *crowd])
    assert [alone, among] == pytest.approx([40 / 10, 40 / (40 / 9)])


def test_a_transfer_gets_faster_when_another_ends() -> None:
    """10 + 30 bytes: the short one ends at 2, with 20 left for the other."""
    assert ends([(0.0, 10.0, ("a",)), (0.0, 30.0, ("a",))]) == pytest.approx([2.0, 4.0])


def test_a_setup_time_uses_no_bandwidth() -> None:
    """Another transfer has the full bandwidth meanwhile."""
    links = LinkSharing(BANDWIDTHS)
    links.start("first", ("a",), 50.0, 0.0, 0.0)
    links.start("second", ("a",), 50.0, 4.9, 0.0)
    assert links.advance(4.8) == []
    assert links.transfers_through("a") == 1
    assert links.next_ms == pytest.approx(4.9)
    assert links.advance(5.2) == ["first"]


starts = st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 200)), min_size=1, max_size=10)


@given(starts)
def test_a_place_neither_loses_bytes_nor_idles(transfers: list[tuple[float, float]]) -> None:
    """The last transfer ends when a queue of all those bytes is processed, in any order."""
    found = ends([(at_ms, kv_bytes, ("a",)) for at_ms, kv_bytes in transfers])
    free_ms = 0.0
    for at_ms, kv_bytes in sorted(transfers):
        free_ms = max(free_ms, at_ms) + kv_bytes / BANDWIDTHS["a"]
    assert max(found) == pytest.approx(free_ms)


routes = st.sampled_from([("a",), ("b",), ("a", "b")])


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 200), routes), min_size=1, max_size=10))
def test_no_transfer_is_faster_than_its_places_allow(transfers: list[Start]) -> None:
    """Neither one alone nor all of a place together, and every transfer ends."""
    found = ends(transfers)
    for end_ms, (at_ms, kv_bytes, places) in zip(found, transfers, strict=True):
        assert end_ms >= at_ms + kv_bytes / min(BANDWIDTHS[place] for place in places) - 1e-6
    for place, bandwidth in BANDWIDTHS.items():
        through = [
            (end_ms, transfer) for end_ms, transfer in zip(found, transfers, strict=True) if place in transfer[2]
        ]
        if through:
            first_ms = min(transfer[0] for _, transfer in through)
            total_bytes = sum(transfer[1] for _, transfer in through)
            assert max(end_ms for end_ms, _ in through) >= first_ms + total_bytes / bandwidth - 1e-6


def test_a_place_limits_its_transfers_and_queues_the_rest() -> None:
    """Nothing is lost, and all together they take as long as their bytes."""
    many = 3 * MAX_TRANSFERS
    links = LinkSharing({"card": 2.0})
    for number in range(many):
        links.start(number, ("card",), 10.0, 0.0, 0.0)
    ended: list[int] = []
    while links.next_ms < math.inf:
        now_ms = links.next_ms
        ended += links.advance(now_ms)
        assert links.transfers_through("card") <= MAX_TRANSFERS
    assert ended == list(range(many))
    assert now_ms == pytest.approx(many * 10.0 / 2.0)
