"""The store that engines share."""

from __future__ import annotations

from router.sim.mock.mock_config import SharedBlockStore


def test_only_what_leads_without_a_gap_is_found() -> None:
    """A block behind one that is missing is of no use."""
    store = SharedBlockStore()
    store.put([1, 2, 4])
    assert [store.leading_blocks(hashes) for hashes in ([1, 2, 3, 4], [2], [3], [])] == [2, 1, 0, 0]
