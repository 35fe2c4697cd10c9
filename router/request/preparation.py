"""Prepares a request until it may be attempted.

`prepare` is a generator: it yields what its front must do (`preparation_steps.py`), receives the answers, and returns
when the request has a decision and a place. It waits for nothing itself.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from msgspec.structs import replace

from router.prompt.pictures.uuids import SEARCHED_BYTES, may_have_uuid
from router.request.clock import Clock
from router.request.context import RequestContext
from router.request.decisions import RequestDecisions
from router.request.fleet_state import FleetState
from router.request.preparation_steps import Locate, Step, Tokens, WithoutUuids
from router.request.queues import RequestQueues
from router.request.quota_charges import QuotaCharges
from router.request.response_reader import TokenCountingReader
from router.request.token_answers import token_answer


class Preparation:
    """Prepares requests. `charges`: None where no tenant has quotas. `counts_tokens`: the tokens of streams are counted
    as they pass, because their end, with the engine's count, may never come. `trusts_uuids`: pods receive the `uuid`
    that a client gives a picture."""

    def __init__(
        self,
        state: FleetState,
        decisions: RequestDecisions,
        charges: QuotaCharges | None,
        queues: RequestQueues | None,
        clock: Clock,
        *,
        counts_tokens: bool = False,
        trusts_uuids: bool = False,
    ) -> None:
        self._fleet = state.fleet
        self._output_lengths = state.output_lengths
        self._decisions = decisions
        self._charges = charges
        self._queues = queues
        self._clock = clock
        self._counts_tokens = counts_tokens
        self._trusts_uuids = trusts_uuids

    def prepare(self, context: RequestContext) -> Generator[Step, Any, Iterator[bytes] | None]:
        """Returns the body of the router's own answer in pieces, or None: then the request may be attempted. Raises
        `RouterError`."""
        yield from self._begin(context)
        request = context.request
        if not context.stored_pod and (previous := request.prompt.get("previous_response_id")):
            context.stored_pod = (yield Locate(previous, "previous_response_id", context.tenant.name)).pod
        context.phases.enter("fingerprint", self._clock.now_s())
        if request.prompt:
            context.prompt = yield Tokens(request)
        if request.endpoint.api.is_about_tokens:
            answer, context.prompt = token_answer(request, context.prompt, self._fleet.snapshot), None
            if answer is not None:
                context.phases.enter("relay", self._clock.now_s())
                return answer
        if not self._trusts_uuids and _may_have_uuids(context):
            context.request = replace(context.request, body=(yield WithoutUuids(context.request.body)))
        self._decisions.decide(context, self._clock.now_s())
        if context.hold is not None and self._charges is not None:
            expected_tokens = self._output_lengths.expected_tokens(context.request, context.tenant.name)
            yield from self._charges.charge(context, expected_tokens)
        if self._queues is not None and context.prompt is not None:
            yield from self._queues.wait_for_place(context)
        return None

    def prepare_tunnel(self, context: RequestContext) -> Generator[Step, Any, None]:
        """The same for a connection whose bytes are not read: it is decided by load."""
        yield from self._begin(context)
        self._decisions.decide(context, self._clock.now_s())

    def _begin(self, context: RequestContext) -> Generator[Step, None, None]:
        """Count one request more of its tenant. Raises `QuotaExceeded`."""
        if self._counts_tokens and context.request.stream:
            context.reader = TokenCountingReader(context.reader.format)
        if self._charges is not None and context.tenant.quotas:
            yield from self._charges.begin(context)


def _may_have_uuids(context: RequestContext) -> bool:
    """Whether the body may have a `uuid` that an engine reads."""
    request, prompt, api = context.request, context.prompt, context.request.endpoint.api
    if not api.takes_uuids or (api.shows_pictures and prompt is not None and not prompt.has_media):
        return False
    return len(request.body) > SEARCHED_BYTES or may_have_uuid(request.body)
