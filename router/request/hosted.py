"""Providers in the life of a request: whether one may serve it, and what that costs.

A provider serves where no pod can (`fallbacks.py`). The most that a request can cost is counted in the budgets before
it is sent, and what it has cost when it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from router.config.provider_schema import Provider
from router.decision import Candidate, Cost, Direct
from router.engines.providers import PROVIDER_APIS, provider_body
from router.errors import ConnectFailed, UpstreamError, UpstreamTimeout
from router.fleet.breaker import Failures
from router.observe.ended import UsedTokens
from router.request.context import RequestContext
from router.types import InferenceRequest

PRIOR_TTFT_MS = 1000.0
"""Expected of a provider before its first answer."""
LEARNT_SHARE = 0.2
"""Share of the latest answer in the expected first token."""
FAILURES_TO_PAUSE, PAUSE_S = 3, 10.0
"""A provider that failed so often in a row is left out for this time."""


class NotAsked(NamedTuple):
    """Why a provider is not asked. `code`: a label of metrics."""

    provider: str
    code: str
    why: str


@dataclass(slots=True, eq=False)
class HostedModel:
    """A provider, and what attempts have shown of it: when its first token comes, and whether it fails.
    `clients_to_pause`: how many clients must cause failures in a row of which the request may be the cause, before it
    is left out for all: `probes.clients_to_eject`."""

    provider: Provider
    clients_to_pause: int = 1
    ttft_ms: float = PRIOR_TTFT_MS
    _failed: Failures = field(default_factory=Failures)
    _paused_until_s: float = 0.0

    def refusal(self, context: RequestContext, now_s: float) -> NotAsked | None:
        """Why it may not serve the request, apart from budgets."""
        name, endpoint = self.provider.name, context.request.endpoint
        if context.tenant.data_stays:
            why = f"Provider {name} is not asked, because the data of your account stays here (`data: stay`)."
            return NotAsked(name, "data_stays", why)
        if endpoint not in PROVIDER_APIS[self.provider.api].fields:
            return NotAsked(name, "endpoint", f"Provider {name} does not serve {endpoint.value}.")
        if now_s < self._paused_until_s:
            failures = self._failed.failures + self._failed.doubts
            return NotAsked(name, "failing", f"Provider {name} has failed {failures} times in a row.")
        return None

    def candidate(self, context: RequestContext, output_tokens: int) -> Candidate:
        """What is expected of it. `output_tokens`: of the answer."""
        cost = Cost.of([("prefill", self.ttft_ms)], self.ttft_ms)
        money = self.provider.price.money(context.prompt_tokens, 0, output_tokens)
        return Candidate(Direct(self.provider.pod), cost, money=money)

    def learn(self, context: RequestContext, error: BaseException | None, now_s: float) -> None:
        """From an attempt that has ended, with this error."""
        failed = self._failed
        if error is None:
            failed.restart()
        elif isinstance(error, ConnectFailed):
            failed.failures += 1
        elif isinstance(error, UpstreamError):
            failed.add_doubt(context.client, self.clients_to_pause, now_s)
        doubts = failed.doubts if len(failed.clients) >= self.clients_to_pause else 0
        if isinstance(error, UpstreamError) and failed.failures + doubts >= FAILURES_TO_PAUSE:
            self._paused_until_s = now_s + PAUSE_S
        if context.candidate is not None and context.first_token_s is not None and context.request.stream:
            ttft_ms = (context.phases.began_s + context.first_token_s - context.sent_s) * 1000
            self.ttft_ms += (ttft_ms - self.ttft_ms) * LEARNT_SHARE


Hosted: TypeAlias = Mapping[str, HostedModel]
"""All providers by name."""


def request_for(provider: Provider, request: InferenceRequest, left: tuple[str, ...], why: str) -> InferenceRequest:
    """The request as it is sent there. It may not be kept, so that no later request needs it."""
    body, most = provider_body(request, PROVIDER_APIS[provider.api], provider.model), _most_tokens(provider, request)
    fields = {"model": provider.name, "adapter": "", "prompt": {"store": False}, "max_output_tokens": most}
    return replace(request, body=body, fallbacks=left, fallback=why, **fields)


# --- money ---


def most_money(provider: Provider, context: RequestContext) -> float:
    """The most that a request of this length costs."""
    return provider.price.money(context.prompt_tokens, 0, _most_output_tokens(provider, context.request))


def money_taken(
    provider: Provider, context: RequestContext, used: UsedTokens, error: BaseException | None
) -> float | None:
    """The money that an attempt has cost, for the record of the request, too; None if that is unknown."""
    candidate, request = context.candidate, context.request
    if candidate is None or candidate.money is None:
        return 0.0
    is_unknown = "output_tokens" in used.estimated and not request.stream
    output_tokens = context.reader.size_bytes if is_unknown else used.output_tokens
    output_tokens = min(output_tokens, _most_output_tokens(provider, request))
    money = provider.price.money(used.prompt_tokens, used.cached_tokens, output_tokens)
    context.candidate = replace(candidate, money=money)
    is_silent = isinstance(error, UpstreamTimeout) or not isinstance(error, Exception | None)
    return None if is_silent and not context.status else money


def _most_output_tokens(provider: Provider, request: InferenceRequest) -> int:
    return request.choices * _most_tokens(provider, request) if request.endpoint.api.generates else 0


def _most_tokens(provider: Provider, request: InferenceRequest) -> int:
    """The longest answer that it may give, in tokens."""
    return min(request.max_output_tokens or provider.max_output_tokens, provider.max_output_tokens)
