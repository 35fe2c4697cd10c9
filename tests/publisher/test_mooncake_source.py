"""Changes of a Mooncake store, derived from the names that its master lists."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ConnectFailed
from router.index.holder_blocks import HolderBlocks
from router.publisher.mooncake_source import Listing, MooncakeSource, ObjectName, parse_name
from router.types import BlocksRemoved, BlocksStored, Generation, Tier
from tests.kit.sinks import RecordingSink

POOL = "tiny"


def digest(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def vllm(number: int, *, rank: int = 0, group: int = 0, pool: str = POOL) -> str:
    return f"{pool}@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:{group}@{digest(number)}"


def hash_of(number: int) -> int:
    return int(digest(number)[-16:], 16)


# --- names ---


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        (
            "tiny-llama@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"
            "4340f30e2c36586e978c49cf4e8722a55b3c2b9abf245e0b485b2d0bf32cd206",  # as vLLM 0.32.0 named it
            ObjectName("tiny-llama", 0x485B2D0BF32CD206, "0@pcp0@dcp0@pp_rank:0"),
        ),
        (
            "prod@org/model@store_tp:4@store_pp:1@store_format:lbhnc@tp_rank:3@pcp0@dcp1@pp_rank:2@group:1@"
            "00112233445566778899aabbccddeeff",
            ObjectName(
                "prod@org/model@store_tp:4@store_pp:1@store_format:lbhnc",
                0x8899AABBCCDDEEFF,
                "3@pcp0@dcp1@pp_rank:2",
                1,
            ),
        ),
        (f"Qwen-Qwen3_{digest(1)}_0_k", ObjectName("Qwen-Qwen3", int(digest(1)[:16], 16), "0_k")),
        (f"tag_Qwen-Qwen3_{digest(1)}_3_1_v", ObjectName("tag_Qwen-Qwen3", int(digest(1)[:16], 16), "3_1_v")),
        (f"{digest(1)}_k", ObjectName("", int(digest(1)[:16], 16), "k")),
        (f"deepseek_{digest(1)}__k", ObjectName("deepseek", int(digest(1)[:16], 16), "_k")),
        (f"deepseek_{digest(1)}_1_k", ObjectName("deepseek", int(digest(1)[:16], 16), "1_k")),
    ],
    ids=["vllm", "vllm sharded", "hicache", "hicache pp", "hicache mla old", "hicache mla", "hicache mla pp"],
)
def test_names_of_vllm_and_sglang_are_parsed(name: str, meaning: ObjectName) -> None:
    """vLLM's events carry the last eight bytes of a digest, SGLang's the first."""
    assert parse_name(name) == meaning


@pytest.mark.parametrize(
    "name",
    [
        "",
        "sglang_mooncake_store_warmup_key1f",
        f"m_{digest(1)}_0_draft_k",
        f"m_{digest(1)}_0_temporal",
        f"m_{digest(1)[1:]}_0_k",
        f"tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{digest(1)}x",
        f"tiny@tp_rank:x@pcp0@dcp0@pp_rank:0@group:0@{digest(1)}",
        "@" * 4000,
        "_" * 4000,
    ],
)
def test_other_names_are_ignored(name: str) -> None:
    """Warm-up objects, side pools, objects of other programs."""
    assert parse_name(name) is None


# --- differences ---


def held_after(listing: Listing, held: set[int], names: Iterable[str]) -> set[int]:
    """The blocks that a reader has after these events."""
    for event in listing.update(names):
        assert isinstance(event, BlocksStored | BlocksRemoved)
        named = set(event.block_hashes)
        assert len(named) == len(event.block_hashes)
        assert event.tier is Tier.REMOTE
        if isinstance(event, BlocksStored):
            assert not named & held
            held = held | named
        else:
            assert named <= held
            held = held - named
    return held


def test_differences_become_stored_and_removed_events() -> None:
    """Hashes without tokens."""
    listing = Listing(POOL)
    stored = BlocksStored(
        block_hashes=(hash_of(1),), parent_hash=None, tokens=(), block_size_tokens=0, tier=Tier.REMOTE
    )
    assert listing.update([vllm(1)]) == [stored]
    assert listing.update([vllm(1)]) == []
    assert listing.update([vllm(2)])[0] == BlocksRemoved(block_hashes=(hash_of(1),), tier=Tier.REMOTE)


def test_a_block_is_held_only_with_all_its_parts() -> None:
    """A single rank's part cannot be loaded."""
    listing = Listing(POOL)
    both = [vllm(1, rank=0), vllm(1, rank=1)]
    held = held_after(listing, set(), both)
    assert held == {hash_of(1)}
    held = held_after(listing, held, [*both, vllm(2, rank=1)])
    assert held == {hash_of(1)}
    held = held_after(listing, held, [both[0], vllm(2, rank=1), vllm(2, rank=0)])
    assert held == {hash_of(2)}


def test_keys_and_values_are_two_parts() -> None:
    """As in SGLang."""
    listing = Listing("m")
    held = held_after(listing, set(), [f"m_{digest(1)}_0_k", f"m_{digest(1)}_0_v", f"m_{digest(2)}_0_k"])
    assert held == {int(digest(1)[:16], 16)}


def test_a_new_part_is_required_of_all_blocks() -> None:
    """Before it, the second rank is unknown."""
    listing = Listing(POOL)
    held = held_after(listing, set(), [vllm(1), vllm(2)])
    held = held_after(listing, held, [vllm(1), vllm(2), vllm(2, rank=1)])
    assert held == {hash_of(2)}


def test_other_pools_and_groups_are_ignored() -> None:
    """Engines of other models may use the same hashes."""
    assert Listing(POOL).update([vllm(1, pool="other"), vllm(1, group=1), "garbage"]) == []
    assert Listing(POOL, group=1).update([vllm(1, group=1), vllm(2)])[0] == BlocksStored(
        block_hashes=(hash_of(1),), parent_hash=None, tokens=(), block_size_tokens=0, tier=Tier.REMOTE
    )


def test_a_store_block_resolves_to_the_block_that_a_pod_announced() -> None:
    pod, listing = HolderBlocks(Generation(model="m", block_size_tokens=2)), Listing(POOL)
    pod.apply(BlocksStored(block_hashes=(hash_of(1),), parent_hash=None, tokens=(1, 2), block_size_tokens=2))
    store = HolderBlocks(pod.generation, resolve_hash=pod.blocks_of)
    for event in listing.update([vllm(1)]):
        assert isinstance(event, BlocksStored | BlocksRemoved)
        store.apply(event)
    assert store.held() == {Tier.REMOTE: list(pod.blocks_of(hash_of(1)) or ())}
    for event in listing.update([]):
        assert isinstance(event, BlocksStored | BlocksRemoved)
        store.apply(event)
    assert store.held() == {}


_OBJECTS = st.lists(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=12), max_size=6)


@given(_OBJECTS)
def test_the_differences_add_up_to_the_last_listing(polls: list[set[tuple[int, int]]]) -> None:
    """For any sequence of listings with known parts."""
    listing, held = Listing(POOL), set[int]()
    everything = [vllm(9, rank=rank) for rank in range(3)]
    for objects in [set[tuple[int, int]](), *polls]:
        held = held_after(listing, held, [*everything, *(vllm(number, rank=rank) for number, rank in objects)])
        whole = {number for number, _ in objects if {(number, rank) for rank in range(3)} <= objects}
        assert held == {hash_of(number) for number in whole | {9}}
        assert listing.held_blocks == len(held)


# --- polling ---


async def calls_after(*answers: Callable[[], bytes]) -> list[str]:
    """The sink's calls after these responses of the master."""
    sink, coming = RecordingSink(), iter(answers)

    async def get_url(url: str, _timeout_s: float) -> bytes:
        assert url == "http://master:9003/get_all_keys"
        return next(coming)()

    source = MooncakeSource("pool", "http://master:9003/", Listing(POOL), sink, get_url, 2.0)
    for _ in answers:
        await source.poll()
    return sink.said


def lists(*names: str) -> Callable[[], bytes]:
    """The master's response: one name per line, an empty body for none."""
    return lambda: "".join(f"{name}\n" for name in names).encode()


def refuses() -> bytes:
    raise ConnectFailed("refused", pod="")


@pytest.mark.anyio
async def test_without_an_answer_only_the_state_changes() -> None:
    """The next response yields the difference to the last one."""
    said = await calls_after(
        lists(vllm(1), vllm(2)), refuses, refuses, lists(vllm(2), vllm(3)), lists(vllm(2), vllm(3))
    )
    assert said == [
        *("BlocksStored 2", "complete=True", "complete=False"),
        *("BlocksRemoved 1", "BlocksStored 1", "complete=True"),
    ]


@pytest.mark.anyio
async def test_an_emptied_store_is_a_restart() -> None:
    assert await calls_after(lists(vllm(1)), lists(), lists(), lists(vllm(1))) == [
        *("BlocksStored 1", "complete=True", "restarted", "BlocksStored 1"),
    ]


@pytest.mark.anyio
async def test_an_empty_store_is_complete() -> None:
    assert await calls_after(lists()) == ["complete=True"]
