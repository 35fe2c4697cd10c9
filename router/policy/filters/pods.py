"""Which pods by name, and which not?"""

from __future__ import annotations

from fnmatch import fnmatchcase

from router.policy.match import Names
from router.policy.term import Filter
from router.types import PodStatus


class Pods(Filter):
    """Keeps the pods whose id is like one of `only` and like none of `without`: `*` stands for anything, `?` for one
    character, `[ab]` for one of these."""

    only: Names = ("*",)
    """Patterns of which one must hold."""
    without: Names | None = None
    """Patterns of which none may hold."""

    def keeps(self, status: PodStatus) -> bool:
        pod = status.pod.id
        return _like(pod, self.only) and not (self.without and _like(pod, self.without))


def _like(pod: str, patterns: Names) -> bool:
    return any(fnmatchcase(pod, pattern) for pattern in patterns)
