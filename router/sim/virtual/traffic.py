"""Traffic as values: sessions of requests, as block hashes and lengths.

Two prompts share the prefix that their leading block hashes have in common; there is no text. `traces.py` reads
recorded traffic and `generate.py` generates it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.types import BlockHash


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """One prompt and the length of its answer, both at least 1 token.

    `blocks[i]` is the hash of block i and everything before it. The first `prompt_blocks` belong to the prompt, whose
    end may cut the last of them short; the answer fills the rest. `think_s` is the pause since the previous answer.
    """

    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[BlockHash]
    prompt_blocks: int
    think_s: float = 0.0

    @property
    def prompt_hashes(self) -> Sequence[BlockHash]:
        """The blocks of the prompt."""
        return self.blocks[: self.prompt_blocks]


class IdealCache:
    """One cache for all pods that never evicts: the upper bound of reuse."""

    def __init__(self, block_size_tokens: int) -> None:
        self._block = block_size_tokens
        self._known: set[BlockHash] = set()

    def serve(self, request: TrafficRequest) -> int:
        """Returns the cached prompt tokens, then adds the request's computed blocks."""
        blocks, prompt_blocks = request.blocks, request.prompt_blocks
        found = next((at for at in range(prompt_blocks) if blocks[at] not in self._known), prompt_blocks)
        full = (request.prompt_tokens + request.output_tokens - 1) // self._block
        self._known.update(blocks[: max(prompt_blocks, full)])
        return min(found * self._block, request.prompt_tokens - 1)


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow one another, each after the previous answer. One request alone is open-loop traffic."""

    start_s: float
    requests: tuple[TrafficRequest, ...]
    kind: str = "any"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sessions in the order of their start. `sessions` may be a generator, which can be read only once.

    `request_count` is the number of all requests, or 0 if it is unknown.
    """

    block_size_tokens: int
    sessions: Iterable[Session]
    request_count: int = 0
    name: str = "traffic"
