"""Which pods do operators keep from new requests? Drains by labels, each until it is ended.

Routers share them (`feeds/shared_rows.py`); `feeds/discovery/membership.py` applies them to pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from router.guards import MAX_AT_S
from router.types import Pod, PodId

LABELS = ("pod", "host", "rack", "zone", "pool", "hardware", "engine", "role")
"""What a drain may name: `pod` is the id, the others are fields of the pod."""
MAX_DRAINS, MAX_CHARACTERS = 100, 256


class Drain(msgspec.Struct, frozen=True):
    """Since the Unix time `at_s`. `by` is what its command says, not proof of who it was."""

    at_s: Annotated[float, Meta(ge=0, le=MAX_AT_S)]
    by: Annotated[str, Meta(max_length=MAX_CHARACTERS)]
    why: Annotated[str, Meta(max_length=MAX_CHARACTERS)] = ""


def selector_of(text: str) -> str:
    """The labels `NAME=VALUE,..` in the order in which a drain is known by them. Raises `ValueError`."""
    labels = sorted(label.strip() for label in text.split(","))
    for name, _, value in (label.partition("=") for label in labels):
        if name not in LABELS or not value or len(text) > MAX_CHARACTERS:
            raise ValueError(f"{text[:MAX_CHARACTERS]!r} must be NAME=VALUE,.. with names of {', '.join(LABELS)}")
    return ",".join(labels)


class Drains:
    """The drains in force, by selector."""

    def __init__(self) -> None:
        self.unshared: dict[str, Drain | None] = {}
        """Changes that other routers do not have yet; None: ended."""
        self._put({})

    def change(self, selector: str, drain: Drain | None) -> None:
        """Begin or end one. Raises `ValueError` if there are too many."""
        if drain and selector not in self.current and len(self.current) >= MAX_DRAINS:
            raise ValueError(f"{MAX_DRAINS} drains are in force; end some, or drain by a label that many pods have")
        self.unshared[selector] = drain
        self.replace(self.with_unshared(self.current))

    def replace(self, drains: Mapping[str, Drain]) -> bool:
        """Whether they are others than before."""
        is_changed = drains != self.current
        if is_changed:
            self._put(drains)
        return is_changed

    def forget(self, pod_id: PodId) -> None:
        """A pod is gone: its own drain was for that process."""
        if (selector := f"pod={pod_id}") in self.current:
            self.unshared[selector] = None
            self._put(self.with_unshared(self.current))

    def with_unshared(self, drains: Mapping[str, Drain]) -> dict[str, Drain]:
        return {selector: drain for selector, drain in {**drains, **self.unshared}.items() if drain}

    def reason(self, pod: Pod) -> str:
        """Why the pod gets no new requests; empty if it does. O(drains)."""
        labels = _labels(pod) if self._reasons else frozenset()
        return next((why for wanted, why in self._reasons if wanted <= labels), "")

    def reasons(self) -> dict[str, str]:
        """Who began each drain, when and why, by selector; also of those that no pod has."""
        return {selector: _reason(selector, drain) for selector, drain in self.current.items()}

    def _put(self, drains: Mapping[str, Drain]) -> None:
        self.current = drains
        self._reasons = [(frozenset(name.split(",")), _reason(name, drain)) for name, drain in drains.items()]


def selects(selector: str, pod: Pod) -> bool:
    return _labels(pod).issuperset(selector.split(","))


def _labels(pod: Pod) -> frozenset[str]:
    return frozenset(f"{name}={pod.id if name == 'pod' else getattr(pod, name)}" for name in LABELS)


def _reason(selector: str, drain: Drain) -> str:
    began = f"{datetime.fromtimestamp(drain.at_s, UTC):%Y-%m-%d %H:%M} UTC"
    return f"drained by {drain.by}, {began}, {selector}" + (f": {drain.why}" if drain.why else "")
