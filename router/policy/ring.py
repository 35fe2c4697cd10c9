"""Where does a key lie on the ring of pods?

A thin face of uhashring: preference orders that move a key only onto a pod that was added, and only away from one
that was removed. Also the rendezvous score that breaks ties. This file never looks at load.
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
    """All pods, in the order in which the ring is walked from `key`. O(points walked)."""
    found = _ring(pods, points_per_pod).range(str(key), size=len(pods), unique=True)
    return [str(node["nodename"]) for node in found]


def affinity_key(scene: Scene) -> int | None:
    """What later requests of the same conversation or document will share with this one, as one number.

    The hash of the block `key_block`. The session's key if the prompt has no blocks beyond the shared prefix.
    """
    if scene.prompt is None or len(scene.prompt.hashes) <= scene.shared_blocks:
        return session_key(scene)
    hashes = scene.prompt.hashes
    return hashes[key_block(len(hashes), scene.shared_blocks)]


def key_block(blocks: int, shared_blocks: int) -> int:
    """Index of the block whose hash is the affinity key of a prompt of that many full blocks, of which the first
    `shared_blocks` are shared by the traffic: `KEY_BLOCKS_BEYOND_SHARED` beyond these, or the last one."""
    return min(shared_blocks + KEY_BLOCKS_BEYOND_SHARED, blocks) - 1


def session_key(scene: Scene) -> int | None:
    """The session's id as a number; None where the client gave none."""
    return _text_key(scene.request.session) if scene.request.session else None


def tie_key(scene: Scene) -> int:
    """What breaks ties: the affinity key, so that equal prices still keep a conversation together; else the id."""
    key = affinity_key(scene)
    return _text_key(scene.request.id) if key is None else key


def rendezvous(key: int, pod: PodId) -> int:
    """Score of `pod` for `key`: the highest wins, and removing another pod never changes the winner."""
    return xxhash.xxh3_64_intdigest(pod.encode(), key & 0xFFFF_FFFF_FFFF_FFFF)


def _text_key(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())
