"""How does vLLM's tiered offloading fetch KV from a peer?

One side channel serves both a handoff, whose legs start at once, and a pull of whatever a peer holds already. Source:
reference/protocols.md 3.6. This file never says how many blocks are worth a pull.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from router.engines.handoff.address import host
from router.engines.handoff.body import edited
from router.engines.handoff.dialect import Dialect, Handoff, Order, Pair
from router.engines.handoff.vllm_handoff import prefill_leg
from router.types import Endpoint

USUAL_PORT = 5710


@dataclass(frozen=True)
class P2p(Dialect):
    """OffloadingConnector with a secondary tier of type `p2p`. Rank r of a pod listens at its port + r."""

    order = Order.TOGETHER

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        params = {"remote_decoder": {"kv_request_id": _request_id(pair)}}
        return prefill_leg(endpoint, body, {"kv_transfer_params": params})

    def decode_body(self, endpoint: Endpoint, body: bytes, pair: Pair, handoff: Handoff) -> bytes:
        return edited(body, {"kv_transfer_params": {"remote_prefiller": self._source(pair)}})

    def pull_body(self, body: bytes, pair: Pair) -> bytes | None:
        return edited(body, {"kv_transfer_params": {"remote_kv_source": self._source(pair)}})

    def _source(self, pair: Pair) -> dict[str, Any]:
        return {
            "kv_request_id": _request_id(pair),
            "remote_host": host(pair.prefill),
            "remote_port": (pair.prefill.handoff_port or USUAL_PORT) + (pair.prefill.dp_rank or 0),
        }


def _request_id(pair: Pair) -> str:
    return f"kr-{pair.id:016x}"
