"""The filters, cost terms and pickers that a policy file can name.

Explicit tables from the name in the YAML to the place of its class below `router.policy`. A new member is a class and
one line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TypeVar

from router.policy.term import Configurable, CostTerm, Filter

_Kind = TypeVar("_Kind", bound=Configurable)


def _classes(kind: type[_Kind], places: Mapping[str, str]) -> Mapping[str, type[_Kind]]:
    """The class of every place. Raises `TypeError` for a class of another kind."""
    return {name: _class_at(kind, place) for name, place in places.items()}


def _class_at(kind: type[_Kind], place: str) -> type[_Kind]:
    module, _, name = place.rpartition(".")
    found: type = getattr(import_module(f"router.policy.{module}"), name)
    if not issubclass(found, kind):
        raise TypeError(f"{place} is not a {kind.__name__}")
    return found


FILTERS: Mapping[str, type[Filter]] = _classes(
    Filter,  # type: ignore[type-abstract]
    {
        "pods": "filters.PodsFilter",
        "hardware": "filters.HardwareFilter",
        "topology": "filters.TopologyFilter",
        "max_kv_usage": "filters.MaxKvUsageFilter",
        "max_waiting": "filters.MaxWaitingFilter",
    },
)

COSTS: Mapping[str, type[CostTerm]] = _classes(
    CostTerm,  # type: ignore[type-abstract]
    {
        "queue": "costs.until_first_token.QueueTerm",
        "prefill": "costs.until_first_token.PrefillTerm",
        "hot_prefix_credit": "costs.effects.HotPrefixCreditTerm",
        "tier_read": "costs.until_first_token.TierReadTerm",
        "transfer": "costs.until_first_token.TransferTerm",
        "handoff": "costs.until_first_token.HandoffTerm",
        "decode": "costs.effects.DecodeTerm",
        "kv_wait": "costs.until_first_token.KvWaitTerm",
        "kv_pressure": "costs.effects.KvPressureTerm",
        "decode_interference": "costs.effects.DecodeInterferenceTerm",
        "congestion": "costs.effects.CongestionTerm",
        "eviction": "costs.effects.EvictionTerm",
        "warm_up": "costs.effects.WarmUpTerm",
    },
)

DELAYS = frozenset(name for name, term in COSTS.items() if term.delays)
"""Names of the terms that are time until the first token."""

PICKERS = _classes(
    Configurable,
    {
        "lowest_cost": "pickers.LowestCost",
        "in_turn": "pickers.InTurn",
        "ring_bounded_load": "pickers.RingBoundedLoad",
    },
)
