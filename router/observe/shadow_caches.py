"""What would caches hold under another placement?

Each alternative has shadow caches of its own: one for each pod, of its capacity, for the prompts that the alternative
would have sent there. Round robin takes the next ready pod. Least load takes the one with the fewest outstanding prompt
tokens of its own, because a long prompt is more work. There a request takes its real time, and the prefill of what that
pod holds less. Until it is scraped, a pod that has become idle counts as busy, as for the router; of idle ones each
prefix has its own. A third set, the control, follows the placement that was chosen: its cached share minus the real one
is the error of all three. While that is too large, as after a restart in front of full caches, alternatives count as
equally good.

All prefixes are followed while the caches have at most `MAX_ENTRIES` together, and few requests come. Else a
sample, half of them or a quarter and so on (after SHARDS: Waldspurger et al., FAST 2015): by a hash of the first blocks
behind the prefix that all traffic shares, in caches of half the size, of which that prefix takes half as much. The
error includes that of the sample: the real share is that of all requests.

A request adds references to a list; `follow` does the rest later.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice

from router.decision import Split
from router.hashing import HASH_BYTES, hash_array
from router.observe.declared import of_decisions
from router.observe.ended import Ended, RecordedDecision
from router.observe.metrics import Metrics
from router.policy.eligible import ready_pods
from router.policy.ring import rendezvous
from router.types import BlockHash, Pod, PodId, PodStatus, PromptPrefix

ENTRY_TOKENS = 256
"""What an entry of a shadow cache stands for. Where prompts part is known by the block."""
MAX_ENTRIES, MAX_ANSWERS = 250_000, 16_384
"""32 MiB at most: for pods with 21 million tokens of KV together."""
MAX_PROMPT_ENTRIES = 8192
MAX_PENDING = 16_384
MAX_SAMPLE = 1024
MAX_FOLLOWED_PER_S = 32
"""If more come, a sample is followed."""
UNUSED_REQUESTS = 10_000
"""A shadow cache that was not used for as many is that of a pod that is gone."""
FOLLOW_S, SLICE_ENTRIES = 0.5, 1024
"""Interval of `run`, and how much it does at once: about a millisecond."""
MAX_COMPARED_PODS = 32
CHOSEN, ROUND_ROBIN, LEAST_LOAD = "chosen", "round_robin", "least_load"
ALTERNATIVES = (ROUND_ROBIN, LEAST_LOAD)
PLACEMENTS = (CHOSEN, *ALTERNATIVES)
COUNTED = (
    of_decisions.PLACED_PROMPT_TOKENS,
    of_decisions.PLACED_CACHED_TOKENS,
    of_decisions.PREFILL_SAVED_S,
    of_decisions.PREFILL_SAVED_GPU_S,
)
WINDOW_REQUESTS = 512
MAX_ERROR = 0.03
"""Shadow caches are warm up to this error of the cached share."""


@dataclass(slots=True, eq=False)
class ShadowCache:
    """What one pod would hold: by the hash of the first block of an entry, a byte of each block in it. The entry used
    longest ago is the first, of a prompt the last. Ints and bytes only, which the garbage collector does not visit."""

    epoch: int
    gpus: int
    held: dict[BlockHash, bytes] = field(default_factory=dict)
    blocks: int = 0
    shared: set[BlockHash] = field(default_factory=set)
    last_request: int = 0

    def serve(self, prompt: Sequence[tuple[BlockHash, bytes]], shared: int, capacity: float, sample: int) -> int:
        """The leading blocks that it holds; then it holds the whole prompt, of which the first entries are `shared` by
        the traffic. `capacity` is in blocks; these count as 1 / `sample` there."""
        held, full, part, last = self.held, 0, 0, (b"", b"")
        for entry, marks in prompt:
            known = held.pop(entry, None)
            if known is None:
                break
            self.blocks -= len(known)
            full, part, last = full + part, len(marks), (known, marks)
        for entry, marks in reversed(prompt):
            held[entry] = marks
        self.blocks += (len(prompt) - 1) * len(prompt[0][1]) + len(prompt[-1][1])
        excess = self.blocks - capacity
        if sample > 1:
            self.shared.update([entry for entry, _ in prompt[:shared]])
            excess -= len(self.shared) * len(prompt[0][1]) * (1 - 1 / sample)
        if excess > 0:  # more at once: a dict finds its first key behind those that were deleted
            self.evict(excess + capacity / 32)
        return full + _equal_bytes(*last)

    def evict(self, blocks: float) -> None:
        evicted = []
        for entry, marks in self.held.items():
            if blocks <= 0:
                break
            evicted.append(entry)
            blocks -= len(marks)
            self.blocks -= len(marks)
        for entry in evicted:
            del self.held[entry]
        self.shared.difference_update(evicted)


def _equal_bytes(one: bytes, other: bytes) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass(slots=True)
class Outstanding:
    """The prompt tokens that least load has on one pod. A pod was last busy from `since_s` to `until_s`: while its last
    scrape is of that time, the router takes it for busy."""

    tokens: int = 0
    since_s: float = 0.0
    until_s: float = 0.0


@dataclass(slots=True)
class Watch:
    """The latest requests of a model. `real`: their number, prompt tokens and cached ones; `control`: both tokens of
    those that were followed, by shadow caches. `new`: what was not counted yet, as in `COUNTED`."""

    real: tuple[float, float, float] = (0.0, 0.0, 0.0)
    control: tuple[float, float] = (0.0, 0.0)
    new: dict[str, list[float]] = field(default_factory=lambda: {name: [0.0] * 4 for name in PLACEMENTS})

    def add(self, prompt_tokens: int, cached_tokens: int) -> None:
        requests, prompts, cached = self.real
        if requests >= WINDOW_REQUESTS:
            requests, prompts, cached = requests / 2, prompts / 2, cached / 2
            self.control = self.control[0] / 2, self.control[1] / 2
        self.real = requests + 1, prompts + prompt_tokens, cached + cached_tokens

    @property
    def error(self) -> float:
        """The cached share of the control minus the real one; 1 while either is not known."""
        (_, prompts, cached), (followed, held) = self.real, self.control
        return held / followed - cached / prompts if followed and prompts else 1.0


class ShadowCaches:
    """Follows the traffic. `gpus` returns the number of GPUs of a pod; `capacity_tokens` is assumed of pods that report
    none."""

    def __init__(
        self,
        metrics: Metrics,
        gpus: Callable[[Pod], int],
        capacity_tokens: int,
        max_entries: int = MAX_ENTRIES,
        max_followed_per_s: float = MAX_FOLLOWED_PER_S,
    ) -> None:
        self._limits = max_entries, max_followed_per_s
        self.sample = 1
        """One of as many prefixes is followed."""
        self.watches: defaultdict[str, Watch] = defaultdict(Watch)
        self._metrics = metrics
        self._gpus = gpus
        self._capacity_tokens = capacity_tokens
        self._pending: list[tuple[RecordedDecision | None, Ended | None, Sequence[BlockHash]]] = []
        self._caches: dict[tuple[str, PodId], ShadowCache] = {}
        self._placed: dict[str, tuple[Pod, Pod, int]] = {}
        """By request in flight, the pods of the alternatives, and its tokens."""
        self._outstanding: defaultdict[PodId, Outstanding] = defaultdict(Outstanding)
        self._ends: list[tuple[float, PodId, int]] = []
        """A heap of requests that have ended: when they would have under least load, on which pod, and their tokens."""
        self._answers: dict[BlockHash, int] = {}
        """By the last block of a prompt, its blocks with those of its answer."""
        self._requests = 0
        self._followed_per_s = 0.0

    @property
    def entries(self) -> int:
        return sum(len(cache.held) for cache in self._caches.values())

    def decided(self, kept: RecordedDecision) -> None:
        key = kept.scene.key
        if key and key % self.sample == 0 and len(self._pending) < MAX_PENDING:
            self._pending.append((kept, None, ()))

    def ended(self, ended: Ended, prompt: PromptPrefix | None) -> None:
        kept = ended.decision
        if kept is None and ended.fallback:
            self._pending.append((None, ended, ()))
        if kept is None or not kept.scene.key:
            return
        if ended.result == "ok" and ended.served is not None:
            self.watches[ended.model].add(ended.prompt_tokens, cached_tokens_of(ended))
        if kept.scene.key % self.sample == 0:
            self._pending.append((kept, ended, prompt.hashes if prompt else ()))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            for _ in self.follow():
                await asyncio.sleep(0)

    def follow(self) -> Iterator[None]:
        """All that is pending, in parts of about a millisecond. Then it counts."""
        pending, self._pending, done, before = self._pending, [], 0, self._requests
        for kept, ended, hashes in pending:
            if ended is None and kept is not None:
                self._place(kept)
            done += 8 + (self._end(kept, ended, hashes) if ended is not None else 0)
            if done > SLICE_ENTRIES:
                done = 0
                yield
        self._followed_per_s += ((self._requests - before) / FOLLOW_S - self._followed_per_s) / 4
        if pending:
            yield from self._bound()
            self._count()

    def _place(self, kept: RecordedDecision) -> None:
        """A request that waits is decided several times, and placed once."""
        facts = kept.scene
        found = ready_pods(facts.fleet, facts.adapter or facts.model)
        pods = found.prefill if isinstance(kept.candidates[0].plan, Split) or not found.direct else found.direct
        if pods and facts.request_id not in self._placed:
            self._end_until(facts.now_s)
            least, tokens = self._least_loaded(pods, facts.key), facts.prompt_tokens or 1
            on_pod = self._outstanding[least.id]
            if not on_pod.tokens:
                on_pod.since_s = facts.now_s
            on_pod.tokens += tokens
            self._placed[facts.request_id] = pods[facts.turn % len(pods)].pod, least, tokens

    def _end_until(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            until_s, pod, tokens = heappop(self._ends)
            on_pod = self._outstanding[pod]
            on_pod.tokens -= tokens
            on_pod.until_s = until_s

    def _least_loaded(self, pods: Sequence[PodStatus], key: int) -> Pod:
        """An idle pod that its last scrape shows as busy comes after other idle ones."""
        compared = [pods[(key + at) % len(pods)] for at in range(min(len(pods), MAX_COMPARED_PODS))]
        on_pods = [self._outstanding[status.pod.id] for status in compared]
        loads = [
            load.tokens or load.since_s <= status.load.scraped_at_s < load.until_s
            for load, status in zip(on_pods, compared, strict=True)
        ]
        least = min(loads)
        equal = [status.pod for load, status in zip(loads, compared, strict=True) if load == least]
        return max(equal, key=lambda pod: rendezvous(key, pod.id))

    def _end(self, kept: RecordedDecision | None, ended: Ended, hashes: Sequence[BlockHash]) -> int:
        """Returns the number of entries of its prompt. `kept`: None where no pod served it in the end."""
        in_turn, least, tokens = self._placed.pop(ended.id, (None, None, 0))
        if in_turn is None or least is None:
            return 0
        if kept is None:
            self._outstanding[least.id].tokens -= tokens
            return 0
        facts, served = kept.scene, ended.served
        until_s = facts.now_s + ended.at_s - kept.at_s + ended.e2e_ms / 1000
        self._requests += 1
        if ended.result != "ok" or served is None or not facts.prompt_tokens or not hashes:
            heappush(self._ends, (until_s, least.id, tokens))
            return 0
        chosen = served.plan.prefill if isinstance(served.plan, Split) else served.plan.pod
        block, watch = facts.block_size_tokens, self.watches[ended.model]
        stride = max(ENTRY_TOKENS // block, 1)
        blocks = hash_array(hashes[: MAX_PROMPT_ENTRIES * stride])
        marks = blocks.tobytes()[::HASH_BYTES]
        prompt = [(entry, marks[at * stride : (at + 1) * stride]) for at, entry in enumerate(blocks[::stride])]
        limit, shared = (facts.prompt_tokens - 1) // block, facts.shared_blocks // stride

        for placement, pod in ((CHOSEN, chosen), (ROUND_ROBIN, in_turn), (LEAST_LOAD, least)):
            cache = self._cache(placement, pod)
            capacity = (pod.capacity_tokens or self._capacity_tokens) / (block * self.sample)
            held = cache.serve(prompt, shared, capacity, self.sample)
            if held:  # what follows the end of another prompt repeats its answer
                held = max(held, self._answers.get(blocks[held - 1], 0))
            cached_tokens = min(held, limit) * block
            if placement is CHOSEN:
                watch.control = watch.control[0] + facts.prompt_tokens, watch.control[1] + cached_tokens
                cached_tokens = cached_tokens_of(ended)
            new, saved_s = watch.new[placement], pod.speed.compute_ms(0, cached_tokens) / 1000
            new[0] += facts.prompt_tokens
            new[1] += cached_tokens
            new[2] += saved_s
            new[3] += saved_s * cache.gpus
        late_ms = max(least.speed.compute_ms(cached_tokens, cached_tokens_of(ended)), 0.0)  # those of least load, real
        heappush(self._ends, (until_s + late_ms / 1000, least.id, tokens))
        self._answers[blocks[-1]] = (facts.prompt_tokens + (ended.output_tokens or 1) - 1) // block
        return len(prompt)

    def _cache(self, placement: str, pod: Pod) -> ShadowCache:
        """That of the pod in its present epoch."""
        found = self._caches.get((placement, pod.id))
        if found is None or found.epoch != pod.epoch:
            found = self._caches[placement, pod.id] = ShadowCache(pod.epoch, self._gpus(pod))
        found.last_request = self._requests
        return found

    def _bound(self) -> Iterator[None]:
        """Forget the caches of pods that are gone. If that does not suffice, follow half of the prefixes."""
        for old in list(islice(self._answers, max(len(self._answers) - MAX_ANSWERS, 0))):
            del self._answers[old]
        most, most_per_s = self._limits
        if self.entries > most:
            used = self._requests - UNUSED_REQUESTS
            self._caches = {at: one for at, one in self._caches.items() if one.last_request > used}
        while self.entries > most or self._followed_per_s > most_per_s:
            self.sample, self._followed_per_s = min(self.sample * 2, MAX_SAMPLE), self._followed_per_s / 2
            for kept in (self.watches, self._pending, self._placed, self._outstanding, self._ends):
                kept.clear()
            for cache in self._caches.values() if self.entries > most else ():
                cache.evict((cache.blocks + 1) / 2)
                yield

    def _count(self) -> None:
        """Add what is new to the metrics, for the requests that were not followed, too."""
        for model, watch in self.watches.items():
            self._metrics[of_decisions.PLACED_ERROR].labels(model).set(watch.error)
            scale = watch.real[1] / max(watch.control[0], 1.0) if self.sample > 1 else 1.0
            for placement in PLACEMENTS:
                source = placement if abs(watch.error) <= MAX_ERROR else CHOSEN
                for declared, value in zip(COUNTED, watch.new[source], strict=True):
                    self._metrics[declared].labels(model, placement).inc(value * scale)
            watch.new = {name: [0.0] * 4 for name in PLACEMENTS}


def cached_tokens_of(ended: Ended) -> int:
    """What the engine reported, else what was expected; 0 if it was not served."""
    expected = ended.served.cached_tokens if ended.served else 0
    return min(expected if ended.cached_tokens is None else ended.cached_tokens, ended.prompt_tokens)
