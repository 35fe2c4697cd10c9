"""Which blocks lie in the store that engines share?

Stands for a pool such as Mooncake's or LMCache's: whatever an engine has computed is in it, for good. This file never
counts time: a reader does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.types import BlockHash


class SharedBlockStore:
    """A set of blocks without a limit, for the engines of one process."""

    def __init__(self) -> None:
        self._held: set[BlockHash] = set()

    def put(self, hashes: Iterable[BlockHash]) -> None:
        """These blocks are here from now on."""
        self._held.update(hashes)

    def leading_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """How many of these blocks are here before the first that is not."""
        return next((at for at, block_hash in enumerate(hashes) if block_hash not in self._held), len(hashes))
