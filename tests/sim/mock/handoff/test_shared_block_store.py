"""The shared block store."""

from __future__ import annotations

from router.sim.mock.mock_config import SharedBlockStore


def test_only_leading_blocks_without_a_gap_are_found() -> None:
    """A block after a missing one is not usable."""
    store = SharedBlockStore()
    store.put([1, 2, 4])
    assert [store.leading_blocks(hashes) for hashes in ([1, 2, 3, 4], [2], [3], [])] == [2, 1, 0, 0]
