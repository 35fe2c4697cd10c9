"""A mock engine with windows, states or a drafter caches and announces what an engine does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.mock_engine.event_publisher import encode_batch
from router.index.hit_probe import CacheHabits
from tests.index.recorded_sessions import SESSIONS, Sent, requests
from tests.kit.layered_pool import DROPS, FULL, STATE, pod_of, served, window

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


DRAFTERS = json.loads((Path(__file__).parents[2] / "index/drafters.json").read_text())
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
