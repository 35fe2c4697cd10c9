"""One request that has ended, with all its parts, for everything that records requests.

Metrics, log lines, receipts, spans, usage and recent decisions are sinks of an `EndedRequest`. It is not kept: its
`outcome`, in numbers, may be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from router.decision import RouteDecision
from router.observe.receipts import Outcome, RecordedDecision
from router.types import PromptPrefix


class UsedTokens(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One request that ended. Tokens are those of the engine; `estimated` names the fields that the router estimated
    because the engine reported none, as of a stream that the client left."""

    id: str = ""
    """Unique: `PROCESS-NUMBER`."""
    request_id: str
    at_s: float
    """Unix time of its arrival."""
    tenant: str
    model: str
    adapter: str = ""
    endpoint: str
    status: int
    """Status of the response; 0 where none began."""
    result: str
    prompt_tokens: int
    cached_tokens: int
    """Those of the prompt that came from a cache."""
    computed_tokens: int
    """The other tokens of the prompt."""
    output_tokens: int
    ttft_ms: float | None = None
    estimated: tuple[str, ...] = ()


class EndedRequest(msgspec.Struct, kw_only=True):
    """One request. Without `recorded` it ended before it was decided."""

    outcome: Outcome
    phase: str = "admit"
    """The phase in which it ended."""
    is_read: bool = True
    """Whether its body was read: of others, only the endpoint and perhaps the model are known."""
    status: int = 0
    """Status of the response; 0 where none began."""
    error: str = ""
    """The message of the router's error."""
    tenant: str = ""
    """Who sent it, if that is known."""
    tries: int = 0
    client_request_id: str = ""
    """The client's own id, cut, where it was replaced."""
    workload: str = ""
    recorded: RecordedDecision | None = None
    decision: RouteDecision | None = None
    prompt: PromptPrefix | None = None
    used: UsedTokens | None = None
    """Where usage is recorded."""
    trace: object = None
    """With `tracing.enabled`: a `RequestTrace`."""


EndingSink: TypeAlias = Callable[[EndedRequest], None]
