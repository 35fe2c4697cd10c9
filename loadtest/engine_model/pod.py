"""One pod that computes tokens, step by step: the engine behind the mock HTTP servers.

`start_step` and `end_step` are separate, because a request may arrive or leave during a step. A pod has no clock: it
returns the duration of a step, and the caller waits.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from loadtest.engine_model.block_pool import BlockPool, PodBlockTable
from loadtest.engine_model.scheduler import Scheduler, SchedulerConfig, step_ms
from router.hashing import token_array
from router.types import KvEvent, PodLoad

RequestId: TypeAlias = str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPodConfig(SchedulerConfig):
    """One pod's hardware and scheduler limits; the defaults are vLLM's."""

    num_blocks: int = 4096
    block_size_tokens: int = 16
    new_pool: Callable[[int, int], BlockPool] = BlockPool
    """Makes the pool of this number of blocks, and of tokens in a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """A prompt and the answer that the model will give, both as tokens and not empty."""

    id: RequestId
    prompt: array[int]
    output: Sequence[int]
    adapter: str = ""
    salt: str = ""
    loaded_tokens: int = 0
    """Leading prompt tokens whose KV was transferred and needs no compute. The last token is always computed."""
    pinned: bool = False
    """Its blocks stay in use after its last token, until `detach` or `cancel`."""


@dataclass(frozen=True, slots=True)
class PodStep:
    """The results of one step.

    `emitted` requests got one token each. `started` maps those that got their first token to the prompt tokens found
    in the pod's own cache. `finished` requests got their last token.
    """

    duration_ms: float
    emitted: tuple[RequestId, ...]
    started: Mapping[RequestId, int]
    finished: tuple[RequestId, ...]
    events: tuple[KvEvent, ...]


@dataclass(slots=True)
class PodCounters:
    """Monotonic counters; prefix cache counts are in tokens, as in vLLM. A prompt counts at its first admission."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0


class _Sequence:
    """One request inside the pod. Its table grows by each token that it emits."""

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
        """0 after a preemption, which loses transferred KV as well."""
        return min(self.request.loaded_tokens, len(self.request.prompt) - 1) if self.cached_tokens is None else 0


class SimPod(Scheduler[_Sequence]):
    """One pod. Blocks become matchable when the step that computed them ends."""

    def __init__(self, config: SimPodConfig) -> None:
        super().__init__(config)
        self.config = config
        self.cache = config.new_pool(config.num_blocks, config.block_size_tokens)
        self.counters = PodCounters()
        self._sequences: dict[RequestId, _Sequence] = {}
        self._pinned: dict[RequestId, PodBlockTable] = {}
        self._chunks: list[tuple[_Sequence, int]] = []
        self._step_ms: float | None = None
        """Duration of the step that runs; None between steps."""

    @property
    def load(self) -> PodLoad:
        return PodLoad(running=len(self._admitted), waiting=len(self._waiting), kv_usage=self.cache.usage)

    def submit(self, request: SimRequest) -> None:
        """Queue a request. Raises `ValueError` if it cannot run even alone, or if its id is in use."""
        if request.id in self._sequences:
            raise ValueError(f"request {request.id} is already here")
        tokens = len(request.prompt) + len(request.output)
        if tokens > self.config.num_blocks * self.config.block_size_tokens:
            raise ValueError(f"request {request.id}: {tokens} tokens do not fit into the whole cache")
        sequence = _Sequence(request)
        self._sequences[request.id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: RequestId) -> bool:
        """Drop a request and free its blocks at once, even during a step. False if there is no such request."""
        pinned = self._pinned.pop(request_id, None)
        if pinned is not None:
            self.cache.release(pinned)
            return True
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence not in self._admitted:
            self._waiting.remove(sequence)
        self._leave(sequence)
        return True

    def detach(self, request_id: RequestId) -> PodBlockTable:
        """The blocks of a finished `pinned` request, for the caller to release. Raises `KeyError` without any."""
        return self._pinned.pop(request_id)

    def start_step(self) -> float | None:
        """Form the next step. Returns its duration in ms, or None if there is nothing to do."""
        if self._step_ms is not None:
            raise RuntimeError("the previous step has not ended")
        if not self._sequences:
            return None
        self._chunks = self._schedule()
        contexts = [(sequence.table.computed_tokens, tokens) for sequence, tokens in self._chunks]
        context_tokens = sum(sequence.table.computed_tokens for sequence in self._decoding)
        self._step_ms = step_ms(self.config.speed, len(self._decoding), context_tokens, contexts)
        return self._step_ms

    def end_step(self) -> PodStep:
        """Apply the results of the step. A request that was cancelled during it takes no part."""
        duration_ms, self._step_ms = self._step_ms, None
        if duration_ms is None:
            raise RuntimeError("no step is running")
        emitted = list(self._decoding)
        for sequence in emitted:
            self.cache.commit(sequence.table, sequence.table.computed_tokens + 1)
        started: dict[RequestId, int] = {}
        for sequence, tokens in self._chunks:
            if sequence not in self._prefilling:
                continue
            self.cache.commit(sequence.table, sequence.table.computed_tokens + tokens)
            if sequence.missing_tokens:
                continue
            del self._prefilling[sequence]
            self._decoding[sequence] = None
            emitted.append(sequence)
            if not sequence.emitted:
                started[sequence.request.id] = sequence.cached_tokens or 0
        self.counters.generation_tokens += len(emitted)
        return PodStep(
            duration_ms=duration_ms,
            emitted=tuple(sequence.request.id for sequence in emitted),
            started=started,
            finished=tuple(sequence.request.id for sequence in emitted if self._emit(sequence)),
            events=self.cache.take_events(),
        )

    def _emit(self, sequence: _Sequence) -> bool:
        """Add one token; True for the last one. A token's own KV is computed only if another one follows."""
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
        for jobs in (self._admitted, self._prefilling, self._decoding):
            jobs.pop(sequence, None)
        if pin:
            self._pinned[sequence.request.id] = sequence.table
        else:
            self.cache.release(sequence.table)

    # --- memory, for the scheduler ---

    def _reserve_decodes(self) -> bool:
        tables = [sequence.table for sequence in self._decoding]
        if sum(self.cache.missing_blocks(table, len(table.tokens)) for table in tables) > self.cache.free_blocks:
            return False
        return all(self.cache.grow(table, len(table.tokens)) for table in tables)

    def _reserve_chunk(self, job: _Sequence, tokens: int) -> bool:
        return self.cache.grow(job.table, job.table.computed_tokens + tokens)

    def _admit(self, job: _Sequence, budget_tokens: int) -> int | None:
        found = self.cache.match(job.table)
        cached_tokens = len(found) * self.config.block_size_tokens
        present_tokens = max(cached_tokens, job.loaded_tokens)
        tokens = min(len(job.table.tokens) - present_tokens, budget_tokens)
        if not self.cache.admit(job.table, found, present_tokens - cached_tokens + tokens):
            return None
        if present_tokens > cached_tokens:  # transferred KV is matchable from now on
            self.cache.commit(job.table, present_tokens)
        if job.cached_tokens is None:  # after a preemption, most hits are the request's own blocks
            job.cached_tokens = cached_tokens
            self.counters.prompt_tokens += len(job.request.prompt)
            self.counters.prefix_cache_hits += cached_tokens
            self.counters.external_prefix_cache_queries += len(job.request.prompt) - cached_tokens
            self.counters.external_prefix_cache_hits += present_tokens - cached_tokens
        return tokens

    def _drop(self, job: _Sequence) -> None:
        self.cache.release(job.table)
