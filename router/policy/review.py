"""What would another policy have decided?

Decides scenes again and reports which choices differ, and which pods gain and lose requests. Both choices of a scene
are priced with the same terms, those that are time until the first token, so that policies with different terms can be
compared: as long as caches are what they were, so for the first requests after a reload, not for good. Used by the dry
run of a reload and by `warmroute replay`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import nlargest

import msgspec

from router.errors import RouterError
from router.policy.catalog import DELAYS
from router.policy.decide import decide, expected_ttft_ms
from router.policy.price import Choice, choice_of, price
from router.policy.spec import Policy, parse_policy
from router.types import Scene

YARDSTICK = parse_policy(
    {
        "name": "yardstick",
        "about": "The terms that are time until the first token.",
        "costs": {name: {} for name in sorted(DELAYS)},
        "picker": {"lowest_cost": {}},
    }
)


class Change(msgspec.Struct, frozen=True):
    """A request whose choice changes; None if it is refused."""

    request_id: str
    was: Choice | None
    now: Choice | None
    was_ms: float | None
    now_ms: float | None

    @property
    def change_ms(self) -> float:
        """How much later its first token is expected; 0 if one of the policies refuses it."""
        return self.now_ms - self.was_ms if self.now_ms is not None and self.was_ms is not None else 0.0


class Move(msgspec.Struct, frozen=True):
    """The number of requests that change from one choice to another."""

    was: str
    now: str
    requests: int


class Review(msgspec.Struct, frozen=True):
    """What changes between two policies."""

    policy: str
    decisions: int
    changed: int
    refused: int
    """Requests that the old policy serves and the new one refuses."""
    ttft_ratio: float
    """Mean expected time to first token of the scenes that both serve, relative to before: with the caches of then."""
    moves: tuple[Move, ...]
    """Most frequent first."""
    largest: tuple[Change, ...]
    """The changes with the largest difference in time."""

    def __str__(self) -> str:
        refused = f"; {self.refused:,} would be refused" if self.refused else ""
        return f"{self.changed:,} of {self.decisions:,} decisions would change{refused}"


def review(decided: Iterable[tuple[Scene, Choice | None, Policy]], name: str, *, limit: int = 10) -> Review:
    """What changes when each scene is decided by its policy instead of the choice made; `name` names these policies
    together. At most `limit` moves and changes are listed. O(scenes * a few decisions)."""
    rows = [_row(scene, was, chosen(scene, new)) for scene, was, new in decided]
    changed = [row for row in rows if row.was != row.now]
    both = [(row.was_ms, row.now_ms) for row in rows if row.was_ms is not None and row.now_ms is not None]
    before_ms, after_ms = (sum(times_ms) for times_ms in (zip(*both, strict=True) if both else ((), ())))
    moves = Counter((_name(row.was), _name(row.now)) for row in changed)
    return Review(
        policy=name,
        decisions=len(rows),
        changed=len(changed),
        refused=sum(row.now is None for row in changed),
        ttft_ratio=after_ms / before_ms if before_ms else 1.0,
        moves=tuple(Move(was, now, requests) for (was, now), requests in moves.most_common(limit)),
        largest=tuple(nlargest(limit, changed, key=lambda change: abs(change.change_ms))),
    )


def chosen(scene: Scene, policy: Policy) -> Choice | None:
    try:
        return choice_of(decide(scene, policy).candidates[0].plan)
    except RouterError:
        return None


def _row(scene: Scene, was: Choice | None, now: Choice | None) -> Change:
    costs = (price(scene, choice, YARDSTICK) if choice else None for choice in (was, now))
    was_ms, now_ms = (expected_ttft_ms(cost) if cost else None for cost in costs)
    return Change(scene.request.id, was, now, was_ms, now_ms)


def _name(choice: Choice | None) -> str:
    return str(choice) if choice else "refused"
