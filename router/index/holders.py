"""Maps the holders of the cluster index to this router's pods.

A holder with a pod's URL and rank is that pod. The blocks of a store count for every pod within its reach that computes
the same KV. Each holder is matched under its own generation. This file does not look up blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from router.addresses import url_host
from router.hashing import generation_seed, hash_blocks, token_array
from router.index.events import MAX_AHEAD
from router.index.hit_probe import CacheHabits
from router.index.layers import HitRule
from router.types import AttentionKind, BlockHash, BlocksByTier, Generation, LayerType, Pod, PodId, PromptPrefix

HolderId: TypeAlias = str
HolderName: TypeAlias = str
"""A holder's id and generation as one string, see `holder_name`."""

ALL_PODS = "*"
"""`reach` of a store that every pod of its generation can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderFacts:
    """Identity of a holder. A pod has a `url` and a data-parallel `rank` (-1 for none). A store has a `reach`: `*` if
    all pods of its generation can read it, else the host whose pods can. `source`: engine or type of store. `rule`:
    which layers decide what hits on it; None: it publishes full attention alone, an upper bound. `ahead_tokens`: how
    many tokens behind a block its hash includes."""

    url: str = ""
    rank: int = -1
    reach: str = ""
    source: str = ""
    rule: HitRule | None = None
    ahead_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class KnownHolder:
    """State of one holder. `complete` is False after changes were lost for good; `reloading` is True while its
    publisher writes all blocks again."""

    id: HolderId
    generation: Generation
    facts: HolderFacts
    epoch: int
    seq: int
    last_seen_s: float
    complete: bool = True
    reloading: bool = False

    @property
    def name(self) -> HolderName:
        return holder_name(self.generation, self.id)

    @property
    def rule(self) -> HitRule | None:
        """What a hit on it needs; None: every block. A rule that cannot be applied is ignored."""
        rule = self.facts.rule
        return rule if rule is not None and rule.fits(self.generation.block_size_tokens) else None

    @property
    def announced_rule(self) -> HitRule:
        """The same, in full."""
        return self.rule or HitRule.of([LayerType(AttentionKind.FULL, self.generation.block_size_tokens)], groups=1)


class Holders:
    def __init__(self) -> None:
        self._known: dict[HolderName, KnownHolder] = {}
        self._pods: dict[tuple[str, int], tuple[Pod, Generation]] = {}
        self._habits: dict[PodId, CacheHabits] = {}
        """What a test has shown of a pod."""
        self._publishers: dict[PodId, KnownHolder] = {}
        """The holder of each pod. This and the next three are rebuilt when holders or pods change."""
        self.pod_ids: dict[HolderName, PodId] = {}
        self.ruled: set[PodId] = set()
        """Pods whose layers do not all need every block."""
        self.aheads: set[int] = set()
        """Numbers of tokens behind a block that hashes of some holders include."""
        self.generations: set[Generation] = set()
        """Those of the known holders: several revisions of a model during an update."""

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[KnownHolder]:
        return iter(tuple(self._known.values()))

    def get(self, name: HolderName) -> KnownHolder | None:
        return self._known.get(name)

    def put(self, holder: KnownHolder) -> None:
        """Add the holder, or replace the one with its name."""
        self._known[holder.name] = holder
        self._regroup()

    def drop(self, name: HolderName) -> None:
        self._known.pop(name, None)
        self._regroup()

    def bind(self, pod: Pod, generation: Generation) -> None:
        """Add a pod: holders with its URL and rank are this pod. `generation` applies until its publisher announces
        another one."""
        self._habits.pop(pod.id, None)
        self._pods[pod.url, -1 if pod.dp_rank is None else pod.dp_rank] = pod, generation
        self._regroup()

    def unbind(self, pod_id: PodId) -> None:
        """Remove a pod. Its holder stays until its publisher removes it or it expires."""
        self._habits.pop(pod_id, None)
        self._pods = {address: bound for address, bound in self._pods.items() if bound[0].id != pod_id}
        self._regroup()

    def publisher_of(self, pod_id: PodId) -> KnownHolder | None:
        """The holder that is this pod."""
        return self._publishers.get(pod_id)

    def learn(self, pod_id: PodId, habits: CacheHabits) -> None:
        """A test has shown this of the pod's cache."""
        self._habits[pod_id] = habits
        self._regroup()

    def rule(self, holder: KnownHolder) -> HitRule | None:
        """What a hit on it needs, according to what it publishes and to a test of the pod; None: every block."""
        habits = self._habits.get(self.pod_ids.get(holder.name, ""), CacheHabits())
        return habits.rule(holder.announced_rule) if holder.rule or habits.drops_block else None

    def by_pod(self, walks: Iterable[Mapping[HolderName, BlocksByTier]]) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod and tier: the pod's own, then those that a store within reach adds."""
        found: dict[PodId, BlocksByTier] = {}
        stores: list[tuple[KnownHolder, int]] = []
        pod_ids = self.pod_ids
        for name, blocks in (run for walk in walks for run in walk.items()):
            pod_id = pod_ids.get(name)
            if pod_id is not None:
                # The tiers of a pod may be separate holders.
                if pod_id not in found or sum(blocks) > sum(found[pod_id]):
                    found[pod_id] = blocks
            elif (known := self._known.get(name)) and known.facts.reach:
                stores.append((known, sum(blocks)))
        for store, held in stores:
            self._add_store(store, held, found)
        return found

    def _regroup(self) -> None:
        self.generations = {known.generation for known in self._known.values()}
        self.aheads = {known.facts.ahead_tokens for known in self._known.values()} & {*range(1, 1 + MAX_AHEAD)}
        self._publishers = {}
        for known in self._known.values():
            pod, _ = self._pods.get((known.facts.url, known.facts.rank), (None, None))
            if pod and not known.facts.reach:
                self._publishers[pod.id] = known
        self.pod_ids = {known.name: pod_id for pod_id, known in self._publishers.items()}
        self.ruled = {pod_id for pod_id, known in self._publishers.items() if self.rule(known)}

    def _add_store(self, store: KnownHolder, blocks: int, found: dict[PodId, BlocksByTier]) -> None:
        """Engines use their own cache first and fetch the following blocks from the store."""
        for pod, bound_generation in self._pods.values():
            publisher = self._publishers.get(pod.id)
            generation = publisher.generation if publisher else bound_generation
            readable = _same_tokens(generation, store.generation) and _same_weights(generation, store.generation)
            if not readable or store.facts.reach not in (ALL_PODS, pod.host or url_host(pod.url)):
                continue
            gpu, cpu, disk, remote = found.get(pod.id, (0, 0, 0, 0))
            more = blocks - (gpu + cpu + disk + remote)
            if more > 0:
                found[pod.id] = gpu, cpu, disk, remote + more


def hashes_by_generation(
    prefix: PromptPrefix, generations: Iterable[Generation]
) -> Iterator[tuple[Generation, Sequence[BlockHash]]]:
    """The prompt's hashes under its own generation, and under each of `generations` that has the same tokenization but
    other weights."""
    asked = prefix.generation
    yield replace(asked, adapter="", salt=""), prefix.hashes
    for other in generations:
        if _same_tokens(other, asked) and not _same_weights(other, asked):
            seed = generation_seed(replace(other, adapter=asked.adapter, salt=asked.salt))
            hashed = prefix.tokens[: len(prefix.hashes) * other.block_size_tokens]
            yield other, hash_blocks(token_array(hashed), other.block_size_tokens, seed)


def holder_name(generation: Generation, holder: HolderId) -> HolderName:
    """A holder's id and generation as one string."""
    kv = (generation.tokenizer, generation.kv_dtype, str(generation.block_size_tokens))
    return "\n".join((holder, generation.model, generation.revision, *kv))


def _same_tokens(one: Generation, other: Generation) -> bool:
    return (one.model, one.tokenizer, one.block_size_tokens) == (other.model, other.tokenizer, other.block_size_tokens)


def _same_weights(one: Generation, other: Generation) -> bool:
    return (one.revision, one.kv_dtype) == (other.revision, other.kv_dtype)
