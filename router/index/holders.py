"""Which holders are there, which of them are our pods, and what may a pod make of a store's blocks?

Knows holders by what they say of themselves and pods by where they are, and brings the two together: a holder with a
pod's URL and rank is that pod; a store's blocks count for every pod within its reach that computes the same KV. Each
holder is looked up under its own generation. This file never looks up a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias
from urllib.parse import urlsplit

from router.hashing import generation_seed, hash_blocks, token_array
from router.types import BlockHash, BlocksByTier, Generation, Pod, PodId, PromptPrefix

HolderId: TypeAlias = str
HolderName: TypeAlias = str
"""A holder's id and generation as one word, see `holder_name`."""

ALL_PODS = "*"
"""`reach` of a store that every pod of its generation can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderFacts:
    """Who a holder is: a pod, by `url` and data-parallel `rank` (-1 without); or, with a `reach`, a store that pods
    read from: `*` all pods of its generation, anything else those on that host (by configuration, or by their URL)."""

    url: str = ""
    rank: int = -1
    reach: str = ""
    host: str = ""
    rack: str = ""
    zone: str = ""
    capacity_blocks: int | None = None
    source: str = ""


@dataclass(slots=True, kw_only=True)
class KnownHolder:
    """What was heard of one holder. `complete` is False while changes of it may have been lost for good; `reloading`
    while its publisher writes again what it has."""

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
        """Its id and generation as one word."""
        return holder_name(self.generation, self.id)


class Holders:
    """All known holders and all pods of this router."""

    def __init__(self) -> None:
        self._known: dict[HolderName, KnownHolder] = {}
        self._pods: dict[tuple[str, int], tuple[Pod, Generation]] = {}
        self._publishers: dict[PodId, KnownHolder] = {}
        """By pod; made anew whenever holders or pods change, like the following two."""
        self._pod_ids: dict[HolderName, PodId] = {}
        self._generations: set[Generation] = set()

    def __iter__(self) -> Iterator[KnownHolder]:
        return iter(tuple(self._known.values()))

    def get(self, name: HolderName) -> KnownHolder | None:
        """The holder of that name."""
        return self._known.get(name)

    def put(self, holder: KnownHolder) -> None:
        """Know this holder, instead of the one of its name."""
        self._known[holder.name] = holder
        self._regroup()

    def drop(self, name: HolderName) -> None:
        """Know it no longer."""
        self._known.pop(name, None)
        self._regroup()

    def bind(self, pod: Pod, generation: Generation) -> None:
        """From now on, holders with this pod's URL and rank are this pod. `generation` is what it serves for all that
        is known here; its publisher knows better."""
        self._pods[pod.url, -1 if pod.dp_rank is None else pod.dp_rank] = pod, generation
        self._regroup()

    def unbind(self, pod_id: PodId) -> None:
        """The pod is gone. What its holder has is forgotten when its publisher says so."""
        self._pods = {address: bound for address, bound in self._pods.items() if bound[0].id != pod_id}
        self._regroup()

    def publisher_of(self, pod_id: PodId) -> KnownHolder | None:
        """The holder that tells of this pod."""
        return self._publishers.get(pod_id)

    def hashes(self, prefix: PromptPrefix) -> Iterator[tuple[Generation, Sequence[BlockHash]]]:
        """The prompt's hashes under every generation in which the same tokens are the same blocks: its own and, while
        a model is being replaced under its name, the other revisions that are served."""
        return hashes_by_generation(prefix, self._generations)

    def by_pod(self, walks: Iterable[Mapping[HolderName, BlocksByTier]]) -> dict[PodId, BlocksByTier]:
        """Leading blocks by pod and tier: a pod's own, and behind them what a store within its reach has."""
        found: dict[PodId, BlocksByTier] = {}
        stores: list[tuple[KnownHolder, int]] = []
        pod_ids = self._pod_ids
        for name, blocks in (run for walk in walks for run in walk.items()):
            pod_id = pod_ids.get(name)
            if pod_id is not None:
                if pod_id not in found or sum(blocks) > sum(found[pod_id]):  # its tiers may be holders apart
                    found[pod_id] = blocks
            elif (known := self._known.get(name)) and known.facts.reach:
                stores.append((known, sum(blocks)))
        for store, held in stores:
            self._reach(store, held, found)
        return found

    def _regroup(self) -> None:
        self._generations = {known.generation for known in self._known.values()}
        self._publishers = {pod.id: known for known in self._known.values() if (pod := self._pod_of(known))}
        self._pod_ids = {known.name: pod_id for pod_id, known in self._publishers.items()}

    def _pod_of(self, known: KnownHolder) -> Pod | None:
        bound = None if known.facts.reach else self._pods.get((known.facts.url, known.facts.rank))
        return bound[0] if bound else None

    def _reach(self, store: KnownHolder, blocks: int, found: dict[PodId, BlocksByTier]) -> None:
        """Engines look into their own cache first and fetch from the store what follows on it."""
        for pod, bound_generation in self._pods.values():
            publisher = self._publishers.get(pod.id)
            generation = publisher.generation if publisher else bound_generation
            readable = _same_tokens(generation, store.generation) and _same_weights(generation, store.generation)
            if not readable or store.facts.reach not in (ALL_PODS, pod.host or urlsplit(pod.url).hostname):
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
            yield other, hash_blocks(token_array(prefix.tokens), other.block_size_tokens, seed)


def holder_name(generation: Generation, holder: HolderId) -> HolderName:
    """A holder's id and generation as one word."""
    of = generation
    return "\n".join((holder, of.model, of.revision, of.tokenizer, of.kv_dtype, str(of.block_size_tokens)))


def _same_tokens(one: Generation, other: Generation) -> bool:
    return (one.model, one.tokenizer, one.block_size_tokens) == (other.model, other.tokenizer, other.block_size_tokens)


def _same_weights(one: Generation, other: Generation) -> bool:
    return (one.revision, one.kv_dtype) == (other.revision, other.kv_dtype)
