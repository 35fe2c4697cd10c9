"""Random routing."""

from __future__ import annotations

from router.types import InFlight
from tests.sim.peers.fleets import BLOCKS, IDLE, decided, fleet


def test_neither_load_nor_cache_changes_the_choice() -> None:
    """A retry continues with the next pod."""
    plain = [c.pod.id for c in decided(fleet(dict.fromkeys("abcd", IDLE)), "random").candidates]
    loaded = fleet({**dict.fromkeys("abcd", IDLE), plain[0]: InFlight(requests=99)}, {plain[2]: BLOCKS})
    assert [c.pod.id for c in decided(loaded, "random").candidates] == plain
    assert "".join(plain) in "abcdabcd"
