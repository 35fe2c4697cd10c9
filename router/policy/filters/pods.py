"""Which pods by name, and which not?"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import translate
from functools import lru_cache

from pydantic import model_validator

from router.policy.match import Names
from router.policy.term import Filter
from router.types import PodStatus


class Pods(Filter):
    """Keeps the pods whose id is like one of `only` and like none of `without`: `*` stands for anything, `?` for one
    character, `[ab]` for one of these."""

    only: Names | None = None
    """Patterns of which one must hold; null for any pod."""
    without: Names | None = None
    """Patterns of which none may hold."""

    @model_validator(mode="after")
    def _says_something(self) -> Pods:
        if self.only is None and self.without is None:
            raise ValueError("say `only` or `without`")
        return self

    def keeps(self, status: PodStatus) -> bool:
        pod = status.pod.id
        return (self.only is None or bool(_like(self.only)(pod))) and not (self.without and _like(self.without)(pod))


@lru_cache(maxsize=256)
def _like(patterns: Names) -> Callable[[str], object]:
    """Truthy for a name that one of them fits. Compiled once: it is asked for every pod of every request."""
    return re.compile("|".join(map(translate, patterns))).match
