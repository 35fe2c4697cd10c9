"""Consistent hashing of requests onto pods, over uhashring.

A key moves only onto a pod that was added, or away from one that was removed. Also the rendezvous score that breaks
ties. Load is not considered here.
"""

from __future__ import annotations

from functools import lru_cache

import xxhash
from uhashring import HashRing

from router.types import PodId, Scene

KEY_BLOCKS_BEYOND_SHARED = 2
"""One block more would separate the turns of a conversation, one less would not separate tenants."""


@lru_cache(maxsize=256)
def _ring(pods: tuple[PodId, ...], points_per_pod: int) -> HashRing:
    return HashRing(nodes=list(pods), hash_fn="ketama", vnodes=points_per_pod)


def ring_order(key: int, pods: tuple[PodId, ...], points_per_pod: int) -> list[PodId]:
    """All pods in ring order from `key`. O(points walked)."""
    found = _ring(pods, points_per_pod).range(str(key), size=len(pods), unique=True)
    return [str(node["nodename"]) for node in found]


def affinity_key(scene: Scene) -> int | None:
    """A number that later requests of the same conversation or document have in common with this one: the hash of the
    block `key_block`, or the session key if the prompt has no blocks beyond the shared prefix; None without either."""
    if scene.prompt is None or len(scene.prompt.hashes) <= scene.shared_blocks:
        return session_key(scene)
    hashes = scene.prompt.hashes
    return hashes[key_block(len(hashes), scene.shared_blocks)]


def key_block(blocks: int, shared_blocks: int) -> int:
    """Index of the block whose hash is the affinity key of a prompt of that many full blocks, of which the first
    `shared_blocks` are shared by the traffic: `KEY_BLOCKS_BEYOND_SHARED` beyond these, or the last one."""
    return min(shared_blocks + KEY_BLOCKS_BEYOND_SHARED, blocks) - 1


def session_key(scene: Scene) -> int | None:
    """A hash of the session id; None without one."""
    return _text_key(scene.request.session) if scene.request.session else None


def tie_key(scene: Scene) -> int:
    """The affinity key, so that ties keep a conversation together; without one a hash of the request id."""
    key = affinity_key(scene)
    return _text_key(scene.request.id) if key is None else key


def rendezvous(key: int, pod: PodId) -> int:
    """Score of `pod` for `key`. The highest score wins; removing another pod never changes the winner."""
    return xxhash.xxh3_64_intdigest(pod.encode(), key & 0xFFFF_FFFF_FFFF_FFFF)


def _text_key(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())
