"""Which requests take part in a pod's next step, and how long does the step take?

Continuous batching as vLLM schedules it. A step has a budget of tokens: one for each decoding request, the rest for
chunks of prompts, first come first served. When memory runs out, the request admitted last is preempted and computes
its tokens again later. Both pod models use this scheduler; they differ in how they represent memory and tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from router.types import PodSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """One pod's speed and scheduler limits; the defaults are vLLM's."""

    speed: PodSpeed
    step_budget_tokens: int = 8192
    max_num_seqs: int = 256


def step_ms(speed: PodSpeed, decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
    """d0 + d1 decodes + d2 context tokens, plus c1 m + c2 ((ctx + m)^2 - ctx^2) for each chunk (ctx, m).

    A step without decodes has c0 as its fixed part, so a prompt alone in one step takes exactly `PodSpeed.prefill_ms`.
    A step with chunks takes at least the time of its launch. Source: docs/cost-model.md#a-step.
    """
    total_ms = speed.c0_ms + sum(speed.compute_ms(context, context + m) for context, m in chunks)
    if decodes:
        total_ms += speed.d0_ms - speed.c0_ms + speed.d1_ms_per_request * decodes
        total_ms += speed.d2_ms_per_context_token * context_tokens
    return max(total_ms, speed.least_ms(decodes + sum(m for _, m in chunks))) if chunks else total_ms


class ScheduledJob(Protocol):
    """A request on a pod, compared by identity."""

    @property
    def missing_tokens(self) -> int:
        """Known tokens that are not computed yet."""


JobT = TypeVar("JobT", bound=ScheduledJob)


class Scheduler(ABC, Generic[JobT]):
    """The queue and the running requests of one pod. A subclass owns their memory."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.preemptions = 0
        self._limits = config
        self._waiting: deque[JobT] = deque()
        self._admitted: dict[JobT, None] = {}
        """In order of admission."""
        self._prefilling: dict[JobT, None] = {}
        self._decoding: dict[JobT, None] = {}

    @abstractmethod
    def _reserve_decodes(self) -> bool:
        """Reserve memory for one token of each decoding job. False without enough memory for all."""

    @abstractmethod
    def _reserve_chunk(self, job: JobT, tokens: int) -> bool:
        """Reserve memory for the next `tokens` of a prompt. False without enough memory."""

    @abstractmethod
    def _admit(self, job: JobT, budget_tokens: int) -> int | None:
        """Start a job on its cached blocks. The tokens of its first chunk, 0 if it loads KV first; None without enough
        memory."""

    @abstractmethod
    def _drop(self, job: JobT) -> None:
        """Release everything that an admitted job holds."""

    def _schedule(self) -> list[tuple[JobT, int]]:
        """Form the next step: all decoding jobs and the returned chunks. A step that preempts admits no job."""
        preemptions = self.preemptions
        while not self._reserve_decodes():
            self._preempt_youngest()
        budget_tokens = self._limits.step_budget_tokens - len(self._decoding)
        chunks: list[tuple[JobT, int]] = []
        for job in list(self._prefilling):
            tokens = min(job.missing_tokens, budget_tokens)
            while job in self._prefilling and not self._reserve_chunk(job, tokens):
                self._preempt_youngest()
            if tokens and job in self._prefilling:
                chunks.append((job, tokens))
                budget_tokens -= tokens
        if self.preemptions == preemptions:
            self._admit_waiting(chunks, budget_tokens)
        return chunks

    def _admit_waiting(self, chunks: list[tuple[JobT, int]], budget_tokens: int) -> None:
        """Admit from the head of the queue while seats, budget and memory last. A job that loads KV takes no budget."""
        while self._waiting and budget_tokens > 0 and len(self._admitted) < self._limits.max_num_seqs:
            job = self._waiting[0]
            tokens = self._admit(job, budget_tokens)
            if tokens is None:
                return
            self._waiting.popleft()
            self._admitted[job] = None
            if tokens:
                self._prefilling[job] = None
                chunks.append((job, tokens))
                budget_tokens -= tokens

    def _preempt_youngest(self) -> None:
        """Return the job admitted last to the head of the queue."""
        job, _ = self._admitted.popitem()
        self._drop(job)
        self._prefilling.pop(job, None)
        self._decoding.pop(job, None)
        self._waiting.appendleft(job)
        self.preemptions += 1
