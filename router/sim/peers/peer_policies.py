"""Policy files that may name a peer's picker, for `warmroute simulate` and `warmroute policy` only."""

from __future__ import annotations

from pathlib import Path

from router.policy.catalog import PICKERS
from router.policy.spec import PolicySpec, choice_model
from router.policy.term import Configurable
from router.sim.peers import peer_pickers as peers

FOLDER = Path(__file__).parent
"""One YAML file a peer, with the peer's default settings."""

PEER_PICKERS: dict[str, type[Configurable]] = {
    "at_random": peers.AtRandom,
    "longest_match": peers.LongestMatch,
    "sglang_cache_aware": peers.SglangCacheAware,
    "dynamo": peers.Dynamo,
    "lmetric": peers.LMetric,
    "llm_d": peers.LlmD,
    "aibrix_prefix_cache": peers.AibrixPrefixCache,
    "kubeai_chwbl": peers.KubeaiChwbl,
    "dualmap": peers.DualMap,
    "mooncake_conductor": peers.MooncakeConductor,
}

PeerPickerChoice = choice_model("PeerPickerChoice", {**PICKERS, **PEER_PICKERS})


class PeerPolicySpec(PolicySpec):
    """A policy file whose picker may be a peer's."""

    picker: PeerPickerChoice  # type: ignore[valid-type]
