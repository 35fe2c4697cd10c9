"""The filters, cost terms and pickers that a policy file can name. A new member is a class and one line here."""

from __future__ import annotations

from collections.abc import Mapping

from router.policy import filters, pickers
from router.policy.costs import effects, until_first_token
from router.policy.term import Configurable, CostTerm, Filter

FILTERS: Mapping[str, type[Filter]] = {
    "pods": filters.PodsFilter,
    "hardware": filters.HardwareFilter,
    "topology": filters.TopologyFilter,
    "max_kv_usage": filters.MaxKvUsageFilter,
    "max_waiting": filters.MaxWaitingFilter,
}

COSTS: Mapping[str, type[CostTerm]] = {
    "queue": until_first_token.QueueTerm,
    "prefill": until_first_token.PrefillTerm,
    "hot_prefix_credit": effects.HotPrefixCreditTerm,
    "tier_read": until_first_token.TierReadTerm,
    "transfer": until_first_token.TransferTerm,
    "handoff": until_first_token.HandoffTerm,
    "decode": effects.DecodeTerm,
    "kv_wait": until_first_token.KvWaitTerm,
    "held_kv": until_first_token.HeldKvTerm,
    "lent_prefill": effects.LentPrefillTerm,
    "kv_pressure": effects.KvPressureTerm,
    "decode_interference": effects.DecodeInterferenceTerm,
    "congestion": effects.CongestionTerm,
    "eviction": effects.EvictionTerm,
    "warm_up": effects.WarmUpTerm,
}

DELAYS = frozenset(name for name, term in COSTS.items() if term.delays)
"""Names of the terms that are time until the first token."""

PICKERS: Mapping[str, type[Configurable]] = {
    "lowest_cost": pickers.LowestCost,
    "in_turn": pickers.InTurn,
    "ring_bounded_load": pickers.RingBoundedLoad,
}
