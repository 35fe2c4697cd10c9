"""What were the hits of prefix caches worth?

A hit of p tokens saves its pod `c1 p + c2 p^2` milliseconds of prefill, by the coefficients learnt for that pod. What
round robin would have saved is the mean of the same over the pods that could have computed the prompt, with the blocks
that each held when the request was decided. Both are estimates: of the latest requests of each model, per prompt token,
times the prompt tokens that were served since the last estimate. So nothing is computed for a request, and nothing
while nobody asks. Under round robin the caches themselves would hold other blocks, usually more copies of fewer
prefixes: its estimate is too high rather than too low.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping

from router.decision import Split
from router.errors import RouterError
from router.observe.declared import of_decisions, of_requests
from router.observe.metrics import Metrics
from router.observe.receipts import RecordedDecision
from router.observe.recent_decisions import RecentDecisions
from router.policy.eligible import eligible
from router.types import Pod, PodState, Role

SAMPLE, SAMPLE_HOLDERS = 128, 1000
"""The latest ended requests of which an estimate is made: fewer where pods hold much of the same."""
SLICE_HOLDERS = 100
CHOSEN, ROUND_ROBIN = "chosen", "round_robin"

Saved = tuple[float, float]
"""Milliseconds of pods, and of their GPUs."""
_NOTHING: Saved = (0.0, 0.0)
_OTHERS = {True: Role.DECODE, False: Role.PREFILL}
"""The role of pods that do not compute prompts of splits, or of other requests."""


class HitWorth:
    """Adds the estimates to the metrics. `gpus` returns the number of GPUs of a pod."""

    def __init__(self, recent: RecentDecisions, metrics: Metrics, gpus: Callable[[Pod], int]) -> None:
        self._recent = recent
        self._metrics = metrics
        self._gpus = gpus
        self._counted: dict[str, float] = {}
        """By model, the prompt tokens that estimates include."""

    async def observe(self) -> None:
        """Count what hits have saved since the last call."""
        tokens, saved = await self._sampled()
        for model, served_tokens in self._served_tokens().items():
            if not tokens.get(model):
                continue
            share = max(served_tokens - self._counted.get(model, 0.0), 0.0) / tokens[model] / 1000
            self._counted[model] = max(served_tokens, self._counted.get(model, 0.0))
            for placement in (CHOSEN, ROUND_ROBIN):
                pod_ms, gpu_ms = map(sum, zip(*saved[model, placement], strict=True))
                self._metrics[of_decisions.PREFILL_SAVED_S].labels(model, placement).inc(pod_ms * share)
                self._metrics[of_decisions.PREFILL_SAVED_GPU_S].labels(model, placement).inc(gpu_ms * share)

    def _served_tokens(self) -> dict[str, float]:
        found: dict[str, float] = {}
        at = of_requests.PROMPT_TOKENS.labels.index("model")
        for labels, (value, *_) in self._metrics.by_class.tokens.prompt.series().items():
            found[labels[at]] = found.get(labels[at], 0.0) + value
        return found

    async def _sampled(self) -> tuple[Mapping[str, int], Mapping[tuple[str, str], list[Saved]]]:
        """Prompt tokens of the latest requests by model, and what was saved by model and placement."""
        tokens: dict[str, int] = {}
        saved: defaultdict[tuple[str, str], list[Saved]] = defaultdict(list)
        holders = 0
        for kept in self._recent.ended(SAMPLE):
            if holders > SAMPLE_HOLDERS:
                break
            found = saved_by(kept, self._gpus)
            if found is not None and kept.outcome is not None:
                model = kept.outcome.model
                tokens[model] = tokens.get(model, 0) + kept.outcome.prompt_tokens
                for placement, one in zip((CHOSEN, ROUND_ROBIN), found, strict=True):
                    saved[model, placement].append(one)
            before, holders = holders, holders + 1 + len(kept.scene.match)
            if before // SLICE_HOLDERS != holders // SLICE_HOLDERS:
                await asyncio.sleep(0)
        return tokens, saved


def saved_by(kept: RecordedDecision, gpus: Callable[[Pod], int]) -> tuple[Saved, Saved] | None:
    """What the hit of one ended request saved, and what round robin would have. None if its prompt is unknown, or it
    was not served. O(holders), and O(pods) once for each snapshot of the fleet."""
    ended, facts = kept.outcome, kept.scene
    if ended is None or ended.served is None or ended.result != "ok" or not facts.prompt_tokens:
        return None
    plan = ended.served.plan
    pod = plan.prefill if isinstance(plan, Split) else plan.pod
    cached = ended.served.cached_tokens if ended.cached_tokens is None else ended.cached_tokens
    try:
        found = eligible(facts.scene(), facts.prompt_tokens)
    except RouterError:
        return None
    is_split = isinstance(plan, Split) or not found.direct
    count, elsewhere = max(len(found.prefill if is_split else found.direct), 1), [_NOTHING]
    for holder, blocks in facts.match.items():
        other = facts.fleet.find(holder)
        if other is not None and other.state is PodState.READY and other.pod.role is not _OTHERS[is_split]:
            held_tokens = min(sum(blocks) * facts.block_size_tokens, facts.prompt_tokens)
            elsewhere.append(_saved(other.pod, held_tokens, gpus))
    pod_ms, gpu_ms = map(sum, zip(*elsewhere, strict=True))
    return _saved(pod, min(cached, facts.prompt_tokens), gpus), (pod_ms / count, gpu_ms / count)


def _saved(pod: Pod, cached_tokens: int, gpus: Callable[[Pod], int]) -> Saved:
    ms = pod.speed.compute_ms(0, cached_tokens)
    return ms, ms * gpus(pod)
