"""Pods in virtual time that tenants keep busy: who gets how much?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.admission.admission_queue import AdmissionConfig
from router.admission.tenant import Slo, Tenant
from router.types import InferenceRequest, Links, PodSpeed, PromptPrefix
from tests.kit.memory_front import PROMPT, TOKEN, MemoryExchange, MemoryRouter

BODY_BYTES = 4 * len(PROMPT.tokens)
TICK_S = 0.05
RETRY_S = 0.4
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":50,"completion_tokens":2}}\n\n'


@dataclass(frozen=True, eq=False)
class Kind:
    """How the clients of a tenant behave. `decode_s`: from the first of two tokens to the last."""

    tenant: str
    path: str = "/v1/chat/completions"
    fields: Mapping[str, Any] | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()
    decode_s: float = 0.0

    def body(self) -> bytes:
        """One of `BODY_BYTES`, as many as `PROMPT` has tokens."""
        fields = {"messages": [{"role": "user", "content": ""}]} if self.fields is None else self.fields
        body = json.dumps({"model": "m", "stream": True, **fields})
        return (body[:-1] + ',"user":"' + "x" * (BODY_BYTES - len(body) - 10) + '"}').encode()


@dataclass
class Client:
    """Sends a request, waits for its response, and sends the next. Refused, it tries again after a while."""

    kind: Kind
    next_s: float = 0.0
    first_token_s: float = 0.0
    exchange: MemoryExchange | None = None


class BusyPods(MemoryRouter):
    """Three pods that compute a prompt at a time, in `prefill_s`. `PROMPT` is that of every chat that can be read."""

    def __init__(self, prefill_s: float) -> None:
        super().__init__(admission=AdmissionConfig(), slo=Slo(ttft_ms=2000.0, tpot_ms=100.0, idle_prefills=3.0))
        self.known.fleet.calibrate(dict.fromkeys("abc", PodSpeed(0.0, prefill_s * 1000 / 50, 0.0)), Links())
        self._prefill_s = prefill_s
        self._free_s = dict.fromkeys("abc", self.now_s)
        self.served: Counter[str] = Counter()
        """First tokens by tenant."""

    def _tokens(self, request: InferenceRequest) -> PromptPrefix:
        is_read = "truncate_prompt_tokens" not in request.prompt and "messages" in request.prompt
        return PROMPT if is_read else None  # type: ignore[return-value]

    def run(self, seconds: float, clients: Mapping[Kind, int]) -> Counter[str]:
        """First tokens by tenant of the requests that were sent in this time."""
        self.served.clear()
        these, until_s = [Client(kind) for kind, number in clients.items() for _ in range(number)], self.now_s + seconds
        while self.now_s < until_s or any(client.exchange for client in these):
            for client in these:
                self._step(client, is_open=self.now_s < until_s)
            self.front.send_waiting()
            self.now_s += TICK_S
        return self.served

    def _step(self, client: Client, *, is_open: bool) -> None:
        exchange, kind = client.exchange, client.kind
        if exchange is None:
            if is_open and self.now_s >= client.next_s:
                tenant, headers = Tenant(name=kind.tenant), list(kind.headers)
                client.exchange = self.front.receive(kind.path, kind.body(), tenant, headers=headers)
                client.first_token_s = 0.0
        elif exchange.is_over:
            client.exchange, client.next_s = None, self.now_s + RETRY_S
        elif not exchange.asked:
            return
        elif not client.first_token_s:
            pod = exchange.asked[0]
            client.first_token_s = self._free_s[pod] = max(self._free_s[pod], self.now_s) + self._prefill_s
        elif not exchange.received and self.now_s >= client.first_token_s:
            exchange.head()
            exchange.piece(TOKEN)
            self.served[kind.tenant] += 1
        elif exchange.received and self.now_s >= client.first_token_s + kind.decode_s:
            exchange.piece(USAGE)
            exchange.end()
            client.exchange = None
