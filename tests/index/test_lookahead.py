"""Hashes of blocks that include the tokens behind them: vLLM 0.33 with EAGLE or MTP, read, not run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import xxhash

from loadtest.mock_engine.event_publisher import encode_batch
from router.hashing import generation_seed, hash_ahead, hash_blocks, token_array
from router.index.blockmap import BlockMap
from router.index.cluster import ClusterIndex, EntryKind, LogEntry
from router.index.events import split_events
from router.index.holder_blocks import HolderBlocks
from router.index.holders import HolderFacts
from router.stores.prefix_store import LocalStore, ReplicaStore
from router.types import (
    AttentionKind,
    BlockChange,
    BlocksRemoved,
    BlocksStored,
    Generation,
    LayerType,
    PromptPrefix,
    Tier,
)
from tests.index.decoding import decode_batch
from tests.kit.scenes import make_pod

POD, BLOCK = "pod", 16
GENERATION = Generation(model="m", block_size_tokens=BLOCK)
PROMPT = list(range(1000, 1000 + 5 * BLOCK + 3))


def stored(tokens: Sequence[int], ahead: int, name: int = 1, blocks: int = 0) -> BlocksStored:
    """The event of a prompt: blocks whose next tokens exist."""
    count = blocks or (len(tokens) - ahead) // BLOCK
    ends = range(BLOCK, count * BLOCK + 1, BLOCK)
    return BlocksStored(
        block_hashes=tuple(range(name, name + count)),
        tokens=tuple(tokens[: count * BLOCK]),
        lookahead_tokens=tuple(tuple(tokens[end : end + ahead]) for end in ends if ahead),
        block_size_tokens=BLOCK,
    )


def prefix(tokens: Sequence[int]) -> PromptPrefix:
    hashes = hash_blocks(token_array(tokens), BLOCK, generation_seed(GENERATION))
    return PromptPrefix(GENERATION, token_array(tokens), hashes)


def holder(*events: BlocksStored | BlocksRemoved) -> BlockMap:
    """A pod whose events have been on the wire."""
    blocks = BlockMap()
    blocks.add_holder(POD, GENERATION)
    for event in decode_batch(encode_batch(events, "map", 0.0)):
        blocks.apply(POD, event)
    return blocks


def hit(blocks: BlockMap, tokens: Sequence[int]) -> int:
    return BLOCK * sum(blocks.match(prefix(tokens)).get(POD, (0,)))


def test_a_key_is_the_chain_hash_and_the_next_tokens() -> None:
    """Blocks without enough tokens behind them have none."""
    tokens = token_array(range(10))
    chain = hash_blocks(tokens, 4, 7)
    keys = hash_ahead(chain, tokens, 4, 1)
    assert list(keys) == [xxhash.xxh3_64_intdigest(bytes([at, 0, 0, 0]), chain[at // 4 - 1]) for at in (4, 8)]
    assert len(hash_ahead(chain, tokens, 4, 3)) == 1


@pytest.mark.parametrize(("shared", "found"), [(64, 48), (65, 64), (63, 48), (80, 64), (83, 80)])
def test_prompts_that_share_blocks_and_a_token_more_share_all_of_these(shared: int, found: int) -> None:
    """The manager of 0.33: 64 shared tokens, hit 48; 65: hit 64."""
    assert hit(holder(stored(PROMPT, 1)), PROMPT[:shared] + [7] * 40) == found


def test_with_three_tokens_behind_a_block_all_three_are_compared() -> None:
    blocks = holder(stored(PROMPT, 3))
    assert [hit(blocks, PROMPT[:shared] + [7] * 40) for shared in (66, 67, 82, 83)] == [48, 64, 64, 80]


def test_a_prompt_of_whole_blocks_has_one_block_less() -> None:
    assert len(stored(PROMPT[:80], 1).block_hashes) == 4
    assert hit(holder(stored(PROMPT[:80], 1)), PROMPT) == 64


def test_later_events_continue_the_chain() -> None:
    whole = stored(PROMPT, 1)
    first = stored(PROMPT, 1, blocks=2)
    rest = BlocksStored(
        block_hashes=whole.block_hashes[2:],
        parent_hash=whole.block_hashes[1],
        tokens=whole.tokens[2 * BLOCK :],
        lookahead_tokens=whole.lookahead_tokens[2:],
        block_size_tokens=BLOCK,
    )
    assert hit(holder(first, rest), PROMPT) == 80


def test_a_long_event_is_split_with_its_next_tokens() -> None:
    tokens = list(range(BLOCK * 600 + 1))
    blocks = BlockMap()
    blocks.add_holder(POD, GENERATION)
    for batch in split_events([stored(tokens, 1)]):
        for event in batch:
            blocks.apply(POD, event)
    assert hit(blocks, tokens) == BLOCK * 600


def test_the_same_block_with_other_next_tokens_is_another_one() -> None:
    """One of the two is evicted: only its prompt loses the block."""
    other = PROMPT[:48] + [5] * 20
    blocks = holder(stored(PROMPT, 1), stored(other, 1, name=101))
    assert (hit(blocks, PROMPT), hit(blocks, other)) == (80, 64)
    for event in decode_batch(encode_batch([BlocksRemoved(block_hashes=(103,))], "map", 0.0)):
        blocks.apply(POD, event)
    assert (hit(blocks, PROMPT), hit(blocks, other)) == (80, 32)


def test_pods_without_lookahead_beside_it_keep_their_hits() -> None:
    blocks = holder(stored(PROMPT, 1))
    blocks.add_holder("legacy", GENERATION)
    blocks.apply("legacy", stored(PROMPT, 0))
    assert blocks.match(prefix(PROMPT[:64] + [7] * 20)) == {"legacy": (4, 0, 0, 0), POD: (3, 0, 0, 0)}
    blocks.forget(POD)
    assert blocks.match(prefix(PROMPT)) == {"legacy": (5, 0, 0, 0)}


def test_a_router_that_reads_them_through_redis_expects_the_same() -> None:
    account, index = HolderBlocks(GENERATION), ClusterIndex(holder_ttl_s=60)
    changes = account.apply(stored(PROMPT, 1))
    facts = HolderFacts(url=f"http://{POD}", ahead_tokens=account.ahead_tokens)
    index.holders.bind(make_pod(POD), GENERATION)
    index.apply(GENERATION, LogEntry(kind=EntryKind.EMPTY, holder=POD, epoch=1, facts=facts), 0.0)
    index.apply(GENERATION, LogEntry(kind=EntryKind.CHANGE, holder=POD, epoch=1, seq=1, changes=tuple(changes)), 0.0)
    assert [sum(index.match(prefix(PROMPT[:shared] + [7] * 40))[POD]) for shared in (64, 65)] == [3, 4]


def test_what_a_publisher_says_of_the_tokens_is_bounded() -> None:
    """Each number of tokens costs a lookup."""
    index = ClusterIndex(holder_ttl_s=60)
    for ahead in (-1, 0, 2, 9, 1 << 40):
        facts = HolderFacts(url=f"http://{ahead}", ahead_tokens=ahead)
        index.apply(GENERATION, LogEntry(kind=EntryKind.EMPTY, holder=f"h{ahead}", epoch=1, facts=facts), 0.0)
    assert index.holders.aheads == {2}


# --- dispatched prompts ---

WINDOW = LayerType(AttentionKind.WINDOW, BLOCK, span_tokens=2 * BLOCK)


def store_of(*, windows: bool) -> LocalStore:
    """A pod that has announced another prompt."""
    store, other = LocalStore(), stored(range(2 * BLOCK + 1), 1, name=901)
    store.add_holder(make_pod(POD), GENERATION)
    if windows:
        store.apply(POD, [BlocksStored(block_hashes=(902,), group=1, layers=WINDOW)])
    store.apply(POD, [other])
    return store


def expected(store: LocalStore, tokens: Sequence[int], now_s: float) -> int:
    return BLOCK * store.match(prefix(tokens), now_s).held_blocks(POD)


@pytest.mark.parametrize(("shared", "found"), [(64, 48), (65, 64)])
def test_a_dispatched_prompt_shares_what_its_blocks_will(shared: int, found: int) -> None:
    store = store_of(windows=False)
    store.predict(POD, prefix(PROMPT), ttl_s=30.0, capacity_blocks=None)
    assert expected(store, PROMPT[:shared] + [7] * 40, 0.0) == found


@pytest.mark.parametrize("windows", [True, False])
def test_what_a_dispatched_prompt_leaves_ends_with_its_eviction(windows: bool) -> None:
    store = store_of(windows=windows)
    store.confirm(store.predict(POD, prefix(PROMPT), ttl_s=30.0, capacity_blocks=None), 0.0)
    assert expected(store, PROMPT, 0.1) == 80
    if windows:
        store.apply(POD, [BlocksStored(block_hashes=(4, 5), group=1, layers=WINDOW)])
    store.apply(POD, [stored(PROMPT, 1)])
    assert expected(store, PROMPT, 0.2) == 80
    store.apply(POD, [BlocksRemoved(block_hashes=(5,), group=int(windows))])
    assert expected(store, PROMPT, 0.3) == (0 if windows else 64)


def test_so_does_what_a_pod_of_the_cluster_index_leaves() -> None:
    store = ReplicaStore(ClusterIndex(holder_ttl_s=60), max_age_s=60)
    store.add_holder(make_pod(POD), GENERATION)
    store.mark_current(0.0)
    facts = HolderFacts(url=make_pod(POD).url, ahead_tokens=1)
    keys = hash_ahead(prefix(PROMPT).hashes, token_array(PROMPT), BLOCK, 1)
    changes = [[], [BlockChange(Tier.GPU, True, keys)], [BlockChange(Tier.GPU, False, keys[4:])]]
    found = []
    for seq, changed in enumerate(changes):
        kind = EntryKind.CHANGE if seq else EntryKind.EMPTY
        entry = LogEntry(kind=kind, holder="a", epoch=1, seq=seq, facts=facts, changes=changed)
        assert store.apply_entry(GENERATION, entry, 0.0)
        if not seq:
            store.confirm(store.predict(POD, prefix(PROMPT), ttl_s=30.0, capacity_blocks=None), 0.0)
        found.append(expected(store, PROMPT, 0.1))
    assert found == [80, 80, 64]
