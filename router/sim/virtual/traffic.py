"""What is asked of a fleet, when, and what do the prompts share?

Prompts are lists of block hashes and lengths, never text: two prompts share what their leading blocks say. This file
only holds values; `traces.py` reads them and `generate.py` makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.types import BlockHash


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """One prompt and the length of its answer, both at least 1 token.

    `blocks[i]` stands for the tokens of block i and everything before it. The first `prompt_blocks` are known as soon
    as the prompt is computed (the last of them may be cut short by its end); the rest are filled by the answer.
    `think_s` is the pause before it, after the answer to the one before.
    """

    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[BlockHash]
    prompt_blocks: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """Asks that follow one another, each after the answer to the last; a single one is an open-loop request."""

    start_s: float
    requests: tuple[TrafficRequest, ...]
    kind: str = "any"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sessions in the order of their start. `sessions` may be made as they are needed, but can be read only once then.

    `requests` is how many asks there are in all, or 0 while that is unknown.
    """

    block_size_tokens: int
    sessions: Iterable[Session]
    request_count: int = 0
    name: str = "traffic"
