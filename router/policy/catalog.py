"""Which cost terms and pickers can a policy file name?

Explicit tables. A new member is one file with one class, and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.policy.costs.decode import Decode
from router.policy.costs.displace import Displace
from router.policy.costs.handoff import Handoff
from router.policy.costs.prefill import Prefill
from router.policy.costs.queue import Queue
from router.policy.costs.replicate import Replicate
from router.policy.costs.room import Room
from router.policy.costs.stall import Stall
from router.policy.costs.tier_read import TierRead
from router.policy.costs.transfer import Transfer
from router.policy.costs.warm_up import WarmUp
from router.policy.peers.aibrix_prefix_cache import AibrixPrefixCache
from router.policy.peers.at_random import AtRandom
from router.policy.peers.dualmap import DualMap
from router.policy.peers.dynamo import Dynamo
from router.policy.peers.kubeai_chwbl import KubeaiChwbl
from router.policy.peers.llm_d import LlmD
from router.policy.peers.lmetric import LMetric
from router.policy.peers.longest_match import LongestMatch
from router.policy.peers.mooncake_conductor import MooncakeConductor
from router.policy.peers.sglang_cache_aware import SglangCacheAware
from router.policy.pickers import InTurn, LowestCost, RingBoundedLoad
from router.policy.term import Configurable

COSTS: Mapping[str, type[Configurable]] = {
    "queue": Queue,
    "prefill": Prefill,
    "replicate": Replicate,
    "tier_read": TierRead,
    "transfer": Transfer,
    "handoff": Handoff,
    "decode": Decode,
    "room": Room,
    "stall": Stall,
    "displace": Displace,
    "warm_up": WarmUp,
}

DELAYS = frozenset({"queue", "prefill", "tier_read", "transfer", "handoff", "room"})
"""Terms that are time until the first token; the others are what it is worth to spare somebody else."""

PICKERS: Mapping[str, type[Configurable]] = {
    "lowest_cost": LowestCost,
    "in_turn": InTurn,
    "ring_bounded_load": RingBoundedLoad,
    "at_random": AtRandom,
    "longest_match": LongestMatch,
    "sglang_cache_aware": SglangCacheAware,
    "dynamo": Dynamo,
    "lmetric": LMetric,
    "llm_d": LlmD,
    "aibrix_prefix_cache": AibrixPrefixCache,
    "kubeai_chwbl": KubeaiChwbl,
    "dualmap": DualMap,
    "mooncake_conductor": MooncakeConductor,
}
