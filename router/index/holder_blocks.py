"""The blocks of one holder, according to the events it publishes.

Engine hashes are opaque: each stored block is hashed again from its tokens, seeded by the holder's generation. So
engines of any type, version and hash seed share one index, and a block of another generation cannot match. An engine
block may be a multiple of the router's block. Engines announce physical copies; the returned changes say whether a tier
has the router block at all. This file does not handle sequence numbers or sockets.

Groups of layers that keep only windows or states (`Layers`) name blocks by engine hash alone, in front of or behind the
event of full attention that says what the block is. A type of layers holds a block when all of its groups do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from router.hashing import generation_seed, hash_ahead, hash_blocks, token_array
from router.index.hit_probe import CacheHabits
from router.index.layers import MAX_TYPES, HitRule
from router.types import AttentionKind, BlockChange, BlockHash, BlocksRemoved, BlocksStored, Generation, LayerType, Tier

_COUNT_BITS = 16
_COUNT = (1 << _COUNT_BITS) - 1
_SINGLE_GPU_COPY = 1 << _COUNT_BITS * Tier.GPU

SHARDS = 89
"""Number of dicts that share the entries of a large mapping: key `k` is in dict `k % SHARDS`.

A dict that grows moves all its entries at once, which takes 5 to 97 ms for 44,000 to 700,000 blocks. Split into shards,
no event took more than 2.7 ms. The number is prime, so that regular engine hashes spread evenly; with more shards, the
next one is rarely in the CPU's caches."""

_TIERS_OF = tuple(tuple(tier for tier in Tier if bits >> tier & 1) for bits in range(1 << len(Tier)))

Blocks = tuple[BlockHash, ...]
HashResolver = Callable[[int], Blocks | None]
"""The router blocks of an engine hash that another holder has announced with its tokens."""
Shards: TypeAlias = list[dict[int, Blocks]]
HashInTier: TypeAlias = tuple[int, Tier]
"""An engine hash in a tier."""

MAX_GROUPS = 64
"""Groups of one holder. The largest known model has 13."""
MAX_BEFORE_JOIN = 4096
"""Once this number of blocks is stored, a new group is none of the model's."""


class HolderBlocks:
    """One holder's blocks by engine hash. Apply its events in order.

    `resolve_hash` is called for unknown hashes that come without tokens, as cache stores announce them."""

    def __init__(self, generation: Generation, resolve_hash: HashResolver | None = None) -> None:
        self.generation = generation
        self.orphans = 0
        """Stored blocks that were dropped because their parent or their tokens are unknown."""
        self.rejected_reason = ""
        """Why this holder's events cannot be indexed, or ""."""
        self._resolve_hash = resolve_hash
        self._blocks: Shards = [{} for _ in range(SHARDS)]
        """Router blocks of each engine block, by engine hash."""
        self._copies: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        """Physical copies by engine hash, 16 bits per tier. A known hash without entry has a single GPU copy, as most
        have: this saves a fifth of the memory and a tenth of the time.

        vLLM requests with `kv_cache_report_mode=full` also announce hits, which look like copies: such
        blocks stay here after their removal."""
        self._extra_references = Counter[tuple[BlockHash, Tier]]()
        """For router blocks with several engine hashes: the number of hashes beyond the first."""
        self._held: list[dict[BlockHash, int]] = [{} for _ in range(SHARDS)]
        """Tiers of each router block, one bit per tier."""
        self._adapters: dict[int, str] = {}
        """The adapters of blocks that have one, by engine hash."""
        self._unresolved: dict[tuple[int, Tier], int] = {}
        """Engine hashes and tiers that `resolve_hash` could not resolve yet, with their attention group."""
        self._groups: set[int] = set()
        """Groups of full attention with stored blocks here."""
        self._layers: Layers | None = None
        """What the other groups hold: those that keep windows or states."""
        self._full_tokens = 0
        """Size of an engine's block of full attention."""
        self.ahead_tokens = 0
        """Tokens behind a block that the engine's hashes include, and so do those of this holder's blocks."""
        self._chain: dict[int, BlockHash] = {}
        """The last router block of each engine block without these tokens: what the next one is chained to."""
        self.habits = CacheHabits()
        """What a test has shown of it."""
        self.rule: HitRule | None = None
        """What a hit needs; None while all known groups have full attention, and no drafter drops a block."""

    @property
    def size_blocks(self) -> int:
        """Engine blocks that are known; all else here is in proportion."""
        return sum(map(len, self._blocks)) + (len(self._layers) if self._layers is not None else 0)

    def blocks_of(self, engine_hash: int) -> Blocks | None:
        return self._blocks[engine_hash % SHARDS].get(engine_hash)

    def held(self) -> dict[Tier, list[BlockHash]]:
        by_tier: dict[Tier, list[BlockHash]] = {}
        for shard in self._held:
            for block, tiers in shard.items():
                for tier in _TIERS_OF[tiers]:
                    by_tier.setdefault(tier, []).append(block)
        return by_tier

    def apply(self, event: BlocksStored | BlocksRemoved) -> list[BlockChange]:
        """Apply one event. Returns the resulting changes in order; a change lists each block once."""
        return self._remove(event) if isinstance(event, BlocksRemoved) else self._store(event)

    def retry(self) -> list[BlockChange]:
        """Resolve pending hashes again: a store's events may arrive before those of the pods that fill it."""
        if not self._unresolved:
            return []
        unresolved, self._unresolved = self._unresolved, {}
        changes: list[BlockChange] = []
        for (engine_hash, tier), group in unresolved.items():
            changes += self._store(BlocksStored(block_hashes=(engine_hash,), tier=tier, group=group))
        return changes

    def free_next_shard(self) -> bool:
        """Free one shard of a holder that is not used any more. True when none is left.

        Freeing 200,000 blocks at once takes 20 to 50 ms."""
        for shards in (self._blocks, self._copies, self._held):
            shards.pop()
        return not self._held

    # --- storing ---

    def _store(self, event: BlocksStored) -> list[BlockChange]:
        if event.layers is not None or (self._layers is not None and self._layers.layer_of(event.group)):
            return self._store_layers(event)
        self._groups.add(event.group)
        if event.tokens and event.block_size_tokens > self._full_tokens:  # the part of a block has a smaller size
            self._full_tokens = event.block_size_tokens
            self._learn_rule()
        added: list[BlockHash] = []
        placed: list[int] = []
        changes = list[BlockChange]()
        one = 1 << _COUNT_BITS * event.tier
        resolved = self._resolved(event)
        if event.adapter:
            resolved = list(resolved)
            changes = self._of_loaded_adapter(event.adapter, resolved)
        for engine_hash, blocks in resolved:
            known, counted = self._blocks[engine_hash % SHARDS], self._copies[engine_hash % SHARDS]
            copies = counted.get(engine_hash, _SINGLE_GPU_COPY) if engine_hash in known else 0
            if self._layers is not None:  # a window may have lost other blocks than full attention
                placed.append(engine_hash)
            # Engines that report all hits announce the same blocks again and again: the counter must not overflow.
            if copies // one & _COUNT < _COUNT and copies + one != _SINGLE_GPU_COPY:
                counted[engine_hash] = copies + one
            if not copies // one & _COUNT:
                # A known hash keeps its blocks even if the engine announces other blocks under it (some engines do not
                # hash everything that separates caches): a removal must remove exactly what was added.
                self._add(known.setdefault(engine_hash, blocks), event.tier, added)
        if added:
            changes.append(BlockChange(event.tier, True, added))
        if self._layers is None:
            return changes
        return changes + self._layers.placed(placed, held=True) + self._layers.parts_of(event, self.habits)

    def _of_loaded_adapter(self, adapter: str, resolved: Sequence[tuple[int, Blocks]]) -> list[BlockChange]:
        """An engine that loads other weights under the name of an adapter has other hashes from then on: what it drops
        of the adapter when a known block comes with a new hash."""
        adapters, changes = self._adapters, list[BlockChange]()
        # Blocks of an engine that are longer than the router's may begin alike: the last block says what is in them.
        if any(new not in adapters and self._held[blocks[-1] % SHARDS].get(blocks[-1]) for new, blocks in resolved):
            known = [one for one, of in adapters.items() if of == adapter]
            for tier in Tier:
                changes += self._remove_copies(tier, known)
        adapters.update(dict.fromkeys([engine_hash for engine_hash, _ in resolved], adapter))
        return changes

    def _remove_copies(self, tier: Tier, engine_hashes: Iterable[int]) -> list[BlockChange]:
        """Remove all copies of these blocks in a tier."""
        copies: list[int] = []
        for one in engine_hashes:
            if self.blocks_of(one) is not None:
                held = self._copies[one % SHARDS].get(one, _SINGLE_GPU_COPY) >> _COUNT_BITS * tier & _COUNT
                copies += [one] * held
        return self._remove(BlocksRemoved(block_hashes=tuple(copies), tier=tier, group=min(self._groups)))

    def _resolved(self, event: BlocksStored) -> Iterable[tuple[int, Blocks]]:
        """Engine hashes of a stored event with their router blocks, where these can be determined."""
        if not event.tokens:
            return self._resolved_by_hash(event)
        block_size = self.generation.block_size_tokens
        if event.block_size_tokens % block_size:
            self.rejected_reason = (
                f"engine block size {event.block_size_tokens} is not a multiple of the router's {block_size} tokens"
            )
            return ()
        parent = self._parent(event)
        if parent is None:
            self.orphans += len(event.block_hashes)
            return ()
        hashes = hash_blocks(token_array(event.tokens), block_size, parent)
        each = event.block_size_tokens // block_size
        if event.lookahead_tokens:
            self.ahead_tokens = len(event.lookahead_tokens[0])
            self._chain.update(zip(event.block_hashes, hashes[each - 1 :: each], strict=False))
            tokens = token_array([*event.tokens, *event.lookahead_tokens[-1]])
            hashes = hash_ahead(hashes, tokens, block_size, self.ahead_tokens)
        return zip(event.block_hashes, zip(*[iter(hashes)] * each, strict=True), strict=False)

    def _resolved_by_hash(self, event: BlocksStored) -> Iterable[tuple[int, Blocks]]:
        """For an event without tokens: blocks that were announced before are now also in this tier."""
        for engine_hash in event.block_hashes:
            blocks = self.blocks_of(engine_hash)
            if blocks is None and self._resolve_hash is not None:
                blocks = self._resolve_hash(engine_hash)
            if blocks is not None:
                yield engine_hash, blocks
            elif self._resolve_hash is not None:
                self._unresolved[engine_hash, event.tier] = event.group
            else:
                self.orphans += 1

    def _parent(self, event: BlocksStored) -> BlockHash | None:
        if event.parent_hash is None:
            return generation_seed(replace(self.generation, adapter=event.adapter, salt=event.salt))
        blocks = self.blocks_of(event.parent_hash)
        return self._chain.get(event.parent_hash, blocks[-1]) if blocks else None

    def _add(self, blocks: Blocks, tier: Tier, added: list[BlockHash]) -> None:
        bit = 1 << tier
        for block in blocks:
            held = self._held[block % SHARDS]
            tiers = held.get(block, 0)
            if tiers & bit:
                self._extra_references[block, tier] += 1
            else:
                held[block] = tiers | bit
                added.append(block)

    # --- removing ---

    def _remove(self, event: BlocksRemoved) -> list[BlockChange]:
        if event.group not in self._groups:
            return self._layers.remove(event) if self._layers is not None else []
        shift = _COUNT_BITS * event.tier
        removed: list[BlockHash] = []
        changes: list[BlockChange] = []
        for engine_hash in event.block_hashes:
            self._unresolved.pop((engine_hash, event.tier), None)
            known, counted = self._blocks[engine_hash % SHARDS], self._copies[engine_hash % SHARDS]
            copies = counted.get(engine_hash, _SINGLE_GPU_COPY) if engine_hash in known else 0
            if not copies >> shift & _COUNT:
                continue
            copies -= 1 << shift
            if not copies >> shift & _COUNT:
                self._drop(known[engine_hash], event.tier, removed)
            if not copies:
                if self._layers is not None:
                    changes += self._layers.placed([engine_hash], held=False)
                del known[engine_hash]
                self._adapters.pop(engine_hash, None)
                self._chain.pop(engine_hash, None)
            if copies > _SINGLE_GPU_COPY:
                counted[engine_hash] = copies
            else:
                counted.pop(engine_hash, None)
        if removed:
            changes.append(BlockChange(event.tier, False, removed))
        return changes

    def _drop(self, blocks: Blocks, tier: Tier, removed: list[BlockHash]) -> None:
        for block in blocks:
            if extra := self._extra_references.pop((block, tier), 0):
                if extra > 1:
                    self._extra_references[block, tier] = extra - 1
                continue
            removed.append(block)
            held = self._held[block % SHARDS]
            if tiers := held[block] & ~(1 << tier):
                held[block] = tiers
            else:
                del held[block]

    # --- layers that keep some blocks only ---

    def _store_layers(self, event: BlocksStored) -> list[BlockChange]:
        """Their blocks count while full attention has them, too, which says what they are."""
        if event.layers is not None and event.layers.block_tokens % self.generation.block_size_tokens:
            return []
        if self._layers is None:
            self._layers = Layers(self.generation.block_size_tokens, self._blocks)
        changes = self._layers.store(event)
        self._learn_rule()
        return changes

    @property
    def announced_rule(self) -> HitRule | None:
        """What a hit needs according to the events alone; None before the first."""
        if not self._full_tokens and self._layers is None:
            return None
        return hit_rule(self._full_tokens, self._layers)

    def learn(self, habits: CacheHabits) -> None:
        self.habits = habits
        self._learn_rule()

    def _learn_rule(self) -> None:
        announced = self.announced_rule
        if announced is not None and (self._layers is not None or self.habits.drops_block):
            rule = self.habits.rule(announced)
            if rule != self.rule:
                self.rule = rule


class Layers:
    """What the groups of one holder hold that keep windows or states; they exist for hybrid models alone. `known`: the
    router blocks of engine hashes, by shard, as full attention has announced them. Types of layers are numbered from 1:
    0 is full attention."""

    def __init__(self, unit_tokens: int, known: Shards) -> None:
        self._unit_tokens = unit_tokens
        self._known = known
        self.types: list[LayerType] = []
        self._all_groups: list[int] = []
        """By type, a bit for each of its groups."""
        self.groups: dict[int, tuple[int, int]] = {}
        """By group, its type and its bit."""
        self._held: dict[HashInTier, int] = {}
        """The bits of the groups that hold a block."""
        self._more = Counter[tuple[int, int, Tier]]()
        """By group and place, the copies beyond the first."""
        self._announced: dict[int, BlocksStored] = {}
        """By group, its last event."""
        self._parts: dict[int, Blocks] = {}
        """Blocks that are smaller than those of full attention, whose events do not name them."""

    def __len__(self) -> int:
        return len(self._held)

    def layer_of(self, group: int) -> int:
        """The type of a group; 0 if it is not known."""
        return self.groups[group][0] if group in self.groups else 0

    def store(self, event: BlocksStored) -> list[BlockChange]:
        """A connector's events do not repeat which layers a known group has."""
        joined = self._join(event.group, event.layers)
        if joined is None:
            return []
        layer, lost = joined
        self._announced[event.group] = event
        changes = [self._change(layer, tier, [one], held=False) for one, tier in lost]
        stored = list(self._stored(event.group, event.block_hashes, event.tier))
        return [*changes, self._change(layer, event.tier, stored, held=True)]

    def remove(self, event: BlocksRemoved) -> list[BlockChange]:
        layer = self.layer_of(event.group)
        if not layer:
            return []
        removed = list(self._removed(event.group, event.block_hashes, event.tier))
        change = self._change(layer, event.tier, removed, held=False)
        for one in event.block_hashes:
            if one in self._parts and not self._has(one):
                del self._parts[one]
        return [change]

    def placed(self, engine_hashes: Iterable[int], *, held: bool) -> list[BlockChange]:
        """What changes in these layers when full attention gets the blocks, or is about to lose them."""
        by_layer: dict[tuple[int, Tier], list[int]] = {}
        for engine_hash in engine_hashes:
            if not held and engine_hash in self._parts:
                continue
            for layer, tier in self._layers_of(engine_hash):
                by_layer.setdefault((layer, tier), []).append(engine_hash)
        return [self._change(layer, tier, hashes, held=held) for (layer, tier), hashes in by_layer.items()]

    def parts_of(self, event: BlocksStored, habits: CacheHabits) -> list[BlockChange]:
        """What is held of the blocks that this event of full attention does not name."""
        unit, found = self._unit_tokens, dict[int, Blocks]()
        for group, announced in self._announced.items():
            layer = self.layer_of(group)
            size = self.types[layer - 1].block_tokens
            each = event.block_size_tokens // size
            if each < 2 or event.block_size_tokens % size:
                continue
            blocks = [block for one in event.block_hashes for block in self._blocks_of(one)]
            named = {one: each * at - 1 for at, one in enumerate(event.block_hashes, start=1)}
            is_first = announced.parent_hash == event.parent_hash
            for one, at in unnamed(announced.block_hashes, named, each, is_first, habits.drops(layer)):
                part = tuple(blocks[at * size // unit : (at + 1) * size // unit])
                if part and self._has(one) and one not in self._parts:
                    found[one] = part
        self._parts |= found
        return self.placed(found, held=True)

    def _change(self, layer: int, tier: Tier, engine_hashes: Iterable[int], *, held: bool) -> BlockChange:
        last = self.types[layer - 1].block_tokens // self._unit_tokens
        named = (self._parts.get(one) or self._blocks_of(one)[-last:] for one in engine_hashes)
        return BlockChange(tier, held, [*dict.fromkeys(block for blocks in named for block in blocks)], layer)

    def _blocks_of(self, engine_hash: int) -> Blocks:
        return self._known[engine_hash % SHARDS].get(engine_hash, ())

    def _has(self, engine_hash: int) -> bool:
        return any((engine_hash, tier) in self._held for tier in Tier)

    def _join(self, group: int, layers: LayerType | None) -> tuple[int, list[HashInTier]] | None:
        """Learn a group. Returns the type that it belongs to, and what this type does not hold any more, because the
        new group does not have it. None if the group is ignored."""
        if group in self.groups:
            return self.groups[group][0], []
        if layers is None or len(self.groups) >= MAX_GROUPS or len(self._held) > MAX_BEFORE_JOIN:
            return None
        if layers not in self.types:
            if len(self.types) == MAX_TYPES:
                return None
            self.types.append(layers)
            self._all_groups.append(0)
        layer = 1 + self.types.index(layers)
        lost = [place for place in self._held if self._holds(place, layer)]
        self.groups[group] = layer, 1 << len(self.groups)
        self._all_groups[layer - 1] |= self.groups[group][1]
        return layer, lost

    def _stored(self, group: int, hashes: Iterable[int], tier: Tier) -> Iterator[int]:
        """The engine hashes that the group's type holds now."""
        layer, bit = self.groups[group]
        for engine_hash in hashes:
            place = engine_hash, tier
            held = self._held.get(place, 0)
            if held & bit:
                self._more[group, engine_hash, tier] += 1
                continue
            self._held[place] = held | bit
            if self._holds(place, layer):
                yield engine_hash

    def _removed(self, group: int, hashes: Iterable[int], tier: Tier) -> Iterator[int]:
        """The engine hashes that the group's type does not hold any more."""
        layer, bit = self.groups[group]
        for engine_hash in hashes:
            place = engine_hash, tier
            held = self._held.get(place, 0)
            if not held & bit:
                continue
            if more := self._more.pop((group, engine_hash, tier), 0):
                if more > 1:
                    self._more[group, engine_hash, tier] = more - 1
                continue
            if self._holds(place, layer):
                yield engine_hash
            if held == bit:
                del self._held[place]
            else:
                self._held[place] = held & ~bit

    def _layers_of(self, engine_hash: int) -> Iterator[tuple[int, Tier]]:
        """The types, with the tier, that hold a block."""
        for tier in Tier:
            if (engine_hash, tier) in self._held:
                for layer in range(1, 1 + len(self.types)):
                    if self._holds((engine_hash, tier), layer):
                        yield layer, tier

    def _holds(self, place: HashInTier, layer: int) -> bool:
        groups = self._all_groups[layer - 1]
        return groups > 0 and self._held.get(place, 0) & groups == groups


def hit_rule(full_tokens: int, layers: Layers | None) -> HitRule:
    """What a hit needs where the blocks of full attention have `full_tokens`; 0: there is none."""
    full = (LayerType(AttentionKind.FULL, full_tokens),) if full_tokens else ()
    types, groups = (layers.types, layers.groups) if layers is not None else ([], {})
    return HitRule.of((*full, *types), groups=len(full) + len(groups))


def unnamed(
    hashes: Sequence[int], named: Mapping[int, int], each: int, is_first: bool, drops_block: bool
) -> Iterator[tuple[int, int]]:
    """Which blocks are those of a window that full attention does not name, because its own blocks are larger? Pairs of
    hash and number of the block. `named`: the numbers of the others, every `each`-th.

    Blocks are kept in runs, which end with a named one or, where a drafter drops a block, one behind it. `is_first`:
    `hashes` and `named` begin with the same block."""
    places = [named.get(one, -1) for one in hashes]
    for at in range(len(places) - 1, 0, -1):
        if drops_block and places[at] < 0 <= places[at - 1]:
            places[at] = places[at - 1] + 1
    for at in range(len(places) - 2, -1, -1):
        if places[at] < 0 < places[at + 1] and places[at + 1] % each:
            places[at] = places[at + 1] - 1
    if is_first and places and places[0] < 0:
        places[0] = 0
    yield from ((one, place) for one, place in zip(hashes, places, strict=True) if place >= 0 and one not in named)
