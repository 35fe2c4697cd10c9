"""Dynamo's worked example."""

from __future__ import annotations

import pytest

from router.sim.peers.peer_pickers import Dynamo
from router.types import InFlight
from tests.sim.peers.fleets import chosen, decided, fleet

NAME = "dynamo"


@pytest.mark.parametrize(("decoding", "winner"), [(1919, "holder"), (1921, "other")])
def test_the_cost_is_prefill_net_of_the_match_plus_decode(decoding: int, winner: str) -> None:
    """A prompt of 1,600 tokens. other: 320 + 1600 + 800 = 2720; holder of 50 blocks: 0 + 800 + its decode tokens."""
    there = {
        "other": InFlight(2, 1, prefill_tokens=320, context_tokens=800),
        "holder": InFlight(2, context_tokens=decoding),
    }
    assert chosen(fleet(there, {"holder": 50}), NAME) == winner


def test_the_scale_weighs_prefill_against_decode() -> None:
    """At 2: other 2 * 1600 + 0, holder 2 * 800 + 1500; at 1 the order is reversed."""
    seen = fleet({"holder": InFlight(1, context_tokens=1500), "other": InFlight()}, {"holder": 50})
    assert chosen(seen, NAME) == "other"
    assert chosen(seen, NAME, Dynamo(prefill_load_scale=2.0)) == "holder"
    assert decided(seen, NAME, Dynamo(prefill_load_scale=2.0)).reason == "lowest linear cost, 3100 tokens"
