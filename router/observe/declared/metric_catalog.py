"""All metrics of routers and publishers, by chapter and by name."""

from __future__ import annotations

from types import ModuleType

from router.observe.declared import of_decisions, of_pods, of_pools, of_process, of_publisher, of_requests
from router.observe.declared.declaration import Declaration

CHAPTERS: tuple[ModuleType, ...] = (of_requests, of_decisions, of_pods, of_pools, of_process, of_publisher)


def declarations_of(chapter: ModuleType) -> list[Declaration]:
    """The metrics of one chapter, in the order of the file."""
    return [one for one in vars(chapter).values() if isinstance(one, Declaration)]


DECLARED = {one.name: one for chapter in CHAPTERS for one in declarations_of(chapter)}
"""By name of the family."""
