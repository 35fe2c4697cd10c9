"""Builds the placements of a request that are priced.

One on every pod that may serve it, and a second one with a pull if a peer holds more of the prompt and can send it.
This module computes no cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from msgspec.structs import replace

from router.apis.openai import ASKED_USAGE
from router.policy.eligible import SNAPSHOTS
from router.policy.ring import tie_key
from router.policy.standing import Standing, idle_standing, standings
from router.policy.term import Costs, Placement, RequestFacts, Transfer, read_ms, tokens_to_encode
from router.types import (
    BlocksByTier,
    Endpoint,
    FleetSnapshot,
    InferenceRequest,
    InFlight,
    Pod,
    PodId,
    PodState,
    PodStatus,
    PrefixTrust,
    Scene,
    UsageShown,
)

BYTES_PER_TOKEN = 4
"""Assumed for a body that was not tokenized: a common estimate for English."""
MAX_UNREAD_TOKENS = 256 * 1024
"""Assumed at most: a longer body has pictures in base64 rather than text, or is refused by the engine."""
FORM_BYTES_PER_TOKEN = 320
"""Assumed for a form: a second of audio has 16 kB (128 kbit/s), and 50 tokens in Whisper's encoder."""
MAX_PULLING = 6
"""Maximum number of pods priced with a pull: those with the shortest queues, since all pull about the same."""
_IDLE = InFlight()
_NOTHING: BlocksByTier = (0, 0, 0, 0)


def prompt_token_count(scene: Scene) -> int:
    """Length of the prompt in tokens: those of its pictures estimated, and all from the body if they are unknown."""
    prompt = scene.prompt
    return len(prompt.tokens) + prompt.media_tokens if prompt else unread_tokens(scene.request)


def unread_tokens(request: InferenceRequest) -> int:
    """Assumed length in tokens of a prompt that was not tokenized."""
    if request.endpoint is Endpoint.DETOKENIZE:
        return 0
    body, added = request.body, ASKED_USAGE if request.usage is UsageShown.NONE else b""
    is_form = body.startswith(b"--")
    return min((len(body) - len(added)) // (FORM_BYTES_PER_TOKEN if is_form else BYTES_PER_TOKEN), MAX_UNREAD_TOKENS)


def expected_cached_tokens(scene: Scene, pod: Pod) -> int:
    """Prompt tokens that the pod's engine should report as cached.

    Whole engine blocks only, and never the whole prompt: engines compute at least its last token. Zero until the pod's
    parity test has passed.
    """
    held = scene.match.blocks.get(pod.id)
    if held is None:
        return 0
    prompt = scene.prompt
    if prompt is None or not pod.reads_alike(scene.request.endpoint):
        return 0
    return _usable_tokens(held, pod, len(prompt.tokens), prompt.block_size_tokens)


def _usable_tokens(held: BlocksByTier, pod: Pod, prompt_tokens: int, block_tokens: int) -> int:
    usable_tokens = sum(held) * block_tokens
    if usable_tokens >= prompt_tokens:
        usable_tokens = max(prompt_tokens - 1, 0)
    return usable_tokens - usable_tokens % (pod.block_size_tokens or block_tokens)


class Planner:
    """Builds the placements of one scene's request."""

    def __init__(self, scene: Scene, prompt_tokens: int) -> None:
        self.scene = scene
        self.prompt_tokens = prompt_tokens
        self._block = scene.prompt.block_size_tokens if scene.prompt else 1
        self._weight: float | None = None
        shared_tokens = scene.shared_blocks * self._block if scene.prompt else 0
        self._request = RequestFacts(
            scene=scene,
            prompt_tokens=prompt_tokens,
            output_tokens=scene.expected_output_tokens,
            now_s=scene.now_s,
            links=scene.fleet.links,
            shared_tokens=min(shared_tokens, max(prompt_tokens - 1, 0)),
        )

    def placements(self, statuses: Iterable[PodStatus]) -> list[Placement]:
        """One on each pod, with the blocks that it holds itself."""
        scene, block, request, n = self.scene, self._block, self._request, self.prompt_tokens
        now_s, endpoint = scene.now_s, scene.request.endpoint
        holders = scene.match.blocks if scene.prompt else {}
        found: list[Placement] = []
        for standing in standings(statuses, scene.inflight, scene.steps):
            pod = standing.status.pod
            speed, p, by_tier = pod.speed, 0, _NOTHING
            if (held := holders.get(pod.id)) and pod.reads_alike(endpoint):
                p = _usable_tokens(held, pod, n, block)
                by_tier = _by_tier(held, p, block)
            rest_ms = standing.step_ms - (now_s - standing.step_began_s) * 1000
            behind_ms = standing.behind_ms
            found.append(
                Placement(
                    request=request,
                    pod=pod,
                    standing=standing,
                    work_ahead_ms=rest_ms + behind_ms if rest_ms > 0 else behind_ms,
                    # As `PodSpeed.compute_ms`, without a call.
                    compute_ms=speed.c1_ms_per_token * (n - p) + speed.c2_ms_per_token2 * (n * n - p * p),
                    cached_tokens=p,
                    own_tokens=p,
                    held_tokens=by_tier,
                )
            )
        return found

    def pulling(self, placements: Sequence[Placement]) -> list[Placement]:
        """The same with a pull from the best holder, on the pods with the least work for which a pull is faster than
        computing."""
        holder = self._best_holder()
        if holder is None:
            return []
        sender, tokens = holder
        limit = min(MAX_PULLING, (len(placements) + 1) // 2)
        lacking = sorted([at for at in placements if tokens > at.own_tokens], key=_outstanding_ms)[:limit]
        return [found for at in lacking if (found := self._pulled(at, sender, tokens))]

    def receiving(self, prefill: Placement, decode: Placement) -> Placement | None:
        """The decode side of a split, with the handoff from its prefill side; None if the KV cannot be transferred."""
        prompt_tokens = self.prompt_tokens
        prefill_ms = prefill.pod.speed.prefill_ms(prompt_tokens, prefill.cached_tokens)
        # The decode pod takes what a store has from the prefill pod, or reads it there: both are a transfer.
        moved_tokens = prompt_tokens - decode.own_tokens + decode.held_tokens[3]
        handoff = self._transfer(prefill.pod, decode.pod, moved_tokens, prefill_ms)
        if handoff is None:
            return None
        compute_ms = decode.pod.speed.compute_ms(prompt_tokens - 1, prompt_tokens)
        return replace(decode, cached_tokens=prompt_tokens - 1, compute_ms=compute_ms, handoff=handoff)

    def _transfer(self, sender: Pod, receiver: Pod, tokens: int, prefill_ms: float = 0.0) -> Transfer | None:
        """The KV of `tokens` tokens sent from one pod to another; None without a link, or if its size is unknown."""
        link = self.scene.fleet.links.between(sender, receiver)
        if link is None or not receiver.kv_bytes_per_token:
            return None
        concurrent = self._pulls_of(sender.id)
        transfer_ms = link.t0_ms + tokens * receiver.kv_bytes_per_token / link.bytes_per_ms * (1 + concurrent)
        return Transfer(sender, link, tokens, concurrent, transfer_ms, prefill_ms)

    def most_promising(self, statuses: Sequence[PodStatus], costs: Costs, limit: int) -> Sequence[PodStatus]:
        """The `limit` pods (0: all) with the least outstanding work and uncached prompt, roughly. An uncached token is
        weighed as by these terms, and one in another tier than the GPU by its read.

        Equal pods, of which an idle fleet has many, are taken in a rotation that starts at the request's key. O(pods).
        """
        if not 0 < limit < len(statuses):
            return statuses
        if self._weight is None:
            self._weight = self.missing_weight(statuses[0].pod, costs)
        scene, weight, held_block = self.scene, self._weight, self._block if self.scene.prompt else 0
        inflight, held, now_s = scene.inflight.get, scene.match.blocks.get, scene.now_s
        block, all_tokens = held_block * weight, self.prompt_tokens * weight
        first = tie_key(scene) % len(statuses)
        rotated = [*statuses[first:], *statuses[:first]]
        rough_ms: list[float] = []
        for status in rotated:
            pod = status.pod
            speed = pod.speed
            missing_tokens, ms = all_tokens, 0.0
            if found := held(pod.id):
                missing_tokens -= (held_blocks := sum(found)) * block
                if held_blocks > found[0]:
                    _, cpu, disk, remote = found
                    outside = (0, cpu * held_block, disk * held_block, remote * held_block)
                    ms = read_ms(scene.fleet.links, outside, pod.kv_bytes_per_token)
            if scene.pictures:
                missing_tokens += tokens_to_encode(scene.pictures, pod.id, sum(held(pod.id, _NOTHING)) * held_block)
            ms += speed.c1_ms_per_token * missing_tokens
            if work := inflight(pod.id):
                ms += work.prefill_ms + work.requests * speed.d1_ms_per_request
                if head_ms := work.head_ms:
                    done_ms = (now_s - work.head_since_s) * 1000
                    ms -= done_ms if done_ms < head_ms else head_ms
            rough_ms.append(ms)
        return [rotated[at] for at in sorted(range(len(rotated)), key=rough_ms.__getitem__)[:limit]]

    def missing_weight(self, pod: Pod, costs: Costs) -> float:
        """Cost of an uncached token of this prompt by all terms of a policy, in units of c1. All pods of a model count
        as equal here."""
        max_cached = max(self.prompt_tokens - 1, 1)
        standing = idle_standing(pod)
        extremes = [self._on_idle(standing, tokens) for tokens in (0, max_cached)]
        more_ms = sum(
            [none_ms - all_but_one_ms for none_ms, all_but_one_ms in [t.costs_ms(extremes) for _, t in costs]]
        )
        return more_ms / max_cached / pod.speed.c1_ms_per_token

    def _on_idle(self, standing: Standing, cached_tokens: int) -> Placement:
        """The placement on an idle pod if it held that many tokens."""
        return Placement(
            request=replace(self._request, shared_tokens=0),
            pod=standing.status.pod,
            standing=standing,
            work_ahead_ms=0.0,
            compute_ms=standing.status.pod.speed.compute_ms(cached_tokens, self.prompt_tokens),
            cached_tokens=cached_tokens,
            own_tokens=cached_tokens,
            held_tokens=(cached_tokens, 0, 0, 0),
        )

    def _best_holder(self) -> tuple[Pod, int] | None:
        """The pod that holds most of the prompt and can send it, with the tokens it holds; of equal ones, the pod with
        the fewest transfers."""
        senders = _senders(self.scene.fleet)
        if not senders:
            return None
        blocks = self.scene.match.blocks
        able = [(-sum(held), self._pulls_of(pod_id), pod_id) for pod_id, held in blocks.items() if pod_id in senders]
        if not able:
            return None
        _, _, pod_id = min(able)
        return senders[pod_id], expected_cached_tokens(self.scene, senders[pod_id])

    def _pulls_of(self, holder: PodId) -> int:
        return self.scene.inflight.get(holder, _IDLE).pulls

    def _pulled(self, at: Placement, sender: Pod, tokens: int) -> Placement | None:
        pod = at.pod
        if sender.id == pod.id or not _can_pull(pod, sender):
            return None
        tokens -= tokens % (pod.block_size_tokens or self._block)
        pull = self._transfer(sender, pod, tokens - at.own_tokens)
        if pull is None or pull.transfer_ms >= pod.speed.compute_ms(at.own_tokens, tokens):
            return None
        compute_ms = pod.speed.compute_ms(tokens, self.prompt_tokens)
        return replace(at, cached_tokens=tokens, compute_ms=compute_ms, pull=pull)


def _by_tier(held: BlocksByTier, cached_tokens: int, block_tokens: int) -> BlocksByTier:
    """The usable tokens by tier: the nearest tier holds the start of the prompt."""
    gpu = held[0] * block_tokens
    if gpu >= cached_tokens:
        return cached_tokens, 0, 0, 0
    cpu = min(held[1] * block_tokens, cached_tokens - gpu)
    disk = min(held[2] * block_tokens, cached_tokens - gpu - cpu)
    return gpu, cpu, disk, cached_tokens - gpu - cpu - disk


def _outstanding_ms(at: Placement) -> float:
    return at.inflight.queue_ms(at.request.now_s) + at.standing.fixed_ms


def _can_pull(pod: Pod, holder: Pod) -> bool:
    """Whether both have the same KV format and pull dialect."""
    alike = (pod.pulls, pod.engine, pod.version, pod.front_end)
    return bool(pod.pulls) and alike == (holder.pulls, holder.engine, holder.version, holder.front_end)


@lru_cache(maxsize=SNAPSHOTS)
def _senders(fleet: FleetSnapshot) -> Mapping[PodId, Pod]:
    """The pods that peers can pull KV from, without decode pods whose answers a peer did not find. O(1) except for the
    first call with a snapshot."""
    ready = (status.pod for status in fleet.pods if status.state is PodState.READY)
    able = (pod for pod in ready if pod.pulls and pod.trust is PrefixTrust.TRUSTED)
    return {pod.id: pod for pod in able if pod.keeps_answers is not False}
