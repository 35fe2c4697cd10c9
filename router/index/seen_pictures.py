"""Which pods have seen which pictures?

An engine keeps what its processor and its encoder made of recent pictures, longer than their KV. Its events do not
announce that, so these are the pictures of prompts that the pods have answered: a guess, for a preference only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from router.types import FleetSnapshot, Pod, PodId, PromptPicture, ScenePicture

MAX_PICTURES = 8192
"""The pictures that were seen last."""
MAX_PODS = 32
"""Pods of one picture: those that saw it first since then are dropped first."""


class SeenPictures:
    """The pods that saw recent pictures. A pod that restarts has seen none."""

    def __init__(self) -> None:
        self._epochs: OrderedDict[int, dict[PodId, int]] = OrderedDict()
        """By key of the picture, the least recently seen first: the epoch of each pod when it saw it."""

    def saw(self, pod: Pod, pictures: Iterable[PromptPicture]) -> None:
        """The pod has computed a prompt with these pictures."""
        for picture in pictures:
            epochs = self._epochs.setdefault(picture.key, {})
            self._epochs.move_to_end(picture.key)
            epochs.pop(pod.id, None)
            epochs[pod.id] = pod.epoch
            if len(epochs) > MAX_PODS:
                del epochs[next(iter(epochs))]
        while len(self._epochs) > MAX_PICTURES:
            self._epochs.popitem(last=False)

    def seen(self, pictures: Iterable[PromptPicture], fleet: FleetSnapshot) -> tuple[ScenePicture, ...]:
        """The pictures of a prompt, each with the pods of the fleet that have seen it. O(pictures and their pods)."""
        now = {status.pod.id: status.pod.epoch for status in fleet.pods}
        return tuple([ScenePicture(one.end_token, one.token_count, self._pods(one.key, now)) for one in pictures])

    def _pods(self, key: int, now: dict[PodId, int]) -> tuple[PodId, ...]:
        epochs = self._epochs.get(key, {})
        return tuple([pod_id for pod_id, epoch in epochs.items() if now.get(pod_id) == epoch])
