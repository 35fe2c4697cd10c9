"""Providers in the life of a request: whether one may serve it, and what that costs.

A provider serves where no pod can (`fallbacks.py`). The most that a request can cost is counted in the budgets before
it is sent, and what it has cost when it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from router.admission.meter import MONEY_UNIT
from router.config.provider_schema import Provider
from router.decision import Candidate, Cost, Direct, ProviderOffer, RouteDecision
from router.engines.providers import PROVIDER_APIS, provider_body
from router.errors import ConnectFailed, UpstreamError, UpstreamTimeout
from router.observe.ended import UsedTokens
from router.request.context import RequestContext
from router.types import Endpoint, InferenceRequest

PRIOR_TTFT_MS = 1000.0
"""Expected of a provider before its first answer."""
LEARNT_SHARE = 0.2
"""Share of the latest answer in the expected first token."""
STAYS = "Provider {} is not asked, because the data of your account stays here (`data: stay`)."
FAILURES_TO_PAUSE, PAUSE_S = 3, 10.0
"""A provider that failed so often in a row is left out for this time."""


class Refusal(NamedTuple):
    """Why a provider is not asked. `code`: a label of metrics."""

    provider: str
    code: str
    why: str


@dataclass(slots=True, eq=False)
class HostedModel:
    """A provider, and what is learnt of it. `clients_to_pause`: how many clients must cause failures in a row of which
    the request may be the cause, before it is left out for all: `probes.clients_to_eject`."""

    provider: Provider
    clients_to_pause: int = 1
    ttft_ms: float = PRIOR_TTFT_MS
    _failures: int = 0
    _failed_clients: set[str] = field(default_factory=set)
    _paused_until_s: float = 0.0

    def refusal(self, context: RequestContext, now_s: float) -> Refusal | None:
        """Why it may not serve the request, apart from budgets."""
        name, endpoint = self.provider.name, context.request.endpoint
        if context.tenant.data_stays:
            return Refusal(name, "data_stays", STAYS.format(name))
        if not self.serves(endpoint):
            return Refusal(name, "endpoint", f"Provider {name} does not serve {endpoint.value}.")
        if now_s < self._paused_until_s:
            return Refusal(name, "failing", f"Provider {name} has failed {self._failures} times in a row.")
        return None

    def serves(self, endpoint: Endpoint) -> bool:
        return endpoint in PROVIDER_APIS[self.provider.api].fields

    def request(self, request: InferenceRequest, left: tuple[str, ...], why: str) -> InferenceRequest:
        """The request as it is sent there. It may not be kept, so that no later request needs it."""
        provider = self.provider
        body = provider_body(request, PROVIDER_APIS[provider.api], provider.model)
        most = min(request.max_output_tokens or provider.max_output_tokens, provider.max_output_tokens)
        fields = {"model": provider.name, "adapter": "", "prompt": {"store": False}, "max_output_tokens": most}
        return replace(request, body=body, fallbacks=left, fallback=why, **fields)

    def most_money(self, context: RequestContext) -> float:
        """The most that a request of this length costs."""
        return self.provider.money(context.prompt_tokens, 0, self._most_output_tokens(context.request))

    def offer(self, context: RequestContext, output_tokens: int) -> ProviderOffer:
        """What is expected of it. `output_tokens`: of the answer."""
        money = self.provider.money(context.prompt_tokens, 0, output_tokens)
        return ProviderOffer(self.provider.name, self.ttft_ms, money)

    def decision(self, context: RequestContext, output_tokens: int) -> RouteDecision:
        """The provider as the only candidate."""
        offer, cost = self.offer(context, output_tokens), Cost.of([("prefill", self.ttft_ms)], self.ttft_ms)
        plan = Direct(self.provider.pod)
        return RouteDecision("provider", "", (Candidate(plan, cost, money=offer.money),), "fallback")

    def ended(
        self, context: RequestContext, used: UsedTokens, error: BaseException | None, now_s: float
    ) -> float | None:
        """The money that an attempt has cost, for the record of the request, too; None if that is unknown. Learns from
        it."""
        self._count(context.client, error, now_s)
        candidate = context.candidate
        if candidate is None or candidate.money is None:
            return 0.0
        if context.first_token_s is not None and context.request.stream:
            ttft_ms = (context.phases.began_s + context.first_token_s - context.sent_s) * 1000
            self.ttft_ms += (ttft_ms - self.ttft_ms) * LEARNT_SHARE
        is_unknown = "output_tokens" in used.estimated and not context.request.stream
        output_tokens = context.reader.size_bytes if is_unknown else used.output_tokens
        output_tokens = min(output_tokens, self._most_output_tokens(context.request))
        money = self.provider.money(used.prompt_tokens, used.cached_tokens, output_tokens)
        context.candidate = replace(candidate, money=money)
        is_silent = isinstance(error, UpstreamTimeout) or not isinstance(error, Exception | None)
        return None if is_silent and not context.status else money

    def _count(self, client: str, error: BaseException | None, now_s: float) -> None:
        if error is None:
            self._failures, self._failed_clients = 0, set()
        elif isinstance(error, UpstreamError):
            self._failures += 1
            if len(self._failed_clients) < self.clients_to_pause:
                self._failed_clients.add(client)
            are_several = len(self._failed_clients) >= self.clients_to_pause
            if self._failures >= FAILURES_TO_PAUSE and (are_several or isinstance(error, ConnectFailed)):
                self._paused_until_s = now_s + PAUSE_S

    def _most_output_tokens(self, request: InferenceRequest) -> int:
        most = self.provider.max_output_tokens
        return request.choices * min(request.max_output_tokens or most, most) if request.endpoint.api.generates else 0


Hosted: TypeAlias = Mapping[str, HostedModel]
"""All providers by name."""


def hosted_models(providers: Iterable[Provider], clients_to_pause: int) -> Hosted:
    return {one.name: HostedModel(one, clients_to_pause) for one in providers}


def in_units(money: float) -> int:
    """In units of a meter, rounded up."""
    return ceil(money / MONEY_UNIT)
