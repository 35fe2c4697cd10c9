"""One simulated pod on the virtual clock. Prompts are lengths and block hashes, not tokens.

It skips over steps that only decode: `n` steps of a batch of `b` requests with `S` tokens of context take

    n (d0 + d1 b + d2 S) + d2 b n (n - 1) / 2

so a pod costs a few operations a request instead of one a token. The caller calls `advance` at `wake_ms`; a pod has no
clock. Source of the step times: docs/simulator.md#a-pod.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from loadtest.engine_model.block_cache import BlockCache, TierCache
from loadtest.engine_model.scheduler import Scheduler, SchedulerConfig, step_ms
from loadtest.simulator.traffic import TrafficRequest
from loadtest.simulator.virtual_job import Job, Progress, StepRun
from router.types import BlockChange, BlockHash, LayerType, PodLoad, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualPodConfig(SchedulerConfig):
    """One pod's hardware and scheduler limits; the defaults are vLLM's. `cpu_kv_tokens`: 0 for no CPU tier.
    `kv_groups`: see `layered_pod.py`; none if all layers have full attention."""

    kv_tokens: int
    cpu_kv_tokens: int = 0
    engine_block_tokens: int = 16
    kv_groups: tuple[LayerType, ...] = ()


class VirtualPod(Scheduler[Job]):
    """One pod. Blocks become matchable when the step that computed them ends."""

    def __init__(self, config: VirtualPodConfig, block_size_tokens: int) -> None:
        super().__init__(config)
        self.config = config
        self.cache = BlockCache(config.kv_tokens)
        self.cpu = TierCache(config.cpu_kv_tokens) if config.cpu_kv_tokens else None
        self.tier, self.tier_gets_answers = Tier.CPU, True
        """What `cpu` is: its own tier, or a store that it shares with other pods."""
        self.computed_tokens = 0
        self.busy_ms = 0.0
        self._block = block_size_tokens
        self._loading: set[Job] = set()
        """Admitted jobs that wait for KV from the CPU tier."""
        self._finishing: list[tuple[int, int, Job]] = []
        self._ids = count()
        self._context_tokens = 0
        self._steps = 0
        self._run: StepRun | None = None
        self._unread: list[Job] = []
        """Jobs whose first token is computed but not read yet: see `_read_first_tokens`."""
        self._progress = Progress()

    @property
    def load(self) -> PodLoad:
        waiting = len(self._waiting) + len(self._loading)
        return PodLoad(len(self._admitted) - len(self._loading), waiting, self.cache.usage)

    @property
    def wake_ms(self) -> float:
        """When `advance` is due; infinite while there is nothing to do."""
        run = self._run
        return run.start_ms + run.duration_ms(run.steps) if run else math.inf

    def step_began_ms(self, now_ms: float) -> float:
        """When the current step started; minus infinity without one."""
        run = self._run
        return run.start_ms + run.duration_ms(run.steps_until(now_ms) - 1) if run else -math.inf

    def backlog_ms(self) -> float:
        """Prefill time ahead of a new prompt. The cache hits of waiting jobs are unknown, so these count in full."""
        speed, total_ms = self.config.speed, 0.0
        for job in (*self._prefilling, *self._waiting):
            total_ms += speed.prefill_ms(job.known_tokens, max(job.computed_tokens, job.arrived_tokens))
        return total_ms

    def share(self, store: TierCache, *, gets_answers: bool) -> None:
        """Write to a store and read from it, as if it were the pod's own tier."""
        self.cpu, self.tier, self.tier_gets_answers = store, Tier.REMOTE, gets_answers

    def held_tokens(self, request: TrafficRequest) -> int:
        """Tokens of a prompt that the pod's own memory holds now."""
        found = self._cached_blocks(request.prompt_hashes, request.prompt_tokens)
        return self._usable(found, request.prompt_tokens)

    def held_blocks(self) -> list[BlockChange]:
        """All matchable blocks, as if they had just been stored."""
        held = [BlockChange(Tier.GPU, True, list(self.cache.blocks))]
        return held if self.cpu is None else [*held, BlockChange(Tier.CPU, True, list(self.cpu.blocks))]

    def submit(self, job: Job, now_ms: float) -> None:
        """Queue a job. Raises `ValueError` if it cannot run even alone."""
        tokens = self._needed_tokens(job.request)
        if tokens > self.config.kv_tokens:
            raise ValueError(f"{tokens} tokens do not fit into the whole cache")
        self._waiting.append(job)
        self._end_after_current_step(now_ms)

    def answered(self, now_ms: float) -> Iterator[tuple[Job, int]]:
        """All jobs, and the tokens of their answers so far."""
        ended = self._run.steps_until(now_ms) - 1 if self._run else 0
        for job in (*self._admitted, *self._waiting):
            yield job, job.emitted + (self._steps - job.joined_step + ended if job in self._decoding else 0)

    def end_early(self, job: Job, now_ms: float) -> None:
        """Let a job that decodes end with the current step, as if its answer had that length."""
        if job in self._decoding:
            self._end_after_current_step(now_ms)
            job.finish_step = self._steps + (self._run.steps if self._run else 1)
            job.request = replace(job.request, output_tokens=job.emitted + job.finish_step - job.joined_step)
            heapq.heappush(self._finishing, (job.finish_step, next(self._ids), job))

    def finish_load(self, job: Job, now_ms: float) -> None:
        if job in self._loading:
            self._loading.remove(job)
            self._prefilling[job] = None
            self._commit_prompt(job, job.computed_tokens)
            self._end_after_current_step(now_ms)

    def advance(self, now_ms: float) -> Progress:
        """End the steps that are due and start the next ones. Returns what happened since the last call."""
        ended = self._run
        if ended is not None and now_ms >= self.wake_ms:
            self._end_run()
        if self._run is None:
            chunks = self._schedule()
            if chunks or self._decoding:
                self._run = self._next_run(now_ms, chunks)
            if ended is not None:
                self._read_first_tokens(ended)
        self._record_evicted()
        progress, self._progress = self._progress, Progress()
        return progress

    def _read_first_tokens(self, ended: StepRun) -> None:
        """vLLM launches the next step before it reads the tokens of the `ended` one. If both take as long as their
        launch, first tokens are read when the next step ends."""
        read, self._unread = self._unread, []
        launches_ms = self.config.speed.launch_ms, self.config.speed.replay_ms
        if self._run and all(run.chunks and run.first_ms in launches_ms for run in (ended, self._run)):
            self._unread = [job for job in self._progress.started if job in self._decoding]
        self._progress.started = [*read, *(job for job in self._progress.started if job not in self._unread)]

    def _end_after_current_step(self, now_ms: float) -> None:
        """A new job may join: the current step is the last of its run."""
        run = self._run
        if run is not None and run.steps > 1:
            run.steps = run.steps_until(now_ms)

    # --- the end of a run ---

    def _end_run(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        batch = len(self._decoding)
        self._steps += run.steps
        self._context_tokens += batch * run.steps
        self.cache.allocate(batch * run.steps)
        self.busy_ms += run.duration_ms(run.steps)
        while self._finishing and self._finishing[0][0] <= self._steps:
            finish_step, _, job = heapq.heappop(self._finishing)
            if job in self._decoding and job.finish_step == finish_step:
                self._finish(job)
        for job, tokens in run.chunks:
            if job in self._prefilling:  # not preempted since
                self._end_chunk(job, tokens)

    def _end_chunk(self, job: Job, tokens: int) -> None:
        job.computed_tokens += tokens
        self.computed_tokens += tokens
        self._commit_prompt(job, job.computed_tokens)
        if job.computed_tokens < job.known_tokens:
            return
        if not job.emitted:
            self._progress.started.append(job)
        job.emitted += 1
        del self._prefilling[job]
        self._decoding[job] = None
        job.joined_step = self._steps
        job.finish_step = self._steps + job.request.output_tokens - job.emitted
        self._context_tokens += job.computed_tokens
        if job.finish_step == self._steps:
            self._finish(job)
        else:
            heapq.heappush(self._finishing, (job.finish_step, next(self._ids), job))

    def _finish(self, job: Job) -> None:
        job.emitted = job.request.output_tokens
        self._leave_decoding(job)
        self._commit_answer(job)
        self._release(job)
        del self._admitted[job]
        self._progress.finished.append(job)

    def _leave_decoding(self, job: Job) -> None:
        steps = self._steps - job.joined_step
        del self._decoding[job]
        self._context_tokens -= job.computed_tokens + steps
        job.private_tokens += steps
        job.computed_tokens += steps

    def _commit_prompt(self, job: Job, computed_tokens: int) -> None:
        request, block = job.request, job.pinned_blocks
        stored: list[tuple[BlockHash, int]] = []
        while block < request.prompt_blocks and job.block_end(block, self._block) <= computed_tokens:
            stored.append((request.blocks[block], job.block_end(block, self._block) - block * self._block))
            block += 1
        self._commit(job, stored)

    def _commit_answer(self, job: Job) -> None:
        """Make the blocks that the answer filled matchable. Its last token was never computed."""
        request = job.request
        if job.pinned_blocks < request.prompt_blocks:
            return
        full = min((request.prompt_tokens + request.output_tokens - 1) // self._block, len(request.blocks))
        answer = [(block, self._block) for block in request.blocks[request.prompt_blocks : full]]
        self._commit(job, answer, write=self.tier_gets_answers)

    def _commit(self, job: Job, stored: list[tuple[BlockHash, int]], *, write: bool = True) -> None:
        new: list[BlockHash] = []
        for block, tokens in stored:
            job.private_tokens -= tokens
            if self.cache.commit(block, tokens):
                new.append(block)
        job.pinned_blocks += len(stored)
        self._record_change(Tier.GPU, True, new)
        if write:
            self._write_through(stored)

    def _release(self, job: Job) -> None:
        self.cache.release(job.request.blocks[: job.pinned_blocks])
        self.cache.free(job.private_tokens)
        job.pinned_blocks = job.private_tokens = job.computed_tokens = 0

    # --- other layers than those of full attention: none ---

    def _cached_blocks(self, prompt: Sequence[BlockHash], known_tokens: int) -> int:
        return self.cache.leading_blocks(prompt)

    def _needed_tokens(self, request: TrafficRequest) -> int:
        """Memory that the request needs at once."""
        return request.prompt_tokens + request.output_tokens

    def _reserve_layers(self, job: Job, found: int, computed: int, tokens: int) -> tuple[Sequence[BlockHash], int]:
        """What an admitted job needs there: blocks, and private tokens."""
        return (), 0

    # --- the next run ---

    def _next_run(self, now_ms: float, chunks: list[tuple[Job, int]]) -> StepRun:
        speed, batch = self.config.speed, len(self._decoding)
        contexts = [(job.computed_tokens, tokens) for job, tokens in chunks]
        first_ms = step_ms(speed, batch, self._context_tokens, contexts)
        steps = 1 if chunks else self._decode_steps(batch)
        return StepRun(now_ms, steps, first_ms, speed.d2_ms_per_context_token * batch, chunks)

    def _decode_steps(self, batch: int) -> int:
        """Steps until the next request finishes, or until memory runs out."""
        while True:
            finish_step, _, job = self._finishing[0]
            if job in self._decoding and job.finish_step == finish_step:
                break
            heapq.heappop(self._finishing)
        return max(min(finish_step - self._steps, self.cache.available_tokens // batch), 1)

    # --- memory, for the scheduler ---

    def _reserve_decodes(self) -> bool:
        return self.cache.available_tokens >= len(self._decoding)

    def _reserve_chunk(self, job: Job, tokens: int) -> bool:
        if self.cache.available_tokens - len(self._decoding) < tokens:
            return False
        self.cache.allocate(tokens)
        job.private_tokens += tokens
        return True

    def _admit(self, job: Job, budget_tokens: int) -> int | None:
        prompt = job.request.prompt_hashes
        found = self._cached_blocks(prompt, job.known_tokens)
        held = job.block_end(found - 1, self._block) if found else 0
        usable = max(self._usable(found, job.known_tokens), min(job.arrived_tokens, job.known_tokens - 1))
        with_cpu = self._usable_with_cpu_tier(job, found)
        tokens = 0 if with_cpu > usable else min(job.known_tokens - usable, budget_tokens)
        computed = max(usable, with_cpu)
        private = max(computed + tokens - held, tokens)
        more, more_private = self._reserve_layers(job, found, computed, tokens)
        pinned = (*prompt[:found], *more)
        free = self.cache.free_tokens_of(pinned)
        if self.cache.available_tokens - free - len(self._decoding) < private + more_private:
            return None
        self.cache.pin(pinned)
        self.cache.allocate(private + more_private)
        job.pinned_blocks, job.private_tokens, job.computed_tokens = found, private, computed
        if job.cached_tokens is None:
            job.cached_tokens = computed
        if not tokens:
            self._loading.add(job)
            self._progress.loading.append((job, with_cpu - usable))
        elif usable > held:
            self._commit_prompt(job, usable)
        return tokens

    def _usable_with_cpu_tier(self, job: Job, found: int) -> int:
        """Usable tokens of the found blocks and the CPU tier's blocks after them; 0 if the tier has none."""
        if self.cpu is None:
            return 0
        prompt = job.request.blocks[found : job.request.prompt_blocks]
        more = self.cpu.leading_blocks(prompt)
        self.cpu.touch(prompt[:more])
        return self._usable(found + more, job.known_tokens) if more else 0

    def _usable(self, blocks: int, tokens: int) -> int:
        """Whole engine blocks only, and never the last token, which must be computed to produce the next one."""
        size = self.config.engine_block_tokens
        return min(blocks * self._block, tokens - 1) // size * size

    def _drop(self, job: Job) -> None:
        if job in self._decoding:
            job.emitted += self._steps - job.joined_step
            self._leave_decoding(job)
        self._loading.discard(job)
        self._release(job)
        job.arrived_tokens = 0

    # --- block changes ---

    def _record_change(self, tier: Tier, held: bool, blocks: list[BlockHash], layer: int = 0) -> None:
        """Record a change after the evictions that made room for it."""
        self._record_evicted()
        if blocks:
            self._progress.block_changes.append(BlockChange(tier, held, blocks, layer))

    def _record_evicted(self) -> None:
        if evicted := self.cache.take_evicted():
            self._progress.block_changes.append(BlockChange(Tier.GPU, False, evicted))

    def _write_through(self, stored: list[tuple[BlockHash, int]]) -> None:
        if self.cpu is None:
            return
        new: dict[BlockHash, None] = {}
        removed: list[BlockHash] = []
        for block, tokens in stored:
            is_new, evicted = self.cpu.put(block, tokens)
            if is_new:
                new[block] = None
            removed += [old for old in evicted if old not in new]
            for old in evicted:
                new.pop(old, None)  # written and evicted at once: not published
        self._record_change(self.tier, False, removed)
        self._record_change(self.tier, True, list(new))
