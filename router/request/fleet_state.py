"""What one process knows of its pods, their caches and their speed, and its clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.fleet.output_lengths import OutputLengths
from router.index.seen_pictures import SeenPictures
from router.index.stored_responses import StoredResponses
from router.policy.calibrator import Calibrator
from router.stores.prefix_store import LocalStore


@dataclass(frozen=True, slots=True)
class Clock:
    """The two clocks of a front, which `request/` reads and never sets. `now_s` never goes back; `unix_s` is the time
    of day. Both in seconds; the simulator's are virtual."""

    now_s: Callable[[], float]
    unix_s: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """Each part has one owner of its facts. Feeds update them between requests; requests read them, and book."""

    fleet: Fleet
    ledger: Ledger
    breaker: Breaker
    store: LocalStore
    calibrator: Calibrator
    pictures: SeenPictures = field(default_factory=SeenPictures)
    output_lengths: OutputLengths = field(default_factory=OutputLengths)
    stored: StoredResponses = field(default_factory=StoredResponses)
