"""The facts that router replicas share through Redis, by row of each router. A new one is one entry here.

What is shared in another way has a module of its own: the index, fits of speeds (`stores/shared_state.py`), quotas
(`stores/quota_book.py`), ids of stored responses (`feeds/cluster_feeds.py`).
"""

from __future__ import annotations

import time
from typing import Any

from router.request.fleet_state import FleetState
from router.stores.shared_state import SharedFact
from router.types import InFlight


def shared_facts(state: FleetState) -> tuple[SharedFact[Any], ...]:
    """The facts of this router, and what it does with those of the others."""
    ledger = state.ledger
    return (
        SharedFact(  # without it, two replicas would send to the same idle pod
            name="requests of other routers",
            key="routers",
            ttl_s=1.0,
            interval_s=0.04,
            row=dict[str, InFlight],
            own=lambda: {pod: work.without_head() for pod, work in ledger.own().items()},
            merge=lambda rows: ledger.apply_replicas(rows, time.monotonic()),
        ),
    )
