"""Pods are asked by which rule they take cached tokens, and matched by it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from loadtest.engine_model.pod import SimPod, SimPodConfig, SimRequest
from router.errors import UpstreamTimeout
from router.feeds.self_test import MAX_TESTS, HitTest, SelfTestTiming
from router.hashing import generation_seed, hash_blocks, token_array
from router.index.hit_probe import CacheHabits
from router.stores.prefix_store import LocalStore
from router.types import (
    AttentionKind,
    BlocksCleared,
    BlocksStored,
    Generation,
    LayerType,
    Pod,
    PodLoad,
    PodState,
    PodStatus,
    PrefixTrust,
    PromptPrefix,
)
from tests.kit.deadlines import running, until
from tests.kit.fake_pods import watched
from tests.kit.layered_pool import layered
from tests.kit.scenes import LLAMA_8B, fleet_of, make_pod, pod

pytestmark = pytest.mark.anyio

BLOCK = 16
POD = pod("a")
GENERATION = Generation(model="m", block_size_tokens=BLOCK)
WINDOW = LayerType(AttentionKind.WINDOW, BLOCK, span_tokens=8 * BLOCK)
PLAIN, SPARSE, DROPPED, OTHER = [0, 15, 12, 10, 10], [0, 15, 0, 0, 10], [0, 14, 11, 9, 9], [0, 3, 1, 4, 1]
KNOWN = list(range(1000, 1000 + 8 * BLOCK))


class AnsweringPod:
    """Answers each test with the same blocks."""

    def __init__(self, blocks: Sequence[int] | None) -> None:
        self.blocks = blocks
        self.prompts: list[list[int]] = []

    async def post(self, _: Pod, _path: str, body: Mapping[str, Any], _timeout_s: float) -> bytes:
        number = len(self.prompts) % 5
        self.prompts.append(body["prompt"])
        details = None if self.blocks is None else {"cached_tokens": BLOCK * self.blocks[number]}
        return json.dumps({"usage": {"prompt_tokens": 1, "prompt_tokens_details": details}}).encode()


class AnnouncingPod:
    """An engine whose events arrive before its answers, or not at all."""

    def __init__(self, store: LocalStore, groups: Sequence[LayerType], habits: CacheHabits, announces: bool) -> None:
        config = SimPodConfig(speed=LLAMA_8B, new_pool=layered(groups, habits))
        self.pod, self.store, self.announces = SimPod(config), store, announces

    async def post(self, _: Pod, _path: str, body: Mapping[str, Any], _timeout_s: float) -> bytes:
        self.pod.submit(SimRequest(id="one", prompt=token_array(body["prompt"]), output=[1]))
        cached = 0
        while self.pod.start_step() is not None:
            step = self.pod.end_step()
            cached = step.started.get("one", cached)
            if self.announces:
                self.store.apply("a", step.events)
        details = {"cached_tokens": cached}
        return json.dumps({"usage": {"prompt_tokens": 1, "prompt_tokens_details": details}}).encode()


def store_of(*, windows: bool = False) -> LocalStore:
    """A store whose pod has announced one prompt."""
    store = LocalStore()
    store.add_holder(pod("a"), GENERATION)
    hashes = tuple(range(1, 9))
    if windows:
        store.apply("a", [BlocksStored(block_hashes=hashes, group=1, layers=WINDOW)])
    store.apply("a", [BlocksStored(block_hashes=hashes, tokens=KNOWN, block_size_tokens=BLOCK)])
    return store


async def answered(engine: AnsweringPod | AnnouncingPod, store: LocalStore) -> bool | None:
    fleet = fleet_of(POD)
    feed = HitTest(fleet, store, engine.post, lambda _: True, SelfTestTiming())
    return await feed.test(fleet.snapshot.pods[0].pod)


def feed_of(engine: AnsweringPod, store: LocalStore) -> HitTest:
    fleet = fleet_of(POD)
    fleet.trust("a", PrefixTrust.TRUSTED, "")
    return HitTest(fleet, store, engine.post, lambda _: True, SelfTestTiming(retest_s=0.01))


def hit_blocks(store: LocalStore, tokens: Sequence[int]) -> int:
    hashes = hash_blocks(token_array(tokens), BLOCK, generation_seed(GENERATION))
    return sum(store.match(PromptPrefix(GENERATION, token_array(tokens), hashes), 0.0).blocks.get("a", (0,)))


async def test_the_prompts_share_what_the_test_says_and_nothing_else() -> None:
    engine = AnsweringPod(PLAIN)
    await answered(engine, store_of())
    first, again, cut, other, another = engine.prompts
    assert [len(prompt) for prompt in engine.prompts] == [248, 248, 193, 240, 240]
    assert first == again and first[:193] == cut
    assert first[:160] == other[:160] == another[:160]
    assert len({first[160], other[160], another[160]}) == 3


@pytest.mark.parametrize(
    ("windows", "answers", "hits"),
    [
        (False, PLAIN, "full"),
        (False, DROPPED, "full, drops a block"),
        (True, SPARSE, "full + window 128, checkpoints"),
        (True, PLAIN, "full + window 128"),
        (True, OTHER, "full + window 128, upper bound"),
        (True, None, "full + window 128, by events"),
    ],
)
async def test_a_pods_hits_are_named_as_it_answered(windows: bool, answers: list[int] | None, hits: str) -> None:
    store = store_of(windows=windows)
    assert await answered(AnsweringPod(answers), store)
    assert store.cache_of("a").hits == hits


async def test_a_pod_whose_drafter_drops_a_block_is_matched_with_one_block_less() -> None:
    store, prompt = store_of(), [*KNOWN, *range(40)]
    assert hit_blocks(store, prompt) == 8
    await answered(AnsweringPod(DROPPED), store)
    assert hit_blocks(store, prompt) == 7


SHORT = LayerType(AttentionKind.WINDOW, BLOCK, span_tokens=3 * BLOCK)
FULL = LayerType(AttentionKind.FULL, BLOCK)


@pytest.mark.parametrize(
    ("groups", "drafter_layer", "learnt", "announces"),
    [
        ((WINDOW, FULL), -1, (True, True), True),
        ((WINDOW, FULL), 0, (True, False), True),
        ((FULL, WINDOW), 1, (False, True), True),
        ((FULL, WINDOW), 1, (False, True), False),
        ((WINDOW, WINDOW, FULL), 0, (True, False), True),
        ((WINDOW, FULL, SHORT), 0, (True, False, False), True),
        ((WINDOW, FULL), 0, (True, True), False),
    ],
)
async def test_which_layers_need_the_dropped_block_shows_in_what_the_pod_announces(
    groups: Sequence[LayerType], drafter_layer: int, learnt: tuple[bool, ...], announces: bool
) -> None:
    """Or in the answers, if full attention does not need it: it has more of a shared prefix than a hit may end at."""
    store = LocalStore()
    store.add_holder(pod("a"), GENERATION)
    for at, one in enumerate(groups):
        layers = None if one.kind is AttentionKind.FULL else one
        tokens = () if layers else KNOWN
        stored = BlocksStored(
            block_hashes=tuple(range(1, 9)),
            tokens=tokens,
            block_size_tokens=BLOCK if tokens else 0,
            group=at,
            layers=layers,
        )
        store.apply("a", [stored])
    habits = CacheHabits(drops_block=True, drafter_layer=drafter_layer)
    assert await answered(AnnouncingPod(store, groups, habits, announces), store)
    rule = store.cache_of("a").rule
    assert rule is not None and tuple(one.drops_block for one in rule.types) == learnt
    assert store.cache_of("a").hits.endswith("drops a block")


async def test_what_was_learnt_outlives_a_cleared_cache_and_ends_with_the_pods_life() -> None:
    store = store_of()
    await answered(AnsweringPod(DROPPED), store)
    store.apply("a", [BlocksCleared(), BlocksStored(block_hashes=(1,), tokens=KNOWN[:BLOCK], block_size_tokens=BLOCK)])
    assert store.cache_of("a").hits == "full, drops a block"
    assert hit_blocks(store, [*KNOWN[:BLOCK], *range(40)]) == 0
    store.forget("a")
    store.add_holder(pod("a"), GENERATION)
    assert store.cache_of("a").hits == "full, by events"


async def test_a_busy_pod_is_tested_again_as_often_as_it_takes() -> None:
    """Answers that come too late prove nothing."""

    class BusyPod(AnsweringPod):
        timeouts = 2 * MAX_TESTS

        async def post(self, *request: Any) -> bytes:
            if self.timeouts:
                self.timeouts -= 1
                raise UpstreamTimeout("late")
            return await super().post(*request)

    engine, store = BusyPod(DROPPED), store_of()
    feed = feed_of(engine, store)
    async with running(watched(feed.fleet, feed.check)):
        await until(lambda: store.cache_of("a").hits == "full, drops a block")


async def test_a_pod_is_tested_again_before_its_hits_count_as_unexplained() -> None:
    engine, store = AnsweringPod(OTHER), store_of(windows=True)
    feed = feed_of(engine, store)
    async with running(watched(feed.fleet, feed.check)):
        await until(lambda: "upper bound" in store.cache_of("a").hits)
    assert len(engine.prompts) == 5 * MAX_TESTS


@pytest.mark.parametrize(
    ("load", "is_tested"), [(PodLoad(), True), (PodLoad(waiting=1), False), (PodLoad(kv_usage=0.9), False)]
)
def test_a_pod_is_tested_when_it_has_little_to_do(load: PodLoad, is_tested: bool) -> None:
    feed = feed_of(AnsweringPod(PLAIN), store_of())
    assert feed.may_test(PodStatus(pod("a"), PodState.READY, load)) is is_tested


@pytest.mark.parametrize("trust", [PrefixTrust.UNTESTED, PrefixTrust.MISMATCH])
def test_a_pod_with_other_hashes_is_not_tested(trust: PrefixTrust) -> None:
    feed = feed_of(AnsweringPod(PLAIN), store_of())
    assert not feed.may_test(PodStatus(make_pod("a", trust=trust), PodState.READY))
