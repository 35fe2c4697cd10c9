"""How long does one pod take for each step, and what comes out of it?

Continuous batching as vLLM schedules it: every step has a budget of tokens, spent first on the requests that run (one
token each where they decode), then on waiting prompts, first come first served, in chunks. A step is started and ended
by two calls, because a request may arrive or leave while it runs. There is no clock here: the step says how long it
takes, the driver lets that time pass.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from router.hashing import token_array
from router.sim.block_pool import BlockPool, PodBlockTable
from router.types import KvEvent, PodLoad, PodSpeed

RequestId: TypeAlias = str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPodConfig:
    """One pod's hardware and scheduler limits; the defaults are vLLM's."""

    speed: PodSpeed
    num_blocks: int = 4096
    block_size_tokens: int = 16
    step_budget_tokens: int = 8192
    max_num_seqs: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """A prompt and the answer that the model will give to it, both as tokens and neither empty."""

    id: RequestId
    prompt: array[int]
    output: Sequence[int]
    adapter: str = ""
    salt: str = ""
    loaded_tokens: int = 0
    """Leading prompt tokens whose KV came from elsewhere and needs no compute; the last one always does."""
    garbled: bool = False
    """That KV is not of this prompt."""
    pinned: bool = False
    """Its blocks stay in use after its last token, until somebody takes them over by `detach`, or `cancel`."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did. `emitted` got one token each; `started` those of them whose first token it was, with the
    prompt tokens found in the pod's own cache; `garbled` those of these whose KV is not of their prompt; `finished`
    those whose last token it was."""

    duration_ms: float
    emitted: tuple[RequestId, ...]
    started: Mapping[RequestId, int]
    finished: tuple[RequestId, ...]
    preempted: tuple[RequestId, ...]
    events: tuple[KvEvent, ...]
    garbled: frozenset[RequestId] = frozenset()


@dataclass(slots=True)
class PodCounters:
    """What only ever grows; prefix cache figures are in tokens, as vLLM's are."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    preemptions: int = 0


def step_ms(speed: PodSpeed, decode_contexts: Sequence[int], chunks: Sequence[tuple[int, int]]) -> float:
    """d0 + d1 batch + d2 sum(ctx) for the decodes, plus c1 m + c2 ((ctx + m)^2 - ctx^2) for each chunk (ctx, m).

    A step without decodes has c0 for its fixed part, so that a prompt alone in one step takes exactly
    `PodSpeed.prefill_ms`. Source: reference/simulator.md 5.2.
    """
    fixed = speed.c0_ms
    if decode_contexts:
        fixed = speed.d0_ms + speed.d1_ms_per_request * len(decode_contexts)
        fixed += speed.d2_ms_per_context_token * sum(decode_contexts)
    return fixed + sum(speed.prefill_ms(context + m, context) - speed.c0_ms for context, m in chunks)


class _Sequence:
    """One request inside the pod: its table grows by a token for each that it emits."""

    __slots__ = ("cached_tokens", "emitted", "request", "table")

    def __init__(self, request: SimRequest) -> None:
        self.request = request
        self.table = PodBlockTable(token_array(request.prompt), request.adapter, request.salt)
        self.emitted = 0
        self.cached_tokens: int | None = None

    @property
    def missing_tokens(self) -> int:
        return len(self.table.tokens) - self.table.computed_tokens

    @property
    def loaded_tokens(self) -> int:
        """A preempted request has lost what came from elsewhere, too."""
        return min(self.request.loaded_tokens, len(self.request.prompt) - 1) if self.cached_tokens is None else 0

    @property
    def decoding(self) -> bool:
        return self.emitted > 0 and self.missing_tokens == 1


@dataclass(slots=True)
class _Batch:
    """A step under way."""

    chunks: dict[RequestId, tuple[_Sequence, int]] = field(default_factory=dict)
    preempted: list[RequestId] = field(default_factory=list)
    duration_ms: float = 0.0


class SimPod:
    """One pod. Blocks become matchable when a step that computed them ends, not when it starts."""

    def __init__(self, config: SimPodConfig) -> None:
        self.config = config
        self.cache = BlockPool(config.num_blocks, config.block_size_tokens)
        self.counters = PodCounters()
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._sequences: dict[RequestId, _Sequence] = {}
        self._pinned: dict[RequestId, PodBlockTable] = {}
        self._batch: _Batch | None = None

    @property
    def load(self) -> PodLoad:
        """What the pod would say of itself now."""
        return PodLoad(running=len(self._running), waiting=len(self._waiting), kv_usage=self.cache.usage)

    def submit(self, request: SimRequest) -> None:
        """Queue a request. `ValueError` where it could not even run alone, or its id is taken."""
        if request.id in self._sequences:
            raise ValueError(f"request {request.id} is already here")
        tokens = len(request.prompt) + len(request.output)
        if tokens > self.config.num_blocks * self.config.block_size_tokens:
            raise ValueError(f"request {request.id}: {tokens} tokens do not fit into the whole cache")
        sequence = _Sequence(request)
        self._sequences[request.id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: RequestId) -> bool:
        """Drop a request and free its blocks at once, even in mid-step. False where it is not here."""
        pinned = self._pinned.pop(request_id, None)
        if pinned is not None:
            self.cache.release(pinned)
            return True
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self._leave(sequence)
        return True

    def detach(self, request_id: RequestId) -> PodBlockTable:
        """The blocks of a finished `pinned` request, now the caller's to release. `KeyError` where there are none."""
        return self._pinned.pop(request_id)

    def step(self) -> Step | None:
        """One whole step, for drivers to which nothing happens while it runs. None when there is nothing to do."""
        return None if self.start_step() is None else self.end_step()

    def start_step(self) -> float | None:
        """Form the next batch; how many milliseconds it takes, or None when there is nothing to do."""
        if self._batch is not None:
            raise RuntimeError("the last step has not ended")
        if not self._sequences:
            return None
        batch = _Batch()
        budget_tokens = self._schedule_running(batch, self.config.step_budget_tokens)
        if not batch.preempted:
            self._schedule_waiting(batch, budget_tokens)
        batch.duration_ms = self._duration_ms(batch)
        self._batch = batch
        return batch.duration_ms

    def end_step(self) -> Step:
        """The batch is computed. Whoever was cancelled meanwhile has no part in it."""
        batch, self._batch = self._batch, None
        if batch is None:
            raise RuntimeError("no step is under way")
        emitted: list[RequestId] = []
        started: dict[RequestId, int] = {}
        garbled: set[RequestId] = set()
        finished: list[RequestId] = []
        for request_id, (sequence, tokens) in batch.chunks.items():
            if self._sequences.get(request_id) is not sequence:
                continue
            self.cache.commit(sequence.table, sequence.table.computed_tokens + tokens)
            if sequence.missing_tokens:
                continue
            emitted.append(request_id)
            if not sequence.emitted:
                started[request_id] = sequence.cached_tokens or 0
                if sequence.table.garbled:
                    garbled.add(request_id)
            if self._emit(sequence):
                finished.append(request_id)
        self.counters.generation_tokens += len(emitted)
        return Step(
            duration_ms=batch.duration_ms,
            emitted=tuple(emitted),
            started=started,
            finished=tuple(finished),
            preempted=tuple(batch.preempted),
            events=self.cache.take_events(),
            garbled=frozenset(garbled),
        )

    def _schedule_running(self, batch: _Batch, budget_tokens: int) -> int:
        """Room and tokens for those that run, oldest first; the youngest give way when the pool is empty."""
        at = 0
        while at < len(self._running) and budget_tokens:
            sequence = self._running[at]
            tokens = min(sequence.missing_tokens, budget_tokens)
            while not self.cache.grow(sequence.table, sequence.table.computed_tokens + tokens):
                if self._preempt_youngest(batch) is sequence:
                    return budget_tokens
            batch.chunks[sequence.request.id] = (sequence, tokens)
            budget_tokens -= tokens
            at += 1
        return budget_tokens

    def _schedule_waiting(self, batch: _Batch, budget_tokens: int) -> None:
        """Admit from the head of the queue while seats, budget and blocks last; nobody overtakes."""
        while self._waiting and budget_tokens and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            found = self.cache.match(sequence.table)
            cached_tokens = len(found) * self.config.block_size_tokens
            present_tokens = max(cached_tokens, sequence.loaded_tokens)
            tokens = min(len(sequence.table.tokens) - present_tokens, budget_tokens)
            if not self.cache.admit(sequence.table, found, present_tokens - cached_tokens + tokens):
                return
            self._running.append(self._waiting.popleft())
            self._put_loaded(sequence, present_tokens)
            self._count_admission(sequence, cached_tokens, present_tokens)
            batch.chunks[sequence.request.id] = (sequence, tokens)
            budget_tokens -= tokens

    def _put_loaded(self, sequence: _Sequence, present_tokens: int) -> None:
        """What came from elsewhere is matchable from now on, right or wrong."""
        if present_tokens > sequence.table.computed_tokens:
            sequence.table.garbled |= sequence.request.garbled
            self.cache.commit(sequence.table, present_tokens)

    def _count_admission(self, sequence: _Sequence, cached_tokens: int, present_tokens: int) -> None:
        """Only the first admission counts: what a preempted request finds again is mostly its own."""
        if sequence.cached_tokens is not None:
            return
        sequence.cached_tokens = cached_tokens
        self.counters.prompt_tokens += len(sequence.request.prompt)
        self.counters.prefix_cache_queries += len(sequence.request.prompt)
        self.counters.prefix_cache_hits += cached_tokens
        self.counters.external_prefix_cache_queries += len(sequence.request.prompt) - cached_tokens
        self.counters.external_prefix_cache_hits += present_tokens - cached_tokens

    def _preempt_youngest(self, batch: _Batch) -> _Sequence:
        """Send the last admitted request back to the head of the queue; it will compute its tokens again."""
        sequence = self._running.pop()
        self.cache.release(sequence.table)
        self._waiting.appendleft(sequence)
        batch.preempted.append(sequence.request.id)
        self.counters.preemptions += 1
        return sequence

    def _duration_ms(self, batch: _Batch) -> float:
        decode_contexts: list[int] = []
        chunks: list[tuple[int, int]] = []
        for sequence, tokens in batch.chunks.values():
            if sequence.decoding:
                decode_contexts.append(sequence.table.computed_tokens)
            else:
                chunks.append((sequence.table.computed_tokens, tokens))
        return step_ms(self.config.speed, decode_contexts, chunks)

    def _emit(self, sequence: _Sequence) -> bool:
        """One more token; True when it was the last. Its own KV is computed only if a further one follows."""
        output = sequence.request.output
        token = output[sequence.emitted]
        sequence.emitted += 1
        if sequence.emitted == len(output):
            self._leave(sequence, pin=sequence.request.pinned)
            return True
        sequence.table.tokens.append(token)
        return False

    def _leave(self, sequence: _Sequence, *, pin: bool = False) -> None:
        del self._sequences[sequence.request.id]
        if sequence in self._running:
            self._running.remove(sequence)
        if pin:
            self._pinned[sequence.request.id] = sequence.table
        else:
            self.cache.release(sequence.table)
