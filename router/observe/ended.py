"""A decision, and the request that has ended: the two values that everything that records requests encodes.

Log line, receipt, line of usage, row of the page, span and metric are functions of an `Ended`, in the modules of their
sinks. Both values only hold references, which is cheap, and never a prompt for longer than its request is served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from router.decision import Candidate, RouteDecision
from router.policy.recording import RecordedScene
from router.policy.spec import Policy
from router.types import PromptPrefix

CLIENT_GONE = "client_gone"
"""The result of a request whose client disconnected. Other results: "ok", "pod_refused" and "pod_error" for a pod's
own 4xx and 5xx responses, and the codes of the router's errors."""
MAX_CANDIDATES = 4
"""Maximum number recorded for each decision, at about 1 KiB each; the candidate that served is added."""


class Failure(msgspec.Struct, frozen=True):
    """A failed attempt: pod, code of the error, message."""

    pod: str
    error: str
    message: str = ""


class RecordedDecision(msgspec.Struct, kw_only=True, gc=False):
    """One decision, made at the Unix time `at_s`: what a replay decides again."""

    at_s: float
    scene: RecordedScene
    policy: Policy
    candidates: tuple[Candidate, ...]
    candidate_count: int
    reason: str
    providers: tuple[Candidate, ...] = ()
    """What would serve the request if no pod could; known of previews."""
    prompt: Mapping[str, Any] | None = None
    """Only with `receipts.prompts`, until the request has ended."""
    excerpt: str = ""
    """The beginning of that prompt, when the request has ended."""

    @classmethod
    def of(
        cls, scene: RecordedScene, decision: RouteDecision, policy: Policy, at_s: float, prompt: Any = None
    ) -> RecordedDecision:
        return cls(
            at_s=at_s,
            scene=scene,
            policy=policy,
            candidates=decision.candidates[:MAX_CANDIDATES],
            candidate_count=len(decision.candidates),
            reason=decision.reason,
            prompt=prompt,
        )


class UsedTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens of the engine, which a request is billed for; `estimated` names the numbers that the router estimated
    because the engine reported none, as of a stream that the client left."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Those of the prompt that came from a cache."""
    output_tokens: int = 0
    estimated: tuple[str, ...] = ()

    @property
    def computed_tokens(self) -> int:
        """The other tokens of the prompt."""
        return self.prompt_tokens - self.cached_tokens


class Ended(msgspec.Struct, frozen=True, gc=False):
    """One request that has ended. `at_s` is the Unix time of its arrival; `served` the candidate that was tried last.
    Without `decision` it ended before it was decided."""

    id: str
    at_s: float
    model: str
    endpoint: str
    result: str
    status: int = 0
    """Status of the response; 0 where none began."""
    error: str = ""
    """The message of the router's error."""
    tenant: str = ""
    """Who sent it, if that is known."""
    trace_id: str = ""
    """With `tracing.enabled`."""
    trace: object = None
    """The `RequestTrace`, if its spans are recorded."""
    phase: str = "admit"
    """The phase in which it ended."""
    is_read: bool = True
    """Whether its body was read: of others, only the endpoint and perhaps the model are known."""
    client_request_id: str = ""
    """The client's own id, cut, where it was replaced."""
    adapter: str = ""
    workload: str = ""
    """Workload class."""
    policy: str = ""
    tries: int = 0
    prompt_tokens: int = 0
    output_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    ttft_limit_ms: float | None = None
    e2e_ms: float = 0.0
    served: Candidate | None = None
    failures: tuple[Failure, ...] = ()
    continued: tuple[str, ...] = ()
    """How each later pod continued its broken stream."""
    phases_s: Mapping[str, float] = {}
    decision: RecordedDecision | None = None
    used: UsedTokens | None = None
    """Where usage is recorded."""
    name: str = ""
    """The name that its client asked for, if the model has another."""
    fallback: str = ""
    """Why a fallback of the name served it."""


EndingSink: TypeAlias = Callable[[Ended, PromptPrefix | None], None]
"""Records a request, given its prompt, too, which no sink keeps."""
