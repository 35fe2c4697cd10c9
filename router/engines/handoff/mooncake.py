"""How does vLLM's MooncakeConnector hand over?

Both legs start at once and meet under a transfer id; the decode pod finds the prefill pod by its bootstrap server,
which is asked for the engine's id once in each life of it. Source: reference/protocols.md 3.3. This file never chooses
a data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from router.engines.handoff.address import host_before_port
from router.engines.handoff.body import edited
from router.engines.handoff.dialect import Dialect, Handoff, Order, Pair
from router.engines.handoff.vllm_handoff import prefill_leg
from router.engines.openai import decode
from router.types import Endpoint, Pod

USUAL_PORT = 8998
"""Of the bootstrap server."""


class _Rank(msgspec.Struct):
    engine_id: str


@dataclass(frozen=True)
class Mooncake(Dialect):
    """MooncakeConnector since 0.16."""

    order = Order.TOGETHER

    def facts_url(self, prefill: Pod) -> str | None:
        return f"{self._bootstrap(prefill)}/query"

    def parse_facts(self, answer: bytes, prefill: Pod) -> Mapping[str, Any] | None:
        """The engine of the pod's rank, or the only one; several that are not told apart give none."""
        ranks = decode(answer, dict[str, _Rank]) or {}
        only = next(iter(ranks), "") if len(ranks) == 1 else ""
        found = ranks.get(only if prefill.dp_rank is None else str(prefill.dp_rank))
        return {"engine_id": found.engine_id} if found else None

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        """Only a request that ended by its length is handed over: nothing else may end it."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": _transfer_id(pair)}
        put = {"kv_transfer_params": params, "ignore_eos": True}
        return prefill_leg(endpoint, body, put, drop=("stop", "stop_token_ids"))

    def decode_body(self, endpoint: Endpoint, body: bytes, pair: Pair, handoff: Handoff) -> bytes:
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": self._bootstrap(pair.prefill),
            "remote_engine_id": pair.facts["engine_id"],
            "transfer_id": _transfer_id(pair),
        }
        return edited(body, {"kv_transfer_params": params})

    def _bootstrap(self, prefill: Pod) -> str:
        return f"http://{host_before_port(prefill)}:{prefill.handoff_port or USUAL_PORT}"


def _transfer_id(pair: Pair) -> str:
    return f"xfer-{pair.id:016x}"
