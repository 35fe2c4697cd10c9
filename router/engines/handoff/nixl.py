"""How does vLLM's NixlConnector hand over?

The prefill pod keeps the blocks under a lease and answers where they lie; the decode pod reads them, once. Its answer
is opaque and passed on as it came. Source: reference/protocols.md 3.2. This file never keeps one handoff for another
request: stale parameters give wrong text without any error.
"""

from __future__ import annotations

from router.engines.handoff.body import edited
from router.engines.handoff.dialect import Dialect, Handoff, Pair
from router.engines.handoff.prefill_answer import read
from router.engines.handoff.vllm_handoff import prefill_leg, takes_prompt_tokens
from router.types import Endpoint

_ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Nixl(Dialect):
    """NixlConnector, and NixlPushConnector, whose answer differs only inside."""

    hold_s = 10.0
    """Of a lease of 30 s, after which the blocks may hold another prompt."""

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        return prefill_leg(endpoint, body, {"kv_transfer_params": _ASK, "return_token_ids": True})

    def read_handoff(self, endpoint: Endpoint, answer: bytes, pair: Pair) -> Handoff | None:
        told = read(answer)
        if told is None or not told.kv_transfer_params:
            return None
        return Handoff(told.kv_transfer_params, told.token_ids(), told.cached_tokens)

    def decode_body(self, endpoint: Endpoint, body: bytes, pair: Pair, handoff: Handoff) -> bytes:
        params = dict(handoff.params)
        if handoff.prompt_token_ids and endpoint is Endpoint.CHAT and takes_prompt_tokens(pair.decode):
            params["prompt_token_ids"] = handoff.prompt_token_ids
        return edited(body, {"kv_transfer_params": params})
