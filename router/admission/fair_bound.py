"""Divides a limit of the router itself among those who use it: requests in flight, connections, memory for bodies.

While there is room, everybody takes what they like, and one owner alone all of it. When a limit that several owners use
is nearly reached, those who hold more than their share get no more of it. One within its share still gets some: an
eighth more than the limit is kept for owners that come when others hold all of it, and each of them gets at most half
of what is left of that.
"""

from __future__ import annotations

import msgspec

from router.errors import RouterError, Saturated, ShareExceeded

KEPT_PART = 8
RETRY_S = 1.0
"""When to try again after a share was exceeded: when others need less is not known."""


def body_memory(max_bytes: int = 1 << 62) -> FairBound:
    """The bound of the bytes that requests, and responses held back, have in memory; by default, none."""
    return FairBound(max_bytes, "bytes of request bodies", "limits.max_held_bytes")


class _Holding(msgspec.Struct, gc=False):
    amount: int
    weight: float


class FairBound:
    """`what` is limited by the configuration's `key`. An owner is a tenant or the address of a client; "" stands for
    all unknown ones, which have no share together: they are served in the order in which they come."""

    def __init__(self, limit: int, what: str, key: str) -> None:
        self.limit = limit
        self.used = 0
        self._what = what
        self._key = key
        self._kept = -(-limit // KEPT_PART)
        self._free_to = limit - self._kept
        """Up to here, everybody takes what they like."""
        self._holdings: dict[str, _Holding] = {}
        self._weight = 0.0

    def take(self, owner: str, weight: float, amount: int) -> bool:
        if self.used + amount > self._free_to and not self.has_room(owner, weight, amount):
            return False
        self.add(owner, weight, amount)
        return True

    def has_room(self, owner: str, weight: float, amount: int) -> bool:
        """Whether the owner may take this amount now."""
        after = self.used + amount
        if after <= self._free_to:
            return True
        holding = self._holdings.get(owner)
        held = holding.amount if holding is not None else 0
        if held == self.used:
            return after <= self.limit
        if owner and held and held + amount > self._share(owner, weight):
            return False
        return after <= self.limit or held + amount <= self.limit + self._kept - self.used

    def add(self, owner: str, weight: float, amount: int) -> None:
        """Take this amount, whether there is room or not."""
        self.used += amount
        holding = self._holdings.get(owner)
        if holding is not None:
            holding.amount += amount
        else:
            weight = weight if owner else 0.0
            self._holdings[owner] = _Holding(amount, weight)
            self._weight += weight

    def give_back(self, owner: str, amount: int) -> None:
        self.used -= amount
        holding = self._holdings[owner]
        holding.amount -= amount
        if not holding.amount:
            del self._holdings[owner]
            self._weight = self._weight - holding.weight if self._holdings else 0.0

    def part(self, owner: str) -> float:
        """How much an owner holds for its weight: the more, the sooner it loses some of it. 0 for unknown ones."""
        holding = self._holdings.get(owner)
        return holding.amount / holding.weight if holding is not None and owner else 0.0

    def must_yield(self, other: str, owner: str, weight: float, amount: int, *, is_slow: bool) -> bool:
        """Whether another owner loses what it does not use yet for this one's amount: if it then still has more for its
        weight; what is slow, already if it has not less now."""
        held, least = self.part(other), self.part(owner)
        return held >= least if is_slow else bool(owner) and held > least + amount / weight

    @property
    def is_shared(self) -> bool:
        """Whether several owners hold some of it."""
        return len(self._holdings) > 1

    @property
    def is_full(self) -> bool:
        """Whether nobody may take anything."""
        return self.used >= self.limit + self._kept

    def refusal(self, owner: str, weight: float) -> RouterError:
        """The error for an owner that may not take more."""
        holding = self._holdings.get(owner)
        if not (owner and holding) or holding.amount == self.used or holding.amount < self._share(owner, weight):
            return Saturated(
                f"There are {self.used} {self._what}, the limit is {self.limit} ({self._key}); retry later."
            )
        share = f"{holding.amount} of {self.limit} {self._what}"
        return ShareExceeded(f"You have {share}, and others need their share ({self._key}); retry later.", RETRY_S)

    def _share(self, owner: str, weight: float) -> float:
        """What belongs to an owner while all those who hold something want more."""
        return self.limit * weight / (self._weight + (0.0 if owner in self._holdings else weight))
