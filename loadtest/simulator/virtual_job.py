"""A request on a virtual pod, and the steps that it takes part in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from loadtest.simulator.traffic import TrafficRequest
from router.types import BlockChange


@dataclass(slots=True, eq=False)
class Job:
    """One request on one pod. `tag` belongs to the caller; KV of `arrived_tokens` was transferred with the request.

    `cached_tokens` is what the first admission found, in the cache or transferred.
    """

    tag: Any
    request: TrafficRequest
    arrived_tokens: int = 0
    cached_tokens: int | None = None
    emitted: int = 0
    computed_tokens: int = 0
    pinned_blocks: int = 0
    private_tokens: int = 0
    joined_step: int = 0
    finish_step: int = 0

    @property
    def known_tokens(self) -> int:
        return self.request.prompt_tokens + self.emitted

    @property
    def missing_tokens(self) -> int:
        return self.request.prompt_tokens + self.emitted - self.computed_tokens

    def block_end(self, block: int, block_size_tokens: int) -> int:
        """The first token after that block of the prompt."""
        return min((block + 1) * block_size_tokens, self.request.prompt_tokens)


@dataclass(slots=True)
class StepRun:
    """Consecutive steps of the same requests. The first takes `first_ms`, each further one `growth_ms` more than the
    previous one. A run with chunks has one step."""

    start_ms: float
    steps: int
    first_ms: float
    growth_ms: float
    chunks: list[tuple[Job, int]]

    def duration_ms(self, steps: int) -> float:
        return steps * self.first_ms + self.growth_ms * steps * (steps - 1) / 2

    def steps_until(self, now_ms: float) -> int:
        """The steps that have started by `now_ms`: at least one."""
        elapsed_ms, half = now_ms - self.start_ms, self.growth_ms / 2
        if half:
            slope = self.first_ms - half
            steps = math.ceil((math.sqrt(slope * slope + 4 * half * elapsed_ms) - slope) / (2 * half))
        else:
            steps = math.ceil(elapsed_ms / self.first_ms)
        return min(max(steps, 1), self.steps)


@dataclass(slots=True)
class Progress:
    """What happened on a pod since the last call of `advance`."""

    started: list[Job] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)
    loading: list[tuple[Job, int]] = field(default_factory=list)
    """Jobs, and the tokens that they load from the CPU tier or a store. The caller calls `finish_load` after the
    transfer."""
    block_changes: list[BlockChange] = field(default_factory=list)
    """In order."""
