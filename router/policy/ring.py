"""Consistent hashing of requests onto pods, over the points of uhashring.

A key moves only onto a pod that was added, or away from one that was removed. A pod's points do not depend on other
pods, so one ring of the whole fleet serves every request: pods that may not serve it are skipped. Also the rendezvous
score that breaks ties. Load is not considered here.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import md5
from itertools import chain
from typing import Any

import numpy as np
import xxhash
from uhashring import HashRing

from router.types import FleetSnapshot, PodId, Scene

KEY_BLOCKS_BEYOND_SHARED = 2
"""One block more would separate the turns of a conversation, one less would not separate tenants."""
SNAPSHOTS = 8
"""Fleet snapshots whose ring is cached."""

_position = HashRing(hash_fn="ketama").hashi
_HALF = np.uint64(32)


class PodRing:
    """The points of a set of pods. O(points) to build."""

    def __init__(self, pods: Iterable[PodId], points_per_pod: int) -> None:
        self._pods = sorted(pods)
        points = [pod_points(pod, points_per_pod) for pod in self._pods]
        owners = np.repeat(np.arange(len(points), dtype=np.uint64), [len(each) for each in points])
        # One sort of (position, owner) in one number: numpy sorts these thirty times as fast as indices by position.
        order = np.concatenate(points).astype(np.uint64) << _HALF | owners
        order.sort()
        self._positions = array("I", (order >> _HALF).astype(np.uint32).tobytes())
        self._owners = array("I", order.astype(np.uint32).tobytes())

    def walk(self, key: int) -> Iterator[PodId]:
        """All pods in ring order from `key`. O(log points) for the first one, O(1) for each of the next."""
        seen: set[int] = set()
        first = bisect(self._positions, _position(str(key)))
        for at in chain(range(first, len(self._owners)), range(first)):
            owner = self._owners[at]
            if owner not in seen:
                seen.add(owner)
                yield self._pods[owner]


@lru_cache(maxsize=SNAPSHOTS)
def fleet_ring(fleet: FleetSnapshot, points_per_pod: int) -> PodRing:
    """The ring of all pods of the fleet, in any state. Built when a pod joins or leaves."""
    return _ring(tuple(status.pod.id for status in fleet.pods), points_per_pod)


_ring = lru_cache(maxsize=SNAPSHOTS)(PodRing)


@lru_cache(maxsize=4096)
def pod_points(pod: PodId, points_per_pod: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The positions of one pod, those of uhashring's "ketama": four of each of `points_per_pod` digests.

    uhashring computes each digest four times and sorts after each position, which takes eight times as long."""
    named = md5(f"{pod}-".encode(), usedforsecurity=False)
    digests = bytearray()
    for number in range(points_per_pod):
        digest = named.copy()
        digest.update(b"%d" % number)
        digests += digest.digest()
    return np.frombuffer(digests, np.dtype("<u4"))


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


def tie_key_source(scene: Scene) -> str:
    """What `tie_key` is a hash of, in words and without its value."""
    if scene.prompt is not None and len(scene.prompt.hashes) > scene.shared_blocks:
        blocks = key_block(len(scene.prompt.hashes), scene.shared_blocks) + 1
        return f"the first {blocks * scene.prompt.block_size_tokens:,} prompt tokens"
    if scene.request.session:
        return "the session id (`edge.session_headers`, or `session_id` of the body)"
    return "the request id"


def rendezvous(key: int, pod: PodId) -> int:
    """Score of `pod` for `key`. The highest score wins; removing another pod never changes the winner."""
    return xxhash.xxh3_64_intdigest(pod.encode(), key & 0xFFFF_FFFF_FFFF_FFFF)


def _text_key(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())
