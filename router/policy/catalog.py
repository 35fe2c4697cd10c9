"""Which cost terms and pickers can a policy file name?

Explicit tables. A new member is one file with one class, and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.policy.costs.decode import Decode
from router.policy.costs.prefill import Prefill
from router.policy.costs.queue import Queue
from router.policy.costs.replicate import Replicate
from router.policy.pickers import InTurn, LowestCost, RingBoundedLoad
from router.policy.term import Configurable

COSTS: Mapping[str, type[Configurable]] = {
    "queue": Queue,
    "prefill": Prefill,
    "replicate": Replicate,
    "decode": Decode,
}

PICKERS: Mapping[str, type[Configurable]] = {
    "lowest_cost": LowestCost,
    "in_turn": InTurn,
    "ring_bounded_load": RingBoundedLoad,
}
