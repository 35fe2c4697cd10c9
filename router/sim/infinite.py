"""How much could be reused if nothing were ever evicted and every pod shared one cache?

The upper bound against which policies are measured. Pure; a request finds everything of the requests before it.
"""

from __future__ import annotations

from array import array

from router.hashing import hash_blocks
from router.types import BlockHash


class InfiniteCache:
    """Block hashes of everything ever computed."""

    def __init__(self, block_size_tokens: int = 16) -> None:
        self._block_size_tokens = block_size_tokens
        self._held: set[BlockHash] = set()

    def serve(self, prompt: array[int], output: array[int]) -> int:
        """How many prompt tokens need no compute: whole blocks, never the last token. Afterwards the prompt and all
        of the output but its last token, which is never computed, are held, too."""
        hashes = hash_blocks(prompt + output[:-1], self._block_size_tokens, 0)
        usable = max(len(prompt) - 1, 0) // self._block_size_tokens
        found = next((at for at, block in enumerate(hashes[:usable]) if block not in self._held), usable)
        self._held.update(hashes)
        return found * self._block_size_tokens
