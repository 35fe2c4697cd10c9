"""Publishers of cache events"""

from __future__ import annotations

from router.observe.fast_metrics import counter, gauge

_HOLDER = "model holder"

PUBLISHER_STATE = gauge("warmroute_publisher_state", "1 for the current state of a holder, else 0.", f"{_HOLDER} state")
PUBLISHER_COMPLETE = gauge(
    "warmroute_publisher_complete", "1 if all events of the holder were received, else 0.", _HOLDER
)
PUBLISHER_PENDING = gauge(
    "warmroute_publisher_pending_blocks", "Blocks whose change is not written to Redis yet.", _HOLDER
)
PUBLISHER_WRITTEN = counter("warmroute_publisher_written_blocks", "Block changes written to Redis.", _HOLDER)
PUBLISHER_RELOADS = counter("warmroute_publisher_reloads", "Reloads of all blocks of a holder.", _HOLDER)
PUBLISHER_ORPHANS = counter(
    "warmroute_publisher_orphans", "Announced blocks dropped because their parent or tokens are unknown.", _HOLDER
)
