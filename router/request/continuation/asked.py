"""What is a pod asked for: what the client asks for, or the chat in place of a message."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from router.apis.openai import CHAT
from router.decision import Candidate, Direct
from router.request.attempt_rules import ContinuationRules
from router.request.context import RequestContext
from router.request.continuation.answer_words import AnswerWords
from router.request.continuation.message_chat import chat_of, converts
from router.request.continuation.message_stream import MessageStream
from router.request.continuation.plan import first_body
from router.request.continuation.terms import Terms, terms_of
from router.request.inbound import Head
from router.types import Endpoint, UsageShown


class Asked(msgspec.Struct):
    """`words`: of the model, where ids are asked for. `message` writes the client's message from the stream of a
    chat."""

    endpoint: Endpoint
    head: Head
    body: bytes
    terms: Terms = Terms()
    refusal: str = ""
    """Why the stream cannot be continued."""
    words: AnswerWords | None = None
    message: MessageStream | None = None

    @property
    def first_body(self) -> bytes:
        """The body for the first pod."""
        return first_body(self.body, self.terms) if self.words is not None else self.body


def asked_of(context: RequestContext, candidate: Candidate, options: ContinuationRules) -> Asked:
    """What the pod of a candidate is asked for. A sampled message is asked for as the chat that vLLM makes of it, if
    that can be continued."""
    request = context.request
    if options.only_proven and not candidate.pod.continues:
        return Asked(request.endpoint, context.head, request.body, refusal="engine")
    words = None if request.adapter else options.words_of(request.model)
    asked = _asked(context, candidate, words, request.endpoint, request.body)
    is_message = request.endpoint is Endpoint.MESSAGES and asked.refusal == "sampled"
    if not is_message or words is None or words.messages is None or not converts(candidate.pod):
        return asked
    if not (body := chat_of(request.body, words.messages)):
        return asked
    chat = _asked(context, candidate, words, Endpoint.CHAT, body)
    if chat.refusal:
        return replace(asked, refusal=chat.refusal)
    return replace(chat, head=replace(context.head, target=CHAT.path.encode()), message=MessageStream())


def _asked(
    context: RequestContext, candidate: Candidate, words: AnswerWords | None, endpoint: Endpoint, body: bytes
) -> Asked:
    words = words if endpoint in candidate.pod.continues else None
    prompt, policy = context.prompt, context.policy
    terms = terms_of(
        endpoint,
        body,
        has_media=prompt is not None and prompt.has_media,
        holds_calls=policy is not None and policy.hold_tool_calls,
        shows_usage=context.request.usage is not UsageShown.NONE,
    )
    refusal = _refusal(context, candidate, terms, takes_ids=words is not None)
    return Asked(endpoint, context.head, body, terms, refusal, None if refusal else words)


def _refusal(context: RequestContext, candidate: Candidate, terms: Terms, *, takes_ids: bool) -> str:
    """Why a stream of this candidate cannot be continued. `takes_ids`: whether its pod has shown that it does."""
    decision = context.decision
    if terms.refusal or context.request.prompts != 1:
        return terms.refusal or "n"
    if not context.repeatable:
        return "not repeatable"
    if not isinstance(candidate.plan, Direct) or candidate.plan.pull is not None:
        return "handoff"
    if decision is None or len({one.pod.id for one in decision.candidates}) < 2:
        return "one pod"
    if candidate.pod.dp_rank is not None:
        return "rank"
    can_go_on = not terms.no_replay or (takes_ids and not terms.no_ids)
    return "" if can_go_on else terms.no_ids if takes_ids else "engine"
