"""A mock engine with windows, states or a drafter caches and announces what an engine does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.engine_model.pod import SimPod, SimPodConfig, SimRequest
from loadtest.mock_engine.event_publisher import encode_batch
from router.hashing import generation_seed, hash_blocks, token_array
from router.index.blockmap import BlockMap
from router.index.hit_probe import CacheHabits
from router.types import AttentionKind, Generation, KvEvent, LayerType, PromptPrefix
from tests.examples import examples
from tests.index.decoding import decode_batch
from tests.index.recorded_sessions import SESSIONS, Sent, requests
from tests.kit.scenes import LLAMA_8B
from tests.sim.layered_pool import layered

POD, BLOCK = "pod", 4
FULL, STATE = LayerType(AttentionKind.FULL, 0), LayerType(AttentionKind.STATE, 0)
DROPS, DENSE, AHEAD = CacheHabits(drops_block=True), CacheHabits(is_dense=True), CacheHabits(looks_ahead=True)


def window(tokens: int) -> LayerType:
    return LayerType(AttentionKind.WINDOW, 0, tokens)


def pod_of(groups: Sequence[LayerType], habits: CacheHabits, block: int, num_blocks: int = 10_000) -> SimPod:
    pool = layered(groups, habits)
    return SimPod(SimPodConfig(speed=LLAMA_8B, block_size_tokens=block, num_blocks=num_blocks, new_pool=pool))


def served(pod: SimPod, prompt: Sequence[int], output: Sequence[int], salt: str = "") -> tuple[int, list[KvEvent]]:
    """The cached tokens of a request that runs alone, and its events."""
    pod.submit(SimRequest(id="one", prompt=token_array(prompt), output=output, salt=salt))
    cached, events = 0, list[KvEvent]()
    while pod.start_step() is not None:
        step = pod.end_step()
        cached = step.started.get("one", cached)
        events += step.events
    return cached, events


# --- recorded on engines ---

RECORDED = {
    "gemma3: 5 window groups of 128, 1 full": ((*[window(128)] * 5, FULL), 32),
    "gpt-oss: window 128, full; turns, shared prefix, cuts": ((window(128), FULL), 32),
    "qwen3-next: 3 mamba groups, full": ((STATE, STATE, STATE, FULL), 128),
    "mistral: one window group, no full": ((window(128),), 32),
}
KNOWN = [one for one in SESSIONS if one["name"] in RECORDED]


def test_a_drafter_keeps_what_a_longer_prompt_hits() -> None:
    """Computed by the cache manager of vLLM 0.32: a prompt of whole blocks is continued, then sent again."""
    pod, prompt = pod_of((window(128), FULL), DROPS, 16), list(range(256))
    longer = prompt + list(range(500, 540))
    assert [served(pod, one, [1])[0] for one in (prompt, longer, prompt)] == [0, 240, 240]


DRAFTERS = json.loads((Path(__file__).parents[1] / "index/drafters.json").read_text())
"""By layers and drafter, requests that vLLM 0.32 decided (tests/live/manager_histories.py)."""
LAYERS = {
    "full": (FULL,),
    "states and full": (STATE, FULL),
    "full and windows": (FULL, window(64)),
    "windows and full": (window(64), FULL),
}
DRAFTER_LAYERS = {"full and windows, MTP": 1, "windows and full, MTP": 0}


@pytest.mark.parametrize("family", DRAFTERS)
def test_a_drafter_changes_hits_and_what_windows_keep_as_in_the_engines_manager(family: str) -> None:
    habits = CacheHabits(drops_block=True, drafter_layer=DRAFTER_LAYERS.get(family, -1))
    pod, recorded = pod_of(LAYERS[family.rsplit(",", 1)[0]], habits, 16), DRAFTERS[family]
    answers = [served(pod, sent["prompt"], [1]) for sent in recorded]
    assert [cached for cached, _ in answers] == [sent["cached_tokens"] for sent in recorded]
    announced_first = [bytes.fromhex(one) for one in recorded[0]["batches"]]
    assert sums([encode_batch(answers[0][1], "map", 0.0)]) == sums(announced_first)


def announced(batch: bytes) -> Iterator[tuple[int, str, int | None, int, int]]:
    """Yields the group, kind, window, and numbers of hashes and tokens of each stored event."""
    for event in msgspec.msgpack.decode(batch)[1]:
        if event["type"] == "BlockStored":
            kind, span = event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window")
            yield event["group_idx"], kind, span, len(event["block_hashes"]), len(event["token_ids"])


def sums(batches: Sequence[bytes]) -> Counter[tuple[object, ...]]:
    """What a request stores in each group: an engine computes a prompt in two steps where a checkpoint is inside."""
    found = Counter[tuple[object, ...]]()
    for batch in batches:
        for group, kind, span, hashes, tokens in announced(batch):
            found[group, kind, span, "hashes"] += hashes
            found[group, kind, span, "tokens"] += tokens
    return +found


def sent_with_output(session: dict[str, Any]) -> Iterator[tuple[Sent, list[int]]]:
    return zip(requests(session), [step["output"] for step in session["steps"]], strict=True)


@pytest.mark.parametrize("session", KNOWN, ids=lambda one: one["name"])
def test_a_recorded_session_caches_and_announces_what_the_engine_did(session: dict[str, Any]) -> None:
    groups, block = RECORDED[session["name"]]
    pod = pod_of(groups, CacheHabits(), block)
    for sent, output in sent_with_output(session):
        cached, events = served(pod, sent.prompt, output, sent.salt)
        assert cached == sent.cached_tokens
        assert sums([encode_batch(events, "map", 0.0)]) == sums(sent.batches)


# --- random sessions, of engines that no one has recorded ---

MODELS: dict[str, tuple[Sequence[LayerType], CacheHabits]] = {
    "full": ((FULL,), CacheHabits()),
    "full, dense windows": ((window(9), FULL), DENSE),
    "window": ((window(9), FULL), CacheHabits()),
    "windows and a state": ((window(9), window(9), FULL, STATE), CacheHabits()),
    "full, drops": ((FULL,), DROPS),
    "window, drops": ((window(9), FULL), DROPS),
    "window, full alone drops": ((window(9), FULL), CacheHabits(drops_block=True, drafter_layer=0)),
    "state, drops": ((STATE, FULL), DROPS),
    "full, looks ahead": ((FULL,), AHEAD),
    "window, looks ahead": ((window(14), FULL), AHEAD),
    "state, looks ahead": ((STATE, FULL), AHEAD),
}
prompts = st.tuples(st.integers(1, 2), st.integers(1, 40), st.integers(0, 30), st.integers(0, 2)).map(
    lambda shape: [shape[0]] * shape[1] + [10 * shape[0] + shape[3]] * shape[2]
)
turns = st.lists(st.tuples(prompts, st.integers(1, 12)), min_size=1, max_size=12)


def expected_hit(blocks: BlockMap, prompt: Sequence[int]) -> int:
    generation, tokens = Generation(model="m", block_size_tokens=BLOCK), token_array(prompt)
    prefix = PromptPrefix(generation, tokens, hash_blocks(tokens, BLOCK, generation_seed(generation)))
    held = sum(blocks.match(prefix).get(POD, (0,)))
    return BLOCK * min(held, (len(prompt) - 1) // BLOCK)


@examples(150)
@given(st.sampled_from(sorted(MODELS)), turns, st.sampled_from([60, 120, 10_000]))
def test_the_index_expects_what_the_engine_reports(
    model: str, history: list[tuple[list[int], int]], num_blocks: int
) -> None:
    """In every request, with shared starts, cuts and evictions, once it knows what the events do not say."""
    groups, habits = MODELS[model]
    pod, blocks = pod_of(groups, habits, BLOCK, num_blocks), BlockMap()
    blocks.add_holder(POD, Generation(model="m", block_size_tokens=BLOCK))
    blocks.learn(POD, habits)
    for prompt, answer in history:
        expected = expected_hit(blocks, prompt)
        cached, events = served(pod, prompt, range(100, 100 + answer))
        assert cached == expected
        for event in decode_batch(encode_batch(events, "map", 0.0)):
            blocks.apply(POD, event)
