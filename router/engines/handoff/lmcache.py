"""How does LMCache inside vLLM hand over?

The prefill pod pushes KV to the decode pod and answers with the first token; every tensor-parallel rank then reports by
ZMQ that its part has landed. The decode leg continues behind the first token, which the client gets from the prefill
leg. Source: reference/protocols.md 3.7. This file never waits for those reports: whoever sends the decode leg must
have one of each rank, since the decode pod believes to have KV before it is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from router.engines.handoff.address import host
from router.engines.handoff.body import edited
from router.engines.handoff.dialect import Dialect, Handoff, Pair
from router.engines.handoff.prefill_answer import read, whole_answer
from router.engines.handoff.vllm import prefill_leg
from router.engines.openai import decode
from router.types import Endpoint

_DEFAULT_MAX_TOKENS = 16
"""Of a completion that does not say."""


class _Asked(msgspec.Struct):
    max_tokens: int | None = _DEFAULT_MAX_TOKENS
    logprobs: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None


class _Report(msgspec.Struct):
    type: str
    req_id: str


@dataclass(frozen=True)
class LmCache(Dialect):
    """LMCacheConnectorV1 with `enable_pd`. Ports are the decode pod's, one a tensor-parallel rank."""

    init_ports: tuple[int, ...] = (7300,)
    alloc_ports: tuple[int, ...] = (7400,)

    def refuses(self, endpoint: Endpoint, body: bytes) -> str:
        if endpoint is Endpoint.CHAT:
            return "LMCache continues behind the first token, which only a completion can."
        if reason := super().refuses(endpoint, body):
            return reason
        asked = _asked(body)
        if asked is None or asked.max_tokens in (0, 1):
            return "There is nothing to decode behind the first token."
        if asked.logprobs is not None or asked.min_tokens or asked.stop:
            return "logprobs, min_tokens and stop look at an answer whose first token comes from elsewhere."
        return ""

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        spec = {
            "req_id": request_id(pair),
            "receiver_host": host(pair.decode),
            "receiver_init_port": self.init_ports,
            "receiver_alloc_port": self.alloc_ports,
        }
        params = {"ret_first_tok": True, "disagg_spec": spec}
        return prefill_leg(endpoint, body, {"kv_transfer_params": params, "return_token_ids": True})

    def read_handoff(self, endpoint: Endpoint, answer: bytes, pair: Pair) -> Handoff | None:
        told = read(answer)
        if told is None:
            return None
        if told.choice.finish_reason == "stop":
            return Handoff(cached_tokens=told.cached_tokens, answer=whole_answer(answer))
        token_ids = told.token_ids()
        first = decode(bytes((told.kv_transfer_params or {}).get("first_tok", b"")), int)
        if token_ids is None or first is None:
            return None
        return Handoff({"first_tok": first}, token_ids, told.cached_tokens, first_text=told.choice.text)

    def decode_body(self, endpoint: Endpoint, body: bytes, pair: Pair, handoff: Handoff) -> bytes:
        """The prompt grows by the first token, and what may follow shrinks by it."""
        prompt = [*(handoff.prompt_token_ids or ()), handoff.params["first_tok"]]
        asked = _asked(body)
        limit = asked.max_tokens if asked else None
        return edited(body, {"prompt": prompt} | ({} if limit is None else {"max_tokens": limit - 1}))


def request_id(pair: Pair) -> str:
    """What the reports of one handoff call it."""
    return f"pd-{pair.id:016x}"


def parse_report(message: bytes) -> str | None:
    """The `request_id` of whose KV one rank has landed; None where the message reports something else."""
    try:
        report = msgspec.msgpack.decode(message, type=_Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return report.req_id if report.type.endswith("ProxyNotif") else None


def _asked(body: bytes) -> _Asked | None:
    try:
        return msgspec.json.decode(body, type=_Asked, strict=False)
    except msgspec.DecodeError:
        return None
