"""A pod whose layers do not all need every earlier token caches what an engine caches."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.hashing import generation_seed, hash_blocks, token_array
from router.sim.virtual.layered_pod import LayeredPod, new_pod
from router.sim.virtual.traffic import TrafficRequest
from router.sim.virtual.virtual_job import Job
from router.sim.virtual.virtual_pod import KvGroup, VirtualPod, VirtualPodConfig
from router.types import AttentionKind, BlockChange, Generation
from tests.index.test_hybrid_sessions import SESSIONS, Sent, requests
from tests.sim.virtual.test_virtual_pod import BLOCK, SPEED, ask, drive_virtual

FULL, STATE = KvGroup(AttentionKind.FULL), KvGroup(AttentionKind.STATE)
MODELS = {
    "gpt-oss": (KvGroup(AttentionKind.WINDOW, 9), FULL),
    "gemma": (*[KvGroup(AttentionKind.WINDOW, 14)] * 3, FULL),
    "qwen3-next": (STATE, STATE, FULL),
    "full first": (FULL, KvGroup(AttentionKind.WINDOW, 5)),
    "two windows": (KvGroup(AttentionKind.WINDOW, 6), FULL, KvGroup(AttentionKind.WINDOW, 17)),
}
models = st.sampled_from(sorted(MODELS))


def layered(groups: tuple[KvGroup, ...], kv_tokens: int = 100_000, block: int = BLOCK, budget: int = 32) -> VirtualPod:
    config = VirtualPodConfig(
        speed=SPEED, kv_tokens=kv_tokens, engine_block_tokens=block, step_budget_tokens=budget, kv_groups=groups
    )
    return new_pod(config, block)


# --- recorded on engines ---

RECORDED = {
    "gemma3: 5 window groups of 128, 1 full": ((*[KvGroup(AttentionKind.WINDOW, 128)] * 5, FULL), 32, 10_000),
    "gpt-oss: window 128, full; turns, shared prefix, cuts": ((KvGroup(AttentionKind.WINDOW, 128), FULL), 32, 10_000),
    "gpt-oss, pool of 75 blocks: eviction": ((KvGroup(AttentionKind.WINDOW, 128), FULL), 32, 75),
    "qwen3-next: 3 mamba groups, full": ((STATE, STATE, STATE, FULL), 128, 10_000),
}


def recorded_request(sent: Sent, output: Sequence[int], block: int) -> TrafficRequest:
    seed = generation_seed(Generation(model="m", block_size_tokens=block, salt=sent.salt))
    hashes = hash_blocks(token_array(sent.prompt + list(output[:-1])), block, seed)
    return TrafficRequest(len(sent.prompt), len(output), hashes, len(sent.prompt) // block)


@pytest.mark.parametrize("session", [one for one in SESSIONS if one["name"] in RECORDED], ids=lambda one: one["name"])
def test_a_recorded_session_caches_what_the_engine_cached(session: dict[str, Any]) -> None:
    groups, block, blocks = RECORDED[session["name"]]
    pod = layered(groups, blocks * block, block, budget=8192)
    asked = [
        recorded_request(sent, step["output"], block)
        for sent, step in zip(requests(session), session["steps"], strict=True)
    ]
    cached = [drive_virtual(pod, [(at * 1e6, one)])[0][2] for at, one in enumerate(asked)]
    assert cached == [step["cached_tokens"] for step in session["steps"]]
